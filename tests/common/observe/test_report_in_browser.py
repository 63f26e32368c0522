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

from medspeed.common.observe.report import write_report
from tests.common.observe.test_report import IMAGE_NAME, SCRIPT_NAME, add_case, hand_made_run

pytestmark = pytest.mark.slow

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--window-size=1200,900", "--disable-dev-shm-usage",
)  # fmt: skip
# The colours in the axial plane of the voxels x of the row y 11; x falls from left to right: R is on the left.
COLOURS = """const canvas = document.querySelector('[data-axis="2"] canvas'), [xs, y] = arguments;
    const at = (x) => canvas.getContext("2d").getImageData(4 * (19 - x) + 2, 4 * (15 - y) + 2, 1, 1).data;
    return xs.map((x) => [...at(x).slice(0, 3)])"""


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
    started.get("about:blank")
    for log in ("performance", "browser"):  # what the browser's own first page asked for
        started.get_log(log)
    started.get(write_report(folder).as_uri())
    return started


def find(page: webdriver.Chrome, selector: str) -> Any:
    return page.find_element(By.CSS_SELECTOR, selector)


def place(page: webdriver.Chrome) -> list[str]:
    return [find(page, f'[data-axis="{axis}"] output').text for axis in range(3)]


def test_it_asks_no_network_and_runs_nothing_that_was_planted(page: webdriver.Chrome):
    assert page.title == "spleen fast: report of a run"
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
    box = canvas.rect
    away = ((19 - 2 + 0.5) / 20 - 0.5) * box["width"], ((15 - 13 + 0.5) / 16 - 0.5) * box["height"]  # voxel (2, 13)
    webdriver.ActionChains(page).move_to_element_with_offset(canvas, *map(round, away)).click().perform()
    assert place(page) == ["3 / 20", "14 / 16", "12 / 12"]


def test_the_planes_show_voxels_labels_and_outlines_in_their_places(page: webdriver.Chrome):
    grey = [round(255 * (40 * x + 10 * 6 + 5 * 3) / (40 * 19 + 10 * 15 + 5 * 11)) for x in range(20)]  # y 6, z 3
    shown = page.execute_script(COLOURS, [3, 5, 6, 11, 12, 13], 6)
    orange = [0xE6, 0x9F, 0x00]
    mixed = [[0.55 * grey[x] + 0.45 * part for part in orange] for x in (6, 11, 12)]
    for found, expected in zip(shown[2:5], mixed, strict=True):  # the prediction goes from 6 to 12
        assert found == pytest.approx(expected, abs=2)
    for x, found in ((3, shown[0]), (5, shown[1]), (13, shown[5])):
        assert found == pytest.approx([grey[x]] * 3, abs=2)
    find(page, "#show-prediction").click()
    for x, found in zip((6, 12), page.execute_script(COLOURS, [6, 12], 6), strict=True):
        assert found == pytest.approx([grey[x]] * 3, abs=2)
    edge = """const canvas = document.querySelector('[data-axis="2"] canvas');
        return [...canvas.getContext("2d").getImageData(4 * 8, 4 * 9, 1, 1).data]"""
    assert page.execute_script(edge)[:3] == orange  # the outer pixel of the truth's last voxel, x 11
    find(page, "#show-truth").click()
    assert page.execute_script(edge)[:3] == pytest.approx([grey[11]] * 3, abs=2)


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(page: webdriver.Chrome, width: int):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wide = page.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide[0] == wide[1]
