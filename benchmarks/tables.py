"""The README's tables of results, made from committed records.

Run: python benchmarks/tables.py benchmarks/records/FOLDER   (prints the table; a test compares it with README.md)
"""

import json
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Row = tuple[str, Record, str, str, str]  # what it is, its figures, and the names of both sides' and of their ratio
Score = tuple[str, float, float]  # what it is, the guide's and ours

_NUMERALS = {1: "one", 2: "two", 4: "four", 8: "eight", 16: "sixteen"}


def results_table(folder: Path) -> str:
    """Return the Markdown table of a record that `compare.py` wrote with all its parts."""
    record: Record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    rows, scores = _MAKERS[record.get("app", "spleen")](record)
    lines = [f"| {_where(record['environment'])} | guide | fast | ratio |", "|---|---|---|---|"]
    for name, part, a, b, c in rows:
        shape = "{:.0f}/s" if a.endswith("per s") else "{:.3g} s"
        lines.append(f"| {name} | {shape.format(part[a])} | {shape.format(part[b])} | {part[c]:.1f}x |")
    lines += [f"| {name} | {guide:.3f} | {fast:.3f} | {fast - guide:+.3f} |" for name, guide, fast in scores]
    return "\n".join(lines)


def _spleen(record: Record) -> tuple[list[Row], list[Score]]:
    return _spleen_rows(record), [_quality(record, "Dice", "Dice on phantoms")]


def _brats(record: Record) -> tuple[list[Row], list[Score]]:
    rows = [*_preparation_rows(record), *_step_rows(record), *_inference_rows(record)]
    return rows, [_quality(record, "Dice", "Dice on phantoms")]


def _pathology(record: Record) -> tuple[list[Row], list[Score]]:
    preparation, scan = record["preparation"], record["inference"]
    guide = preparation["the guide that counts"]
    rows: list[Row] = [
        (f"loading and colour jitter, {epoch}", preparation, f"{guide}, patches per s", fast, ratio)
        for epoch, fast, ratio in (
            ("first epoch", "fast, first epoch, patches per s", "guide / fast, first epoch"),
            ("later epochs", "fast, later epoch, patches per s", "guide / fast, later epochs"),
        )
    ]
    rows += _step_rows(record)
    guide = scan["the guide that counts"]
    rows += [
        (f"scan of a slide, {each}", scan, f"{guide}, s per slide", f"fast {each}, s per slide", f"guide / fast {each}")
        for each in ("fp32", "bf16")
    ]
    chosen = scan["precision that fast chooses here"]
    scores = [
        (f"{score} of these scans", scan[f"{score}, {guide}"], scan[f"{score}, fast {chosen}"])
        for score in ("FROC", "slide AUC")
    ]
    return rows, [*scores, _quality(record, "patch AUC", "patch AUC on synthetic slides")]


_MAKERS = {"spleen": _spleen, "brats": _brats, "pathology": _pathology}


def _quality(record: Record, metric: str, name: str) -> Score:
    seeds = [record["quality"][f"{side}, {metric} by seed"] for side in ("guide", "fast")]
    guide, fast = (sum(each) / len(each) for each in seeds)
    return f"{name}, {len(seeds[0])} seeds, equal epochs", guide, fast


def _spleen_rows(record: Record) -> list[Row]:
    step = record["step"]
    return [
        *_preparation_rows(record),
        ("training step, as each runs here", step, "guide fp32, s", "fast bf16, s", "guide / fast"),
        ("training step, both fp32", step, "guide fp32, s", "fast fp32, s", "guide / fast, both fp32"),
        ("training step, both bf16", step, "guide bf16, s", "fast bf16, s", "guide / fast, both half"),
        *_inference_rows(record),
    ]


def _step_rows(record: Record) -> list[Row]:
    rows: list[Row] = []
    on_cpu = record["environment"]["device"] == "cpu"
    half = "bf16" if on_cpu else "fp16"
    usual, chosen = ("fp32" if on_cpu else "fp16"), record["step"]["precision that fast chooses here"]
    for crops, step in record["step"].items():
        if not isinstance(step, dict):
            continue
        name = f"training step, {crops}"
        here = f"guide {usual}, fast {chosen}" if usual != chosen else chosen
        rows.append((f"{name}, {here}", step, f"guide {usual}, s", f"fast {chosen}, s", "guide / fast"))
        if (usual, chosen) != ("fp32", "fp32"):
            rows.append((f"{name}, both fp32", step, "guide fp32, s", "fast fp32, s", "guide / fast, both fp32"))
        if (usual, chosen) != (half, "bf16"):
            label = f"{name}, both bf16" if on_cpu else f"{name}, guide fp16, fast bf16"
            rows.append((label, step, f"guide {half}, s", "fast bf16, s", "guide / fast, both half"))
        batches = (_with_batch(step, "guide"), _with_batch(step, "fast"), "guide / fast, with their batches")
        rows.append((f"{name}, with the making of the batch", step, *batches))
    return rows


def _with_batch(step: Record, side: str) -> str:
    """Return the figure of a side's step with the making of its batch; of several guides the one that counts."""
    side = step["the guide that counts"] if side == "guide" and "the guide that counts" in step else side
    return next(name for name in (f"{side} with its batch, s", f"{side}, with its batch, s") if name in step)


def _preparation_rows(record: Record) -> list[Row]:
    part = record["preparation"]
    guide, cold, warm = _per_case("guide", "cold", "warm")
    return [
        ("preparation, cold", part, guide, cold, "guide / fast cold"),
        ("preparation, warm", part, guide, warm, "guide / fast warm, digests checked"),
    ]


def _inference_rows(record: Record) -> list[Row]:
    part, precisions = record["inference"], ("fp32", "bf16")
    sides = [_per_case("guide", f"fast {each}") for each in precisions]
    return [
        (f"scan to mask, file to file, {each}", part, guide, fast, f"guide / fast {each}")
        for each, (guide, fast) in zip(precisions, sides, strict=True)
    ]


def _per_case(*sides: str) -> tuple[str, ...]:
    return tuple(f"{side}, s per case" for side in sides)


def _where(environment: Record) -> str:
    if environment["device"] != "cpu":
        return f"on {environment['device']}"
    cores = environment["cores"]
    return f"on {_NUMERALS.get(cores, cores)} CPU core{'s' if cores > 1 else ''}"


if __name__ == "__main__":
    print(results_table(Path(sys.argv[1])))
