"""The report of a run in a browser: it draws, sorts and scrolls, runs no planted script and asks no network."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from common.observe.report import write_report
from tests.common.observe.test_report import IMAGE_NAME, SCRIPT_NAME, add_case, hand_made_run

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
by = pytest.importorskip("selenium.webdriver.common.by", reason="no selenium").By
keys = pytest.importorskip("selenium.webdriver.common.keys", reason="no selenium").Keys

pytestmark = pytest.mark.slow

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--window-size=1200,900", "--disable-dev-shm-usage",
)  # fmt: skip
CANVAS = "return document.querySelector('.plane[data-axis=\"{}\"] canvas').toDataURL()"

Browser = Any  # selenium is no dependency: where it is missing, mypy knows nothing of it


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start a browser that notes its requests; selenium is given the driver, so that it downloads none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser, driver = next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no browser: chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


@pytest.fixture
def page(started: Browser, tmp_path: Path) -> Browser:
    """Open the report of a hand-made run that has all there is to click on."""
    folder = hand_made_run(tmp_path / "run")
    add_case(folder)
    (folder / "heatmaps").mkdir()
    Image.linear_gradient("L").convert("RGB").save(folder / "heatmaps" / "slide.png")
    started.get("about:blank")
    for log in ("performance", "browser"):  # what the browser's own first page asked for
        started.get_log(log)
    started.get(write_report(folder).as_uri())
    return started


def find(page: Browser, selector: str) -> Any:
    return page.find_element(by.CSS_SELECTOR, selector)


def changes(page: Browser, script: str, act: Callable[[], object]) -> bool:
    before = page.execute_script(script)
    act()
    return bool(page.execute_script(script) != before)


def column(page: Browser, number: int) -> list[str]:
    return [cell.text for cell in page.find_elements(by.CSS_SELECTOR, f"#cases tbody tr > :nth-child({number})")]


def wheel(page: Browser, selector: str, way: int) -> None:
    origin = webdriver.common.actions.wheel_input.ScrollOrigin.from_element(find(page, selector))
    page.execute_script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
    webdriver.ActionChains(page).scroll_from_origin(origin, 0, way).perform()


def test_it_asks_no_network_and_runs_nothing_that_was_planted(page: Browser):
    assert page.title == "spleen fast: report of a run"
    assert page.execute_script("return window.planted") is None
    assert IMAGE_NAME in column(page, 1)
    assert SCRIPT_NAME in column(page, 1)
    assert page.get_log("browser") == []  # no error of the script, nothing that the policy refused
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert asked[0] == page.current_url
    assert all(url.startswith("data:") for url in asked[1:])


def test_the_policy_refuses_requests_and_scripts_that_are_added(page: Browser):
    refused = page.execute_async_script("""
        const done = arguments[0], refused = [];
        document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
        new Image().src = "http://127.0.0.1:9/x.png";
        fetch("http://127.0.0.1:9/").catch(() => 0);
        const script = document.createElement("script");
        script.textContent = "window.planted = true";
        document.body.append(script);
        setTimeout(() => done(refused), 200);
    """)
    assert sorted(refused) == ["connect-src", "img-src", "script-src-elem"]
    assert page.execute_script("return window.planted") is None


def test_a_click_or_a_key_on_a_heading_sorts(page: Browser):
    assert column(page, 2) == ["0.2500", "0.5000", "0.7500", "0.8500", "0.9500"]
    buttons = page.find_elements(by.CSS_SELECTOR, "#cases th button")
    buttons[1].click()
    assert column(page, 2) == ["0.9500", "0.8500", "0.7500", "0.5000", "0.2500"]
    assert find(page, "#cases th[aria-sort]").get_attribute("aria-sort") == "descending"
    buttons[0].send_keys(keys.ENTER)
    names = [name for name in column(page, 1) if name.isalpha()]
    assert names == ["bad", "fair", "good"]
    buttons[0].send_keys(keys.SPACE)
    assert [name for name in column(page, 1) if name.isalpha()] == ["good", "fair", "bad"]


def test_the_curves_are_drawn_and_read_out(page: Browser):
    charts = page.find_elements(by.CSS_SELECTOR, "figure.chart")
    assert [len(chart.find_elements(by.CSS_SELECTOR, "polyline")) for chart in charts] == [1, 1, 2]
    assert charts[0].find_element(by.CSS_SELECTOR, "output").text == "epoch 3: loss 0.1000"
    charts[0].find_element(by.CSS_SELECTOR, "svg").send_keys(keys.ARROW_LEFT, keys.ARROW_LEFT)
    assert charts[0].find_element(by.CSS_SELECTOR, "output").text == "epoch 2: loss 0.3000 (0.200 to 0.400)"
    webdriver.ActionChains(page).move_to_element_with_offset(charts[1], -150, 0).perform()
    assert charts[1].find_element(by.CSS_SELECTOR, "output").text == "epoch 1: dice -"


def test_on_a_logarithmic_axis_equal_ratios_are_equally_far(page: Browser):
    height = """return [...document.querySelectorAll("figure.chart")[0].querySelectorAll("circle")]
        .map((circle) => Number(circle.getAttribute("cy")))"""
    first, second, third = page.execute_script(height)
    assert (third - second) / (second - first) == pytest.approx(0.2 / 0.7, rel=1e-3)  # 1, 0.3, 0.1
    find(page, "#log").click()
    first, second, third = page.execute_script(height)
    assert (third - second) / (second - first) == pytest.approx(0.9125, rel=1e-3)  # log 3 / log(10 / 3)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_follow_slider_keys_and_wheel(page: Browser, axis: int):
    plane, picture = f'.plane[data-axis="{axis}"]', CANVAS.format(axis)
    number, last = f"{plane} output", (20, 16, 12)[axis]
    start = int(find(page, number).text.split(" / ")[0])
    assert changes(page, picture, lambda: find(page, f"{plane} input").send_keys(keys.ARROW_RIGHT))
    assert find(page, number).text == f"{start + 1} / {last}"
    canvas = find(page, f"{plane} canvas")
    assert changes(page, picture, lambda: canvas.send_keys(keys.ARROW_DOWN))
    assert find(page, number).text == f"{start} / {last}"
    assert changes(page, picture, lambda: wheel(page, f"{plane} canvas", -100))
    assert find(page, number).text == f"{start + 1} / {last}"
    canvas.send_keys(keys.END, keys.ARROW_UP)
    assert find(page, number).text == f"{last} / {last}"


def test_truth_prediction_opacity_and_cross_hair_are_switched(page: Browser):
    find(page, '.plane[data-axis="0"] canvas').send_keys(keys.ARROW_UP)  # x = 6, where truth and prediction are
    for axis in range(3):
        for name in ("show-prediction", "show-truth", "show-cross"):
            assert changes(page, CANVAS.format(axis), find(page, f"#{name}").click)
        assert not changes(page, CANVAS.format(axis), lambda: find(page, "#opacity").send_keys(keys.ARROW_LEFT))
        for name in ("show-prediction", "show-truth", "show-cross"):
            assert changes(page, CANVAS.format(axis), find(page, f"#{name}").click)
        assert changes(page, CANVAS.format(axis), lambda: find(page, "#opacity").send_keys(keys.ARROW_LEFT))


def test_the_planes_show_the_voxels_in_their_places(page: Browser):
    for name in ("show-prediction", "show-truth", "show-cross"):
        find(page, f"#{name}").click()
    # A row of the axial plane: x falls from left to right, since the patient's right is on the left; y 11, z 3.
    row = """const canvas = document.querySelector('.plane[data-axis="2"] canvas');
        const pixels = canvas.getContext("2d").getImageData(0, (4.5 / 16) * canvas.height, canvas.width, 1).data;
        return [...Array(20).keys()].map((n) => pixels[4 * Math.round(((n + 0.5) * canvas.width) / 20)])"""
    found = page.execute_script(row)
    expected = [255 * (40 * x + 10 * 11 + 5 * 3) / (40 * 19 + 10 * 15 + 5 * 11) for x in range(20)]
    assert found == pytest.approx(expected[::-1], abs=4)
    find(page, "#show-prediction").click()
    find(page, "#opacity").send_keys(keys.END)
    canvas = find(page, '.plane[data-axis="2"] canvas')
    box = canvas.rect
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    middle = ((19 - 6 + 0.5) / 20 - 0.5) * box["width"], ((15 - 6 + 0.5) / 16 - 0.5) * box["height"]  # voxel (6, 6)
    webdriver.ActionChains(page).move_to_element_with_offset(canvas, *map(round, middle)).click().perform()
    assert find(page, '.plane[data-axis="0"] output').text == "7 / 20"
    assert find(page, '.plane[data-axis="1"] output').text == "7 / 16"
    assert find(page, "#voxel").text == "At the cross-hair: truth <s>spleen</s>, prediction <s>spleen</s>."
    find(page, '.plane[data-axis="0"] canvas').send_keys(keys.ARROW_LEFT)  # x = 5: the prediction begins at 6
    assert find(page, "#voxel").text == "At the cross-hair: truth <s>spleen</s>, prediction background."
    labelled = """const canvas = document.querySelector('.plane[data-axis="2"] canvas');
        const at = (x) => Math.round(((19.5 - x) * canvas.width) / 20), y = Math.round((9.5 * canvas.height) / 16);
        return [5, 6, 12, 13].map((x) => [...canvas.getContext("2d").getImageData(at(x), y, 1, 1).data.slice(0, 3)])"""
    before, first, last, after = page.execute_script(labelled)
    assert first == last == [0xE6, 0x9F, 0x00]
    assert before[0] == before[2]
    assert after[0] == after[2]


def test_a_heat_map_is_zoomed_and_moved(page: Browser):
    moved = "return document.querySelector('.zoom img').style.transform"
    assert page.execute_script(moved) == "translate(0px, 0px) scale(1)"
    assert changes(page, moved, lambda: wheel(page, ".zoom .frame", -100))
    assert page.execute_script(moved).endswith("scale(1.2)")
    frame = find(page, ".zoom .frame")
    drag = webdriver.ActionChains(page).move_to_element(frame).click_and_hold().move_by_offset(25, 10).release()
    assert changes(page, moved, drag.perform)
    frame.send_keys("0")
    assert page.execute_script(moved) == "translate(0px, 0px) scale(1)"
    frame.send_keys("+", "+")
    assert page.execute_script(moved).endswith("scale(1.44)")


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(page: Browser, width: int):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wide = page.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide[0] == wide[1]


def test_on_paper_the_folded_parts_are_open(page: Browser):
    opened = "return [...document.querySelectorAll('details')].map((part) => part.open)"
    assert page.execute_script(opened) == [False] * 5
    page.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert page.execute_script(opened) == [True] * 5
