"""The README is short, claims nothing that does not hold, and names what there is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_read_in_a_minute():
    assert len(README.splitlines()) <= 100
    assert len(README.split()) <= 700


def test_it_shows_one_small_picture():
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert (ROOT / picture).stat().st_size < 300_000


def test_its_first_block_has_three_commands():
    block = re.search(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    assert block is not None
    assert len(block.group(1).splitlines()) == 3


def test_every_app_is_a_row():
    rows = set(re.findall(r"^\| \[(\w+)\]\(apps/\1/README.md\)", README, flags=re.MULTILINE))
    assert rows == {path.parent.name for path in (ROOT / "apps").glob("*/train.py")}


@pytest.mark.parametrize("words", ["Not for clinical use", "not a medical device", "engines have never been run"])
def test_it_says_what_it_is_not(words):
    assert words.lower() in README.lower()


@pytest.mark.parametrize("claim", ["evening", "speed of the hardware", "fastest", "state of the art", "warm"])
def test_it_claims_nothing_that_no_record_shows(claim):
    assert claim not in README.lower()
