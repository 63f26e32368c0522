"""The report of a run: one file that opens anywhere, without a network, and that can be mailed."""

from pathlib import Path
from typing import Any

from common.files import write_text
from common.observe.figures import one_line
from common.observe.overlays import LABEL_COLOURS
from common.observe.report_case import CASE_FILE, embed_volume, read_report_case
from common.observe.report_files import RunFiles, number, read_run
from common.observe.report_head import head
from common.observe.report_page import Html, element, joined, page
from common.observe.report_parts import cases, details, exports, time_budget, worst_cases
from common.observe.report_pictures import Pictures

_WORST = 3  # cases whose overlay is shown
_SPEED = {"seconds", "samples_per_second", "waited", "computed", "saved", "logged"}
_NO_METRIC = {"epoch", "step", "losses", "loss", *_SPEED}  # what else an epoch's record holds was validated
_PLANES = ("sagittal", "coronal", "axial")  # by the axis they cut
_CURVES = "The band goes from the lowest to the highest loss of an epoch's steps; the ring marks the best validation."
_PRIVACY = (
    "This file holds pictures and names of cases, paths and the command line: mail it only where your data may go. "
    "Not for clinical use."
)


def write_report(directory: Path) -> Path:
    """Write `report.html` into a run folder, from the files that the run has left there; return its path.

    Of a run that is incomplete it shows what there is and says what is missing. It stays below 8 MB for hundreds of
    cases and thousands of epochs.

    Args:
        directory: a run folder. Besides the files that every run writes, `report_case.npz` (see `write_report_case`)
            gives the report a viewer, `monitor.png` and `heatmaps/*.png` are shown where they are.

    Raises:
        FileNotFoundError: the folder is none of a run.
        OSError: it cannot be read or written, or the disk is full.
    """
    run, pictures = read_run(directory), Pictures()
    data: dict[str, Any] = {"charts": _charts(run.epochs)}
    overlays = sorted((directory / "overlays").glob("*.png"))
    by_name = {path.stem: path for path in overlays}
    worst = [by_name[name] for name, _ in worst_cases(run) if name in by_name][:_WORST]
    shown = [picture for path in worst if (picture := pictures.embed(path)) is not None]
    refused, pictures.left_out = pictures.left_out, []
    sections = [
        head(run),
        _curves(run, data["charts"], pictures),
        time_budget(run),
        _monitor(directory, pictures),
        cases(run, shown, len(overlays), refused),
        _viewer(run, data),
        _heatmaps(directory, pictures),
        exports(run),
        details(run),
        element("footer", element("p", _PRIVACY)),
    ]
    title = " ".join(str(run.summary.get(name, "")) for name in ("app", "recipe")).strip() or directory.resolve().name
    body = element("main", joined(section for section in sections if section is not None))
    path = directory / "report.html"
    write_text(path, page(f"{title}: report of a run", body, data))
    return path


