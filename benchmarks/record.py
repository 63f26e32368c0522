"""The protocol of a record: run compare.py's parts, write the record's folder and its table in docs/benchmarks.md.

Run: python benchmarks/record.py spleen|brats|pathology [--data FOLDER] [--rounds 3] [--today 2026-11-21]

Without --data the protocol's own synthetic data are made: volumes of MSD's size (CT, or four-channel MRI), or slides.
The record is benchmarks/records/DATE_DEVICE_APP-guide-against-fast; look at it, say in its README what a reader must
know, and commit it.
"""

import datetime
from pathlib import Path

from medspeed.benchmarks import GUIDES
from medspeed.common.flags import Parser

PARSER = Parser(description=__doc__)
PARSER.add_argument("app", choices=GUIDES)
PARSER.add_argument("--data", type=Path, help="folder of the dataset")
PARSER.add_argument("--rounds", type=int, default=3, help="times each side runs")
PARSER.add_argument("--today", default=datetime.date.today().isoformat(), help="date in the record's name")
PARSER.answer(__name__)

import json
import re
import subprocess
import sys
import tempfile

import torch

from medspeed.benchmarks.harness import ROOT, Row, guide_of, show
from medspeed.common.files import read_object, write_text
from medspeed.common.inference.predictors import computes_bf16

_NUMERALS = {1: "one", 2: "two", 4: "four", 8: "eight", 16: "sixteen"}
PAGE = ROOT / "docs" / "benchmarks.md"


def main() -> None:
    """Measure, write the record, and update the page of results."""
    given = PARSER.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name().lower().replace(" ", "-") if device == "cuda" else device
    name += "-bf16" if device == "cpu" and computes_bf16(torch.device(device)) else ""
    folder = ROOT / "benchmarks" / "records" / f"{given.today}_{name}_{given.app}-guide-against-fast"
    if (folder / "record.json").exists():
        raise SystemExit(f"{folder} is there already: move it, or give another --today")
    with tempfile.TemporaryDirectory(prefix="record-") as made:
        data = given.data or guide_of(given.app).make_data(Path(made) / "data", small=False)
        command = [sys.executable, "benchmarks/compare.py", given.app, "--data", str(data)]
        command += ["--rounds", str(given.rounds), "--output", str(folder / "record.json")]
        subprocess.run(command, cwd=ROOT, check=True)
    if not (folder / "README.md").exists():
        words = [given.app, *(["--data", given.data.name] if given.data else []), "--rounds", str(given.rounds)]
        write_text(
            folder / "README.md",
            f"# {given.app.capitalize()}, guide against fast\n\n"
            f"```bash\npython benchmarks/record.py {' '.join(words)}\n```\n\n"
            "Both sides run in turn; figures are medians. `record.json` has machine, versions and commit.\n",
        )
    write_text(PAGE, with_record(PAGE.read_text(encoding="utf-8"), given.app, folder))
    print(f"{folder}\n{PAGE}: the table of {given.app} is this record's now")


def results_table(folder: Path) -> str:
    """Return the Markdown table of a record: what was measured on both sides.

    The rows of records from before `compare.py` wrote any lie beside them, in `rows.json`.
    """
    record, made = read_object(folder / "record.json"), folder / "rows.json"
    rows: list[Row] = record["rows"] if "rows" in record else json.loads(made.read_text(encoding="utf-8"))
    about = record["environment"]
    cores = f"{_NUMERALS.get(about['cores'], about['cores'])} CPU core{'s' * (about['cores'] > 1)}"
    where = cores if about["device"] == "cpu" else about["device"]
    lines = [f"| on {where} | guide | fast | ratio |", "|---|---|---|---|"]
    return "\n".join([*lines, *(show(row) for row in rows if row["guide"] is not None)])


def with_record(text: str, app: str, folder: Path) -> str:
    """Return the page with the table of an app's record, and with links to it instead of to the record before."""
    table, before = _table(text, app), record_of(text, app)
    text = f"{text[: table.start(1)]}{results_table(folder)}{text[table.end(1) :]}"
    return text.replace(f"benchmarks/records/{before}", f"benchmarks/records/{folder.name}")


def record_of(text: str, app: str) -> str:
    """Return the name of the record that an app's table is made of: the first that the page links to below it.

    Raises:
        ValueError: the page has no place for the table, or no link to the record it is of.
    """
    link = re.search(r"benchmarks/records/([\w.-]+)", text[_table(text, app).end() :])
    if link is None:
        raise ValueError(f"no link to the record of {app} below its table")
    return link.group(1)


def _table(text: str, app: str) -> re.Match[str]:
    found = re.search(rf"<!-- record of {app} -->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL)
    if found is None:
        raise ValueError(f"no place for the table of {app}: it lies between <!-- record of {app} --> and <!-- end -->")
    return found


if __name__ == "__main__":
    main()
