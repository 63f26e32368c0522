"""The README's tables of results, made from committed records.

Run: python benchmarks/tables.py benchmarks/records/FOLDER   (prints the table; a test compares it with README.md)
"""

import json
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Row = tuple[str, Record, str, str, str]  # what it is, its figures, and the names of both sides' and of their ratio

_NUMERALS = {1: "one", 2: "two", 4: "four", 8: "eight", 16: "sixteen"}


def results_table(folder: Path) -> str:
    """Return the Markdown table of a record that `compare.py` wrote with all its parts."""
    record: Record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    rows = _brats_rows(record) if record.get("app") == "brats" else _spleen_rows(record)
    lines = [f"| {_where(record['environment'])} | guide | fast | ratio |", "|---|---|---|---|"]
    lines += [f"| {name} | {part[a]:.3g} s | {part[b]:.3g} s | {part[c]:.1f}x |" for name, part, a, b, c in rows]
    dice = [record["quality"][f"{side}, Dice by seed"] for side in ("guide", "fast")]
    means = [sum(each) / len(each) for each in dice]
    seeds = f"Dice on phantoms, {len(dice[0])} seeds, equal epochs"
    lines.append(f"| {seeds} | {means[0]:.3f} | {means[1]:.3f} | {means[1] - means[0]:+.3f} |")
    return "\n".join(lines)


def _spleen_rows(record: Record) -> list[Row]:
    step = record["step"]
    return [
        *_preparation_rows(record),
        ("training step, as each runs here", step, "guide fp32, s", "fast bf16, s", "guide / fast"),
        ("training step, both fp32", step, "guide fp32, s", "fast fp32, s", "guide / fast, both fp32"),
        ("training step, both bf16", step, "guide bf16, s", "fast bf16, s", "guide / fast, both half"),
        *_inference_rows(record),
    ]


def _brats_rows(record: Record) -> list[Row]:
    rows = _preparation_rows(record)
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
        batches = ("guide with its batch, s", "fast with its batch, s", "guide / fast, with their batches")
        rows.append((f"{name}, with the making of the batch", step, *batches))
    return rows + _inference_rows(record)


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
