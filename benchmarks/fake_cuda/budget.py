"""The budget: what steps and validations may cost, and what they cost now."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from medspeed.benchmarks.fake_cuda.costs import Totals, total
from medspeed.benchmarks.fake_cuda.steps import VARIANTS, flags_of, opened, write_data
from medspeed.common.files import write_json

TABLE = Path(__file__).with_name("budget.json")
MORE = 1.05
"""So many times the budget is too much."""

Costs = dict[str, dict[str, int]]  # by what ran, "bf16" or "validation": `Totals` by name


def measure(app: str, data: Path, variants: Sequence[str] = tuple(VARIANTS)) -> Costs:
    """Return the costs of an app's variants, and of a validation, with data that `write_data` made."""
    found: Costs = {}
    for name in variants:
        with opened(app, data, flags_of(app, name)) as training:
            found[name] = total(training.steps()[-1])._asdict()
            if "validation" not in found:
                found["validation"] = total(training.validation())._asdict()
    return found


def exceeded(costs: Mapping[str, int], budget: Mapping[str, int]) -> Iterator[str]:
    """Yield in words which costs are above the budget by more than is let pass."""
    for name in Totals._fields:
        if costs[name] > MORE * budget[name]:
            yield f"{name}: {costs[name]:,}, and the budget is {budget[name]:,}"


def main(apps: Sequence[str], write: bool) -> None:
    """Count, compare with the table, and write it where that is asked for."""
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {}
    for app in apps:
        with TemporaryDirectory() as folder:
            now = measure(app, write_data(app, Path(folder) / "data"))
        for variant, costs in now.items():
            before = table.get(app, {}).get(variant, {})
            print(f"{app}, {variant}: " + ", ".join(_change(name, before.get(name), costs[name]) for name in costs))
        table[app] = now
    if write:
        write_json(TABLE, table)


def _change(name: str, before: int | None, now: int) -> str:
    shown = f"{now / 1e9:,.2f} G" if name in ("bytes", "float32_bytes", "flops") else f"{now}"
    if before in (None, now):
        return f"{name} {shown}"
    return f"{name} {shown} ({100 * now / before - 100:+.1f} percent)" if before else f"{name} {shown} (before 0)"
