"""The ladder's figures as Markdown."""

import statistics
from typing import Any

Record = dict[str, Any]
_METRICS = ("Dice", "AUC")
_TARGET = 0.9  # of the quality that fast has in the end: what "epochs to" counts to


def markdown(record: Record) -> str:
    """Return all tables of a ladder, most important first."""
    parts = [
        f"## The climb ({record['app']}, {record['epochs']} epochs)",
        _climb(record),
        "## Single changes of fast",
        _beside(record),
    ]
    for title in ("datasets", "loaders", "networks and steps", "ranks, on the CPU"):
        parts += [f"## {title.capitalize()}", _rows(record[title])]
    parts += ["## Not here", "\n".join(f"- {name}: {why}" for name, why in record["absent"].items())]
    return "\n\n".join(parts)


def _climb(record: Record) -> str:
    metric = _metric(record["climb"])
    first, last = record["climb"][0], record["climb"][-1]
    target = _TARGET * last[metric] if metric in last else 1.0
    lines = [
        "| rung | s per step | to the rung before | to the baseline | waited | prepare, cache | first epoch | "
        f"{metric} | epochs, seconds to {target:.2f} | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rung in record["climb"]:
        if "failed" in rung:
            lines.append(f"| {rung['rung']} | failed: {rung['failed']} | | | | | | | | |")
            continue
        before = rung.get("times as fast as the rung before")
        so_far = first["s per step"] / rung["s per step"] if "s per step" in first else None
        lines.append(
            f"| {rung['rung']} | {rung['s per step']:.3g} | {_times(before)} | {_times(so_far)} "
            f"| {rung['waited, percent']:.0f}% | {rung['prepare and cache, s']:.3g} s "
            f"| {rung['first epoch, s']:.3g} s | {rung[metric]:.3f} | {_reached(rung, target)} "
            f"| {rung['peak memory, MiB']} MiB |"
        )
    return "\n".join(lines)


def _reached(rung: Record, target: float) -> str:
    """Return the median epoch and second, preparation included, of the first validation that has the target."""
    firsts = [
        next(((epoch, point[0]) for epoch, point in enumerate(curve, 1) if point[1] >= target), None)
        for curve in rung["curves"]
    ]
    found = [each for each in firsts if each is not None]
    if not found:
        return "not reached"
    some = "" if len(found) == len(firsts) else f" ({len(found)} of {len(firsts)} rounds)"
    epochs, seconds = (statistics.median(values) for values in zip(*found, strict=True))
    return f"{epochs:g}, {seconds:.3g} s{some}"


def _beside(record: Record) -> str:
    fast = record["fast, short"]
    lines = [
        "One epoch each, not repeated: differences of a few percent are noise.",
        "",
        "| change | s per step | samples per s, this / fast | s per validation | compile | memory |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in {"fast itself": fast, **record["beside"], "fast again": record["fast, short, again"]}.items():
        if isinstance(found, str) or "failed" in found:
            why = found if isinstance(found, str) else f"failed: {found['failed']}"
            lines.append(f"| {name} | {why} | | | | |")
            continue
        # By samples, since some changes make the batch larger.
        ratio = found["samples per s"] / fast["samples per s"] if "samples per s" in fast else None
        lines.append(
            f"| {name} | {found['s per step']:.3g} | {_times(ratio)} | {found['s per validation']:.3g} "
            f"| {found['compile, s']:.3g} s | {found['peak memory, MiB']} MiB |"
        )
    return "\n".join(lines)


def _rows(part: dict[str, Any]) -> str:
    """Return a part's rows: named figures, or the reason why there are none."""
    if "failed" in part:
        return f"Failed: {part['failed']}"
    named = dict.fromkeys(name for each in part.values() if isinstance(each, dict) for name in each)
    names = list(named) or ["why not"]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for name, found in part.items():
        cells = [str(found.get(each, "")) for each in names] if isinstance(found, dict) else [str(found)]
        lines.append(f"| {name} | " + " | ".join(cells + [""] * (len(names) - len(cells))) + " |")
    return "\n".join(lines)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _metric(rungs: list[Record]) -> str:
    return next((name for rung in rungs for name in _METRICS if name in rung), _METRICS[0])
