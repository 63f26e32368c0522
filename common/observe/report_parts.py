"""The parts of a report that are tables: time budget, cases, exports, details."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.observe.report_files import RunFiles, flat, mapping, number
from common.observe.report_page import Html, collapsible, element, preformatted, sortable, table

_STAGES = ("start", "prepare", "cache", "compile", "train", "validate", "export")  # in the order they run
_BAR_COLOURS = 8  # classes part-0 to part-7 in report.css
_LOG_TAIL = 20_000  # characters


def time_budget(run: RunFiles) -> Html | None:
    """Return where the seconds went, as a bar and a table, and how long the training waited for batches."""
    parts, total = stages(mapping(run.summary.get("seconds")))
    if total <= 0:
        return None
    bar, left = [], 0.0
    for place, (name, seconds) in enumerate(parts):
        share = 100 * seconds / total
        tip = element("title", f"{name}: {seconds:.1f} s, {share:.1f} %")
        colour = f"part-{place % _BAR_COLOURS}"
        bar.append(element("rect", tip, x=f"{left:.3f}%", width=f"{share:.3f}%", height="100%", class_=colour))
        left += share
    rows = [
        (_with_swatch(place, name), *_seconds_and_share(seconds, total)) for place, (name, seconds) in enumerate(parts)
    ]
    columns = ("stage", *(element("th", name, scope="col", class_="number") for name in ("seconds", "share")))
    return element(
        "section",
        element("h2", "Time"),
        element("p", f"{_duration(total)} from the start of the process to its summary."),
        element("svg", *bar, class_="bar", role="img", aria_label="seconds by stage; the table below holds them"),
        table(columns, [*rows, ("total", *_seconds_and_share(total, total))], class_="figures"),
        _waiting(run.epochs),
    )


def stages(seconds: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Return the seconds of each stage, in the order they run and with the `rest` of the total, and the total."""
    found = {name: value for name, each in seconds.items() if (value := number(each)) is not None and value >= 0}
    known = [name for name in _STAGES if name in found]
    names = known + [name for name in found if name not in known and name != "total"]
    parts = [(name, found[name]) for name in names]
    spent = sum(value for _, value in parts)
    total = max(found.get("total", spent), spent)
    return [*parts, ("rest", total - spent)], total


def worst_cases(run: RunFiles) -> list[tuple[str, float | None]]:
    """Return name and quality of each case, the worst first; a case without a value is worse than any."""
    each = mapping(mapping(run.summary.get("quality")).get("per_case"))
    found = [(name, number(value)) for name, value in each.items()]
    return sorted(found, key=lambda case: (case[1] is not None, case[1] or 0.0, case[0]))


def cases(run: RunFiles, pictures: list[Html], in_folder: int, left_out: list[str]) -> Html | None:
    """Return the quality of each case and each region, and the pictures of the worst.

    Args:
        run: its files.
        pictures: overlays of the worst cases.
        in_folder: overlays that the run folder holds.
        left_out: a line for each picture that is not shown.
    """
    quality, ranked = mapping(run.summary.get("quality")), worst_cases(run)
    if not ranked:
        return None
    regions = mapping(quality.get("per_region"))
    # An app that judges patches has figures of all of them together, and no regions.
    kind, heading, order = ("case", "Cases", "ascending") if regions else ("figure", "Figures", None)
    listed = ranked if regions else [(name, number(value)) for name, value in mapping(quality["per_case"]).items()]
    rows = [(name, _shown(value), _meter(value)) for name, value in listed]
    columns = (sortable(kind, "text"), sortable("value", "number", order), "")
    shown = None
    if in_folder:
        text = f"The worst {len(pictures)} cases; overlays/ in the run folder holds {in_folder} pictures."
        shown = element("p", text, class_="note")
    return element(
        "section",
        element("h2", heading),
        _regions(regions),
        table(columns, rows, class_="sortable figures", id="cases"),
        shown,
        *(element("figure", picture, class_="overlay") for picture in pictures),
        *(element("p", line, class_="note") for line in left_out),
    )


