"""Count what a step costs on a GPU, without one, and compare it with the budget."""

from medspeed.apps import APPS
from medspeed.benchmarks.fake_cuda import shim
from medspeed.common.flags import Parser

PARSER = Parser(prog="python -m medspeed.benchmarks.fake_cuda", description=__doc__)
PARSER.add_argument("apps", nargs="*", choices=[*APPS, []], help="all by default")
PARSER.add_argument("--write", action="store_true", help="make what is counted now the budget")

if __name__ == "__main__":
    PARSER.parse_args()
    shim.load()  # before torch is loaded

from pathlib import Path
from tempfile import TemporaryDirectory

from medspeed.benchmarks.fake_cuda.costs import TABLE, total
from medspeed.benchmarks.fake_cuda.steps import VARIANTS, flags_of, opened, write_data
from medspeed.common.files import read_object, write_json


def main() -> None:
    """Count, compare with the table, and write it where that is asked for."""
    given, table = PARSER.parse_args(), read_object(TABLE) if TABLE.is_file() else {}
    for app in given.apps or APPS:
        before, table[app] = table.get(app, {}), {}
        with TemporaryDirectory() as folder:
            data = write_data(app, Path(folder) / "data")
            for variant in VARIANTS:
                with opened(app, data, flags_of(app, variant)) as training:
                    table[app][variant] = total(training.steps()[-1])._asdict()
                    if variant == "bf16":
                        table[app]["validation"] = total(training.validation())._asdict()
        for variant, costs in table[app].items():
            told = [_change(name, before.get(variant, {}).get(name), now) for name, now in costs.items()]
            print(f"{app}, {variant}: {', '.join(told)}")
    if given.write:
        write_json(TABLE, table)


def _change(name: str, before: int | None, now: int) -> str:
    unit, shape = (1e9, "{:,.2f} G") if name in ("bytes", "float32_bytes", "flops") else (1, "{:.0f}")
    told = f" (before {shape.format(before / unit)})" if before not in (None, now) else ""
    return f"{name} {shape.format(now / unit)}{told}"


if __name__ == "__main__":
    main()
