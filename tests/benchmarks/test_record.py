"""The tables of docs/benchmarks.md are the records' figures, and nothing else; `test_speedrun.py` has the README's."""

import json
import re

import pytest

from medspeed.benchmarks import GUIDES
from medspeed.benchmarks.harness import ROOT, row, table

RECORDS = ROOT / "benchmarks" / "records"


TEXT = (ROOT / "docs" / "benchmarks.md").read_text()


def results_table(folder):
    """Return the table of a record; the rows of those from before `compare.py` wrote any lie beside them."""
    record, made = json.loads((folder / "record.json").read_text()), folder / "rows.json"
    return table({**record, "rows": record["rows"] if "rows" in record else json.loads(made.read_text())})


@pytest.mark.parametrize("app", GUIDES)
def test_the_page_shows_the_table_of_the_record_that_it_links_to(app):
    place = rf"<!-- record of {app} -->\n\n(.*?)\n\n<!-- end -->.*?benchmarks/records/([\w.-]+)"
    shown, name = re.findall(place, TEXT, re.DOTALL)[0]
    assert shown == results_table(RECORDS / name)


def numbers(content):
    """Yield all numbers of a record; of a list (one number of each seed) also the mean."""
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from numbers(value)
        if isinstance(content, list) and all(isinstance(value, float) for value in content):
            yield sum(content) / max(1, len(content))
    elif isinstance(content, int | float):
        yield content


@pytest.mark.parametrize("made", sorted(RECORDS.glob("*/rows.json")), ids=lambda path: path.parent.name)
def test_the_rows_beside_an_old_record_are_its_figures(made):
    known = set(numbers(json.loads((made.parent / "record.json").read_text())))
    for each in json.loads(made.read_text()):
        assert {value for value in each.values() if isinstance(value, float)} <= known, each["what"]


def test_a_table_has_the_rows_that_have_both_sides():
    rows = [row("a step", "s", [6.0], [3.0]), row("ours alone", "s", [], [1.0]), row("Dice", "", [0.5], [0.75])]
    assert table({"environment": {"device": "cpu", "cores": 2}, "rows": rows}).splitlines() == [
        "| on 2 CPU cores | guide | fast | ratio |",
        "|---|---|---|---|",
        "| a step | 6 s | 3 s | 2.0x |",
        "| Dice | 0.500 | 0.750 | +0.250 |",
    ]
    assert table({"environment": {"device": "NVIDIA X", "cores": 2}, "rows": rows}).startswith("| on NVIDIA X |")
