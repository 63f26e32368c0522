import pytest

from benchmarks.record import READMES, ROOT, record_of, with_record
from benchmarks.tables import results_table

RECORDS = ROOT / "benchmarks" / "records"


@pytest.mark.parametrize("app", READMES)
def test_each_readme_shows_the_table_of_the_record_that_it_links_to(app):
    text = READMES[app].read_text()
    assert results_table(RECORDS / record_of(text)) in text


@pytest.mark.parametrize("app", READMES)
def test_a_readme_takes_the_same_record_unchanged(app):
    text = READMES[app].read_text()
    assert with_record(text, RECORDS / record_of(text)) == text


def test_another_records_table_and_links_take_the_place_of_the_old_ones():
    text = READMES["brats"].read_text()
    before, after = record_of(text), record_of(READMES["spleen"].read_text())
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
        with_record(text, RECORDS / record_of(READMES["spleen"].read_text()))
