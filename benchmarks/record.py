"""The protocol of a record: run compare.py's parts, write the record's folder, and put its table into the app's README.

Run: python benchmarks/record.py spleen|brats|pathology [--data FOLDER] [--rounds 3] [--today 2026-11-21]

Without --data the protocol's own synthetic data are made: volumes of MSD's size (CT, or four-channel MRI), or slides.
The record is benchmarks/records/DATE_DEVICE_APP-guide-against-fast; look at it, say in its README what a reader must
know, and commit it.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.tables import results_table
from common.files import write_text
from common.inference.predictors import computes_bf16
from data_scripts.make_phantoms import make_ct_phantoms, make_mri_phantoms
from data_scripts.make_slides import make_slides

ROOT = Path(__file__).resolve().parents[1]
READMES = {app: ROOT / place for app, place in {
    "spleen": "README.md", "brats": "apps/brats/README.md", "pathology": "apps/pathology/README.md",
}.items()}  # fmt: skip
_MAKERS: dict[str, Callable[[Path], Path]] = {
    "spleen": lambda folder: make_ct_phantoms(folder, 8, size="msd"),
    "brats": lambda folder: make_mri_phantoms(folder, 8, size="msd"),
    "pathology": make_slides,
}
_TABLE = re.compile(r"\| on [^\n]*\| guide \| fast \| ratio \|\n(?:\|[^\n]*\n)+")


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("app", choices=list(READMES))
    parser.add_argument("--data", type=Path, help="folder of the dataset")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--today", default=datetime.date.today().isoformat(), help="date in the record's name")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, write the record, and update the README."""
    options = parse_options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name().lower().replace(" ", "-") if device == "cuda" else device
    name += "-bf16" if device == "cpu" and computes_bf16(torch.device(device)) else ""
    folder = ROOT / "benchmarks" / "records" / f"{options.today}_{name}_{options.app}-guide-against-fast"
    if (folder / "record.json").exists():
        raise SystemExit(f"{folder} is there already: move it, or give another --today")
    with tempfile.TemporaryDirectory(prefix="record-") as made:
        data = options.data or _MAKERS[options.app](Path(made) / "data")
        command = [sys.executable, "benchmarks/compare.py", options.app, "--data", str(data)]
        command += ["--rounds", str(options.rounds), "--output", str(folder / "record.json")]
        subprocess.run(command, cwd=ROOT, check=True)
    if not (folder / "README.md").exists():
        write_text(folder / "README.md", _readme(options))
    readme = READMES[options.app]
    write_text(readme, with_record(readme.read_text(encoding="utf-8"), folder))
    print(f"{folder}\n{readme}: its table is this record's now")


def with_record(text: str, folder: Path) -> str:
    """Return a README with the table of a record, and with links to it instead of to the record before.

    Raises:
        ValueError: the text has no table of results, or no link to the record it is of.
    """
    table = _TABLE.search(text)
    link = re.search(r"benchmarks/records/([\w.-]+)", text[table.end() :]) if table else None
    if table is None or link is None:
        raise ValueError(f"no table of results with a link to its record to replace by that of {folder.name}")
    text = text[: table.start()] + results_table(folder) + "\n" + text[table.end() :]
    return text.replace(f"benchmarks/records/{link.group(1)}", f"benchmarks/records/{folder.name}")


def record_of(text: str) -> str:
    """Return the name of the record that a README's table of results is of: the first that it links to below it."""
    table = _TABLE.search(text)
    assert table is not None, "a README without a table of results"
    link = re.search(r"benchmarks/records/([\w.-]+)", text[table.end() :])
    assert link is not None, "a table of results without a link to its record"
    return link.group(1)


def _readme(options: argparse.Namespace) -> str:
    data = f" --data {options.data.name}" if options.data else ""
    return (
        f"# {options.app.capitalize()}, guide against fast\n\n"
        f"```bash\npython benchmarks/record.py {options.app}{data} --rounds {options.rounds}\n```\n\n"
        "Both sides run in turn; figures are medians. `record.json` has the machine, the versions and the commit.\n"
    )


if __name__ == "__main__":
    main()
