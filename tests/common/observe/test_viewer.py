"""The logic of the report's viewer without a browser: its script in node, on a page that is made up."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.common.observe.test_report import LABEL, add_case, hand_made_run, report

# Elements keep what is asked of them; a plane is 320 pixels wide on the screen, and drawing does nothing.
PAGE = """
const drawn = (name) => (...given) => name === "createImageData" && { data: new Uint8Array(4 * given[0] * given[1]) };
const context = new Proxy({}, { get: (_, name) => drawn(name), set: () => true });
const element = () => ({ listeners: {}, parts: {}, dataset: {}, checked: true, value: "0", textContent: "",
  addEventListener(name, does) { this.listeners[name] = does; },
  querySelector(name) { return (this.parts[name] ??= element()); },
  getBoundingClientRect: () => ({ left: 0, top: 0, width: 320, height: 320 }), getContext: () => context });
const planes = [2, 1, 0].map((axis) => Object.assign(element(), { dataset: { axis: String(axis) } }));
const sources = CASES.map((text) => Object.assign(element(), { textContent: text })), root = element();
root.querySelector(".planes").dataset.colours = "#E69F00 #56B4E9";
const lists = { "script.case": sources, ".planes figure": planes };
globalThis.window = globalThis.addEventListener ? globalThis : { addEventListener: () => 0 };
globalThis.document = { createElement: element, activeElement: null,
  querySelector: (name) => (CASES.length ? root.querySelector(name) : null),
  querySelectorAll: (name) => lists[name] ?? [] };
globalThis.Path2D = class { moveTo() {} lineTo() {} };
const text = (name) => root.querySelector(name).textContent;
const fire = (target, name, event = {}) => target.listeners[name]({ preventDefault() {}, isPrimary: true, ...event });
const canvas = (axis) => planes[2 - axis].parts.canvas;
const places = () => [2, 1, 0].map((number) => planes[number].parts.output.textContent);
const told = [], tell = () => told.push([places(), text("#place"), text("#window")]);
"""
DRIVE = """
const timer = setInterval(() => {
  if (!text("#place")) return;
  clearInterval(timer);
  tell();
  ACTIONS
  console.log(JSON.stringify(told));
}, 5);
"""


def told(folder: Path, actions: str) -> list[Any]:
    """Return what the viewer of a run with one case says at first, and at each `tell()` of some actions."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the viewer's script")
    add_case(hand_made_run(folder))
    page = report(folder)
    program = f"(() => {{ const CASES = {json.dumps(page.scripts[:-1])};\n{PAGE}{{\n{page.scripts[-1]}\n}}"
    program += DRIVE.replace("ACTIONS", actions) + "})();"
    done = subprocess.run([node, "-"], input=program, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[Any] = json.loads(done.stdout)
    return found


def test_it_begins_where_most_foreground_is_and_tells_the_place(tmp_path: Path):
    ((places, place, window),) = told(tmp_path / "run", "")
    assert places == ["6 / 20", "5 / 16", "4 / 12"]
    # Voxel (5, 4, 3) of 2 x 3 x 4 mm from (-20, 10, 5): the truth is there, the prediction lies one beside it.
    assert place == f"L 10.0, A 22.0, S 17.0 mm; intensity about 254; prediction: background; reference: {LABEL}"
    assert window == "0 to 965"


def test_clicks_and_drags_lead_to_the_voxel_below_them(tmp_path: Path):
    # 320 pixels on the screen for 48 mm: a voxel is 13.3 x 20 in the axial plane, R and A are at the left and top.
    _, clicked, dragged, beyond = told(tmp_path / "run", """
        fire(canvas(2), "pointerdown", { clientX: 160 + 7.5 * 40 / 3, clientY: 160 - 5.5 * 20 }); tell();
        fire(canvas(2), "pointermove", { clientX: 160, clientY: 160, buttons: 0 });
        fire(canvas(1), "pointermove", { clientX: 161, clientY: 161, buttons: 1 }); tell();
        fire(canvas(0), "pointerdown", { clientX: 0, clientY: 320 }); tell();
    """)  # fmt: skip
    assert clicked[0] == ["3 / 20", "14 / 16", "4 / 12"]
    assert dragged[0] == ["10 / 20", "14 / 16", "6 / 12"]
    assert beyond[0] == ["10 / 20", "16 / 16", "1 / 12"]


def test_zoom_is_about_the_cross_hair_within_bounds(tmp_path: Path):
    _, near, far, largest = told(tmp_path / "run", """
        fire(canvas(2), "keydown", { key: "+" }); fire(root.querySelector("#larger"), "click");
        fire(canvas(2), "pointerdown", { clientX: 160 - 30, clientY: 160 }); tell();  // one voxel is 30 wide now
        fire(canvas(2), "keydown", { key: "0" });
        fire(canvas(2), "pointerdown", { clientX: 160 + 9.5 * 40 / 3, clientY: 160 + 7.5 * 20 }); tell();
        for (let n = 0; n < 20; n++) fire(canvas(2), "wheel", { ctrlKey: true, deltaY: -100 });
        fire(canvas(2), "pointerdown", { clientX: 160 + 150, clientY: 160 }); tell();  // less than one voxel away
    """)  # fmt: skip
    assert near[0] == ["7 / 20", "5 / 16", "4 / 12"]
    assert far[0] == ["1 / 20", "1 / 16", "4 / 12"]
    assert largest[0] == far[0]


def test_the_wheel_turns_slices_only_after_a_click(tmp_path: Path):
    _, before, after = told(tmp_path / "run", """
        fire(canvas(2), "wheel", { deltaY: 100 }); tell();
        document.activeElement = canvas(2);
        fire(canvas(2), "wheel", { deltaY: 100 }); tell();
    """)  # fmt: skip
    assert before[0] == ["6 / 20", "5 / 16", "4 / 12"]
    assert after[0] == ["6 / 20", "5 / 16", "3 / 12"]


def test_keys_and_sliders_move_one_axis_and_stay_inside(tmp_path: Path):
    _, keys, slid, end, ignored = told(tmp_path / "run", """
        for (const key of ["ArrowLeft", "ArrowUp", "PageUp"]) fire(canvas(1), "keydown", { key }); tell();
        planes[0].parts.input.value = "11"; fire(planes[0].parts.input, "input"); tell();
        for (let n = 0; n < 30; n++) fire(canvas(2), "keydown", { key: "PageUp" }); tell();
        fire(canvas(2), "keydown", { key: "ArrowLeft", ctrlKey: true }); fire(canvas(2), "keydown", { key: "Tab" });
        tell();
    """)  # fmt: skip
    assert keys[0] == ["7 / 20", "6 / 16", "5 / 12"]
    assert slid[0] == end[0] == ignored[0] == ["7 / 20", "6 / 16", "12 / 12"]


def test_level_and_window_are_told_and_reset(tmp_path: Path):
    _, narrow, again = told(tmp_path / "run", """
        root.querySelector("#level").value = "200"; root.querySelector("#width").value = "100";
        fire(root.querySelector("#width"), "input"); tell();
        fire(root.querySelector("#reset"), "click"); tell();
    """)  # fmt: skip
    assert narrow[2] == "150 to 250"
    assert again[2] == "0 to 965"


def test_a_page_without_cases_has_nothing_to_start(tmp_path: Path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the viewer's script")
    page = report(hand_made_run(tmp_path / "run"))
    program = f"const CASES = [];\n{PAGE}{{\n{page.scripts[-1]}\n}}"
    assert subprocess.run([node, "-"], input=program, capture_output=True, text=True, check=False).stderr == ""
