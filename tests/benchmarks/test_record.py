"""The tables of docs/benchmarks.md, and the README's rows, are the records' figures, and nothing else."""

import json
import re

import pytest

from medspeed.benchmarks import GUIDES
from medspeed.benchmarks.harness import ROOT, row
from medspeed.benchmarks.record import PAGE, place_of, results_table, with_record
from medspeed.common.files import write_json

RECORDS = ROOT / "benchmarks" / "records"


TEXT = PAGE.read_text()
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("app", GUIDES)
def test_the_page_shows_the_table_of_the_record_that_it_links_to(app):
    assert f"\n\n{results_table(RECORDS / place_of(TEXT, app)[2])}\n\n" in TEXT


def test_the_rows_of_the_readme_are_those_of_the_record_it_links_to():
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| [^|]+ \| [+\d.x-]+ \|$", README, re.MULTILINE)
    (name,) = set(re.findall(r"benchmarks/records/([\w.-]+)", README))
    assert len(rows) == 3
    assert set(rows) <= set(results_table(RECORDS / name).splitlines())
    assert not any("warm" in each for each in rows)  # a filled cache is not compared with computing anew


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


def test_a_table_has_the_rows_that_have_both_sides(tmp_path):
    rows = [row("a step", "s", [6.0], [3.0]), row("ours alone", "s", [], [1.0]), row("Dice", "", [0.5], [0.75])]
    write_json(tmp_path / "record.json", {"environment": {"device": "cpu", "cores": 2}, "rows": rows})
    assert results_table(tmp_path).splitlines() == [
        "| on two CPU cores | guide | fast | ratio |",
        "|---|---|---|---|",
        "| a step | 6 s | 3 s | 2.0x |",
        "| Dice | 0.500 | 0.750 | +0.250 |",
    ]
    write_json(tmp_path / "record.json", {"environment": {"device": "NVIDIA X", "cores": 2}, "rows": rows})
    assert results_table(tmp_path).startswith("| on NVIDIA X |")


@pytest.mark.parametrize("app", GUIDES)
def test_the_page_takes_the_same_record_unchanged(app):
    assert with_record(TEXT, app, RECORDS / place_of(TEXT, app)[2]) == TEXT


def test_another_records_table_and_links_take_the_place_of_the_old_ones():
    before, after = place_of(TEXT, "brats")[2], place_of(TEXT, "spleen")[2]
    assert before != after
    changed = with_record(TEXT, "brats", RECORDS / after)
    assert place_of(changed, "brats")[2] == after
    assert f"records/{before}" not in changed
    assert changed.count(results_table(RECORDS / after)) == 2
    assert results_table(RECORDS / before) not in changed
    assert changed.split("## Pathology")[1] == TEXT.split("## Pathology")[1]


@pytest.mark.parametrize(
    "text",
    [
        "| on two CPU cores | guide | fast | ratio |",
        "<!-- record of brats -->\n\n| a |\n\n<!-- end -->\n\nno link",
    ],
)
def test_a_page_without_a_place_or_a_link_is_refused(text):
    with pytest.raises(ValueError, match=r"no place for the table of brats: needs .* a link to the record"):
        with_record(text, "brats", RECORDS / place_of(TEXT, "spleen")[2])