def _charts(epochs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the script draws: for each chart its curves over the epochs; null where there is no number."""
    xs = [number(epoch.get("epoch")) for epoch in epochs]
    known = [epoch for epoch, x in zip(epochs, xs, strict=True) if x is not None]
    places = [x for x in xs if x is not None]

    def curve(name: str) -> dict[str, Any]:
        return {"name": name, "values": [number(epoch.get(name)) for epoch in known]}

    names = dict.fromkeys(name for epoch in known for name in epoch if name not in _NO_METRIC)
    charts: list[dict[str, Any]] = [
        {"title": "loss", "log": True, "curves": [{**curve("loss"), **_span(known)}]},
        {"title": "validation", "best": True, "curves": [curve(name) for name in names]},
        {"title": "seconds per epoch", "zero": True, "curves": [curve("seconds"), curve("waited")]},
    ]
    for chart in charts:
        chart["curves"] = [each for each in chart["curves"] if any(value is not None for value in each["values"])]
        chart["epochs"] = places
    return [chart for chart in charts if chart["curves"]]


def _span(epochs: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return the lowest and the highest loss of a step in each epoch."""
    steps = [epoch.get("losses") for epoch in epochs]
    finite = [
        [value for each in losses if (value := number(each)) is not None] if isinstance(losses, list) else []
        for losses in steps
    ]
    return {
        "low": [min(values, default=None) for values in finite],
        "high": [max(values, default=None) for values in finite],
    }


def _curves(run: RunFiles, charts: list[dict[str, Any]], pictures: Pictures) -> Html | None:
    if not charts:
        return None
    figures = []
    for place, chart in enumerate(charts):
        title, toggle = str(chart["title"]), None
        if chart.get("log"):
            toggle = element("label", element("input", type="checkbox", id="log"), "logarithmic", class_="toggle")
        caption = element("figcaption", element("strong", title), element("output", aria_live="off"), toggle)
        svg = element("svg", role="img", tabindex=0, aria_label=f"{title} over the epochs; arrow keys read the values")
        figures.append(element("figure", caption, svg, class_="chart", data_chart=place))
    progress = run.directory / "progress.png"
    still = pictures.embed(progress) if progress.is_file() else None
    noscript = element("noscript", still) if still is not None else None
    note = element("p", _CURVES, class_="note")
    return element("section", element("h2", "Curves"), note, element("div", *figures, class_="charts"), noscript)


def _monitor(directory: Path, pictures: Pictures) -> Html | None:
    path = directory / "monitor.png"
    if not path.is_file():
        return None
    picture = pictures.embed(path)
    return element("section", element("h2", "Monitor"), element("figure", picture), *_left_out(pictures))


def _viewer(run: RunFiles, data: dict[str, Any]) -> Html | None:
    path = run.directory / CASE_FILE
    if not path.is_file():
        return None
    heading = element("h2", "Look at a case")
    try:
        case = read_report_case(path)
    except ValueError as error:
        return element("section", heading, element("p", one_line(str(error), 200), class_="note"))
    volume = embed_volume(case.image, case.label, case.prediction, case.spacing)
    sides = " x ".join(f"{side:.1f}" for side in volume["spacing"])
    names = {str(label): run.label_names[label] for label in volume["labels"] if label < len(run.label_names)}
    data["volume"] = {**volume, "case": case.name, "names": names, "colours": list(LABEL_COLOURS)}
    opacity = element("input", type="range", id="opacity", min=0, max=100, value=45)
    planes = (_plane(axis) for axis in (2, 1, 0))
    return element(
        "section",
        heading,
        element("p", f"{case.name}: voxels of {sides} mm" if case.name else f"voxels of {sides} mm"),
        element("div", *planes, class_="planes"),
        element(
            "div",
            _toggle("show-prediction", "prediction (filled)"),
            _toggle("show-truth", "truth (outlined)"),
            _toggle("show-cross", "cross-hair"),
            element("label", "opacity", opacity, class_="toggle"),
            class_="controls",
        ),
        element("ul", id="legend", class_="legend"),
        element("p", element("output", id="voxel"), class_="note"),
        element("p", "Wheel, slider or arrow keys go through the slices; a click moves the cross-hair.", class_="note"),
        id="viewer",
    )


def _plane(axis: int) -> Html:
    name = _PLANES[axis]
    return element(
        "figure",
        element("figcaption", element("strong", name), element("output", aria_live="off")),
        element("canvas", tabindex=0, role="img", aria_label=f"{name} slice; arrow keys go through the slices"),
        element("input", type="range", min=0, value=0, aria_label=f"{name} slice"),
        class_="plane",
        data_axis=axis,
    )


def _toggle(identity: str, text: str) -> Html:
    return element("label", element("input", type="checkbox", id=identity, checked=True), text, class_="toggle")


def _heatmaps(directory: Path, pictures: Pictures) -> Html | None:
    paths = sorted((directory / "heatmaps").glob("*.png"))
    if not paths:
        return None
    figures = []
    for path in paths:
        picture = pictures.embed(path, draggable="false")
        if picture is not None:
            frame = element("div", picture, class_="frame", tabindex=0, role="group", aria_label=f"{path.stem}: zoom")
            figures.append(element("figure", element("figcaption", path.stem), frame, class_="zoom"))
    note = f"{len(figures)} of {len(paths)} heat maps. Wheel, + and - zoom; dragging and arrow keys move; 0 resets."
    return element(
        "section", element("h2", "Heat maps"), element("p", note, class_="note"), *figures, *_left_out(pictures)
    )


def _left_out(pictures: Pictures) -> list[Html]:
    lines, pictures.left_out = pictures.left_out, []
    return [element("p", line, class_="note") for line in lines]
