"""The report of a run in a browser: its viewer works, no planted script runs, and nothing leaves the page."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.common.observe.test_report import IMAGE_NAME, SCRIPT_NAME, add_case, hand_made_run, written

pytestmark = pytest.mark.slow

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--window-size=1200,900", "--disable-dev-shm-usage",
)  # fmt: skip
# The axial plane has 640 pixels for 48 mm, the case's longest side; its voxels are 2 x 3 mm, 20 x 16 of them.
WIDTH, HEIGHT = 2 * 640 / 48, 3 * 640 / 48  # of a voxel in pixels
COLOURS = """const canvas = document.querySelector('[data-axis="2"] canvas');
    return arguments[0].map((at) => [...canvas.getContext("2d").getImageData(...at, 1, 1).data.slice(0, 3)])"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
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
def page(started: webdriver.Chrome, tmp_path: Path) -> webdriver.Chrome:
    """Open the report of a hand-made run that has all there is to click on."""
    folder = hand_made_run(tmp_path / "run")
    add_case(folder)
    add_case(folder, "good")
    started.get("about:blank")
    for log in ("performance", "browser"):  # what the browser's own first page asked for
        started.get_log(log)
    started.get(written(folder).as_uri())
    WebDriverWait(started, 30).until(lambda page: find(page, "#place").text)  # its volumes are unpacked
    return started


def find(page: webdriver.Chrome, selector: str) -> Any:
    return page.find_element(By.CSS_SELECTOR, selector)


def pixel(x: float, y: float) -> tuple[float, float]:
    """Return where a voxel's middle lies in the axial plane: x falls from left to right, since R is on the left."""
    return 320 - (x + 0.5 - 10) * WIDTH, 320 - (y + 0.5 - 8) * HEIGHT


def colours(page: webdriver.Chrome, *voxels: tuple[float, float]) -> list[list[int]]:
    found: list[list[int]] = page.execute_script(COLOURS, [[int(each) for each in pixel(*at)] for at in voxels])
    return found


def press(page: webdriver.Chrome, *keys: str, axis: int = 2) -> None:
    find(page, f'[data-axis="{axis}"] canvas').send_keys(*keys)


def place(page: webdriver.Chrome) -> list[str]:
    return [find(page, f'[data-axis="{axis}"] output').text for axis in range(3)]


def test_it_asks_no_network_and_runs_nothing_that_was_planted(page: webdriver.Chrome):
    assert page.title == "run · spleen fast"
    assert page.execute_script("return window.planted") is None
    names = [cell.text for cell in page.find_elements(By.CSS_SELECTOR, "tbody th")]
    assert {IMAGE_NAME, SCRIPT_NAME} <= set(names)
    assert page.get_log("browser") == []  # no error of the script, nothing that the policy refused
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert asked[0] == page.current_url
    assert all(url.startswith("data:") for url in asked[1:])


def test_the_policy_refuses_requests_and_scripts_that_are_added(page: webdriver.Chrome):
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


def test_slices_follow_the_sliders_and_a_click(page: webdriver.Chrome):
    assert place(page) == ["6 / 20", "5 / 16", "4 / 12"]  # where there is most foreground
    for axis in range(3):
        find(page, f'[data-axis="{axis}"] input').send_keys(Keys.ARROW_RIGHT)
    assert place(page) == ["7 / 20", "6 / 16", "5 / 12"]
    find(page, '[data-axis="2"] input').send_keys(Keys.END)
    assert place(page)[2] == "12 / 12"
    canvas = find(page, '[data-axis="2"] canvas')
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    scale = canvas.rect["width"] / 640
    assert canvas.rect["height"] == pytest.approx(canvas.rect["width"])
    away = [round((at - 320) * scale) for at in pixel(2, 13)]
    webdriver.ActionChains(page).move_to_element_with_offset(canvas, *away).click().perform()
    assert place(page) == ["3 / 20", "14 / 16", "12 / 12"]


def test_the_place_is_told_in_mm_with_its_labels_and_keys_move_it(page: webdriver.Chrome):
    # Voxel (5, 4, 3): its middle is at -20 + 5 * 2, 10 + 4 * 3, 5 + 3 * 4; 255 shades for 0 to 965.
    told = find(page, "#place").text
    read = "L 10.0, A 22.0, S 17.0 mm; intensity about 254; prediction: background; reference: </script>"
    assert told.startswith(read)
    press(page, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_UP, Keys.PAGE_DOWN)
    assert place(page) == ["8 / 20", "6 / 16", "3 / 12"]
    assert find(page, "#place").text.startswith("L 6.0, A 25.0, S 13.0 mm")
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.PAGE_UP, axis=0)  # there right is posterior
    assert place(page) == ["9 / 20", "5 / 16", "2 / 12"]


