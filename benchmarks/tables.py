"""The README's table of results, made from a committed record.

Run: python benchmarks/tables.py benchmarks/records/FOLDER   (prints the table; a test compares it with README.md)
"""

import json
import sys
from pathlib import Path
from typing import Any


def results_table(folder: Path) -> str:
    """Return the Markdown table of a record that `compare.py spleen` wrote."""
    record: dict[str, Any] = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    preparation, step, files, quality = (record[name] for name in ("preparation", "step", "inference", "quality"))
    guide_dice, fast_dice = quality["guide, Dice by seed"], quality["fast, Dice by seed"]
    guide_way = files["guide, s per case"]
    rows = [
        ("preparation, cold", preparation, *_per_case("guide", "cold"), "guide / fast cold"),
        ("preparation, warm", preparation, *_per_case("guide", "warm"), "guide / fast warm, digests checked"),
        ("training step, as each runs here", step, "guide fp32, s", "fast bf16, s", "guide / fast"),
        ("training step, both fp32", step, "guide fp32, s", "fast fp32, s", "guide / fast, both fp32"),
        ("training step, both bf16", step, "guide bf16, s", "fast bf16, s", "guide / fast, both half"),
    ]
    lines = ["| on two CPU cores | guide | fast | ratio |", "|---|---|---|---|"]
    lines += [f"| {name} | {part[a]:.3g} s | {part[b]:.3g} s | {part[c]:.1f}x |" for name, part, a, b, c in rows]
    for half in ("fp32", "bf16"):
        seconds, gain = files[f"fast {half}, s per case"], files[f"guide / fast {half}"]
        lines.append(f"| scan to mask, file to file, {half} | {guide_way:.3g} s | {seconds:.3g} s | {gain:.1f}x |")
    means = [sum(dice) / len(dice) for dice in (guide_dice, fast_dice)]
    seeds = f"Dice on phantoms, {len(fast_dice)} seeds, equal epochs"
    lines.append(f"| {seeds} | {means[0]:.3f} | {means[1]:.3f} | {means[1] - means[0]:+.3f} |")
    return "\n".join(lines)


def _per_case(*sides: str) -> tuple[str, ...]:
    return tuple(f"{side}, s per case" for side in sides)


if __name__ == "__main__":
    print(results_table(Path(sys.argv[1])))