def exports(run: RunFiles) -> Html | None:
    """Return the table of ONNX models and engines: how far each is from torch, and whether it ran."""
    rows = [
        *(_export_row("ONNX", record, run.directory) for record in _by_precision(run.summary.get("onnx"))),
        *(_export_row("engine", record, run.directory) for record in _by_precision(run.summary.get("engine"))),
    ]
    if not rows:
        return None
    columns = (
        "export",
        "precision",
        "largest difference of a logit",
        "change of quality",
        "ran here",
        "file",
        "remark",
    )
    return element("section", element("h2", "Export parity"), table(columns, rows, class_="exports"))


def details(run: RunFiles) -> Html | None:
    """Return configuration, plan, environment and log, folded away."""
    tables = (
        ("Configuration", run.config),
        ("Plan", run.plan),
        ("Environment", run.environment),
        ("A step and the device's limits", mapping(run.summary.get("limit"))),
    )
    parts = [
        collapsible(title, table(("name", "value"), flat(content), class_="names"))
        for title, content in tables
        if content
    ]
    if run.log:
        cut = len(run.log) > _LOG_TAIL
        parts.append(collapsible("Log" + (" (its end)" if cut else ""), preformatted(run.log[-_LOG_TAIL:])))
    return element("section", element("h2", "Details"), *parts) if parts else None


def _waiting(epochs: Iterable[dict[str, Any]]) -> Html | None:
    """Return how much of the training the host waited for batches; on a GPU the device may compute meanwhile."""
    rows = [[number(epoch.get(name)) for name in ("waited", "computed", "seconds")] for epoch in epochs]
    known = [row for row in rows if None not in row]
    waited, computed, seconds = (sum(row[column] or 0.0 for row in known) for column in range(3))
    if seconds <= 0:
        return None
    text = (
        f"Of {seconds:.1f} s of training the host waited {waited:.1f} s for batches ({100 * waited / seconds:.1f} %); "
        f"computing the steps took {computed:.1f} s."
    )
    return element("p", text, class_="waiting")


def _seconds_and_share(seconds: float, total: float) -> tuple[Html, Html]:
    return _numeric(f"{seconds:.1f}"), _numeric(f"{100 * seconds / total:.1f} %")


def _numeric(text: str, **attributes: object) -> Html:
    return element("td", text, class_="number", **attributes)


def _with_swatch(place: int, name: str) -> Html:
    square = element("rect", width="100%", height="100%", class_=f"part-{place % _BAR_COLOURS}")
    return element("th", element("svg", square, class_="swatch", aria_hidden="true"), name, scope="row")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _shown(value: float | None) -> Html:
    return _numeric("—" if value is None else f"{value:.4f}", data_value="" if value is None else repr(value))


def _meter(value: float | None) -> Html:
    if value is None or not 0 <= value <= 1:
        return element("td")
    filled = element("rect", width=f"{100 * value:.1f}%", height="100%")
    return element("td", element("svg", filled, class_="meter", aria_hidden="true"), class_="meter-cell")


def _regions(regions: dict[str, Any]) -> Html | None:
    if not regions:
        return None
    rows = [(name, _shown(number(value)), _meter(number(value))) for name, value in regions.items()]
    return table(("region", "mean", ""), rows, class_="figures")


def _by_precision(record: object) -> list[dict[str, Any]]:
    """Return a summary's first record and those it holds under the names of their precisions."""
    first = mapping(record)
    return [each for each in (first, *first.values()) if isinstance(each, dict) and each]


def _export_row(kind: str, record: dict[str, Any], directory: Path) -> tuple[object, ...]:
    flavour = " ".join(str(record[name]) for name in ("flavour", "version") if record.get(name))
    file = Path(str(record["path"])).name if record.get("path") else None
    here = directory / "exports" / file if file else None
    size = f"{file} ({here.stat().st_size / 2**20:.1f} MiB)" if here is not None and here.is_file() else file
    # ONNX models have run where the gate let them pass; a record of an engine says it.
    ran = record.get("ran", file is not None)
    return (
        f"{kind} {flavour}".strip(),
        record.get("precision") or "—",
        _difference(record.get("max_abs_diff")),
        _difference(record.get("quality_delta")),
        "yes" if ran else "no",
        size or "none",
        record.get("reason") or "",
    )


def _difference(value: object) -> Html:
    known = number(value)
    return _numeric("—" if known is None else f"{known:.3g}")