def test_zoom_goes_to_the_cross_hair_and_back_by_keys_buttons_and_wheel(page: webdriver.Chrome):
    def zoom() -> float:
        """Return how much larger than at first a voxel is drawn, by where a click to the right of the middle leads."""
        canvas = find(page, '[data-axis="2"] canvas')
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        before = int(place(page)[0].split()[0])
        away = round(canvas.rect["width"] / 640 * 4.25 * WIDTH)
        webdriver.ActionChains(page).move_to_element_with_offset(canvas, away, 0).click().perform()
        return 4.25 / (before - int(place(page)[0].split()[0]))

    find(page, "#larger").click()
    find(page, "#larger").click()  # 2.25 times as large
    assert 1.5 < zoom() < 3
    find(page, "#reset").click()
    press(page, *[Keys.ARROW_LEFT] * 4)
    wheel = """const turn = (key) => new WheelEvent("wheel", { deltaY: -140, ctrlKey: key, cancelable: true });
        const canvas = document.querySelector('[data-axis="2"] canvas');
        canvas.blur();
        return [false, true].map((key) => canvas.dispatchEvent(turn(key)))"""
    before = place(page)
    assert page.execute_script(wheel) == [True, False]  # without the key the page scrolls
    assert place(page) == before
    assert 1.5 < zoom() < 3


def test_level_and_window_change_the_greys(page: webdriver.Chrome):
    assert find(page, "#window").text == "0 to 965"
    voxel = (2, 12)
    (first,) = colours(page, voxel)
    assert first == pytest.approx([round(255 * (40 * 2 + 10 * 12 + 5 * 3) / 965)] * 3, abs=2)
    page.execute_script("const slider = document.querySelector('#width'); slider.value = 965 / 2;"
                        "slider.dispatchEvent(new Event('input'))")  # fmt: skip
    (second,) = colours(page, voxel)
    assert second == pytest.approx([255 * (215 - 241) / 482.5] * 3, abs=2) or second == [0, 0, 0]
    assert find(page, "#window").text == "241 to 724"
    find(page, "#reset").click()
    assert colours(page, voxel) == [first]


def test_another_case_is_a_choice_away(page: webdriver.Chrome):
    choice = find(page, "#case")
    press(page, Keys.ARROW_LEFT)
    Select(choice).select_by_visible_text("good (0.9500)")
    WebDriverWait(page, 30).until(lambda page: place(page)[0] == "6 / 20")  # where it begins
    find(page, 'a[data-case="0"]').click()
    assert choice.get_attribute("value") == "0"


def test_the_planes_show_voxels_labels_and_outlines_in_their_places(page: webdriver.Chrome):
    grey = [round(255 * (40 * x + 10 * 6 + 5 * 3) / (40 * 19 + 10 * 15 + 5 * 11)) for x in range(20)]  # y 6, z 3
    shown = colours(page, *((x, 6) for x in (3, 4, 6, 11, 12, 13)))
    orange = [0xE6, 0x9F, 0x00]
    mixed = [[0.55 * grey[x] + 0.45 * part for part in orange] for x in (6, 11, 12)]
    for found, expected in zip(shown[2:5], mixed, strict=True):  # the prediction goes from 6 to 12
        assert found == pytest.approx(expected, abs=3)
    for x, found in ((3, shown[0]), (4, shown[1]), (13, shown[5])):
        assert found == pytest.approx([grey[x]] * 3, abs=2)
    find(page, "#show-prediction").click()
    for x, found in zip((6, 12), colours(page, (6, 6), (12, 6)), strict=True):
        assert found == pytest.approx([grey[x]] * 3, abs=2)
    edge = (11.5, 6)  # between the truth's last voxel and the next
    assert colours(page, edge) == [orange]
    find(page, "#show-truth").click()
    assert colours(page, edge)[0] == pytest.approx([(grey[11] + grey[12]) / 2] * 3, abs=2)


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_window(page: webdriver.Chrome, width: int):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wide = page.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide[0] == wide[1]
