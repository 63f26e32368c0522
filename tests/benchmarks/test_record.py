"""The READMEs' tables are the records' figures, and nothing else."""

import json

import pytest

from medspeed.benchmarks.harness import GUIDES, ROOT, guide_of, row
from medspeed.benchmarks.record import record_of, results_table, with_record
from medspeed.common.files import write_json

RECORDS = ROOT / "benchmarks" / "records"


def readme(app):
    return (ROOT / guide_of(app).README).read_text()


@pytest.mark.parametrize("app", GUIDES)
def test_each_readme_shows_the_table_of_the_record_that_it_links_to(app):
    assert results_table(RECORDS / record_of(readme(app))) in readme(app)


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
def test_a_readme_takes_the_same_record_unchanged(app):
    assert with_record(readme(app), RECORDS / record_of(readme(app))) == readme(app)


def test_another_records_table_and_links_take_the_place_of_the_old_ones():
    text = readme("brats")
    before, after = record_of(text), record_of(readme("spleen"))
    assert before != after
    changed = with_record(text, RECORDS / after)
    assert record_of(changed) == after
    assert f"records/{before}" not in changed
    assert results_table(RECORDS / after) in changed
    assert results_table(RECORDS / before) not in changed
    assert changed.split("## Regions")[1] == text.split("## Regions")[1]


@pytest.mark.parametrize("text", ["no table", "| on two CPU cores | guide | fast | ratio |\n|---|\n\nno link"])
def test_a_readme_without_a_table_or_a_link_is_refused(text):
    with pytest.raises(ValueError, match="no table of results with a link"):
        with_record(text, RECORDS / record_of(readme("spleen")))
