import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.data.cases import Case, Split
from common.training.dev_run import OneStep, each_kind, few_cases
from common.training.distributed import SINGLE
from tests.common.training.fit_worker import TinyBatches, train


class Said(list[str]):
    def say(self, line):
        self.append(line)


def split_of(training, validation):
    names = [
        [Case(f"{kind}{n}", Path("i"), Path("l")) for n in range(count)]
        for kind, count in (("t", training), ("v", validation))
    ]
    return Split(tuple(names[0]), tuple(names[1]), True, "20 percent")


@pytest.mark.parametrize(("parts", "kept"), [(1, (2, 1)), (4, (4, 4)), (99, (10, 6))])
def test_a_few_cases_are_left_or_one_for_each_part(parts, kept):
    said = Said()
    found = few_cases(split_of(10, 6), parts, said)  # type: ignore[arg-type]
    assert (len(found.training), len(found.validation)) == kept
    assert found.training == split_of(10, 6).training[: kept[0]]
    assert found.description == "20 percent; cut short"
    assert "no figure of this run means anything" in said[0]


def test_an_epoch_is_its_first_batch_and_ends_what_made_the_others():
    made, ended = [], []

    class Batches(TinyBatches):
        def epoch(self, number, first_step=0):
            try:
                for batch in super().epoch(number, first_step):
                    made.append(number)
                    yield batch
            finally:
                ended.append(number)

    short = OneStep(Batches(SINGLE, 5))
    assert (short.steps_per_epoch, short.resumes_within_epoch) == (1, True)
    assert len(list(short.epoch(3))) == 1
    assert (made, ended) == ([3], [3])
    assert not list(short.epoch(3, 1))
    assert not OneStep(replace(Batches(SINGLE, 5), resumes_within_epoch=False)).resumes_within_epoch


def test_a_run_takes_two_steps_and_validates_each(tmp_path):
    fitted = train({"run": str(tmp_path), "fast_dev_run": True, "epochs": 2, "steps": 50})
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert fitted.steps == 2
    assert [(record["step"], len(record["losses"]), record["dice"]) for record in records] == [(1, 1, 0.5), (2, 1, 0.5)]


def test_each_kind_keeps_the_first_of_each():
    assert each_kind([0, 0, 0, 1, 0, 1, 1, 1], 2) == [0, 1, 3, 5]
    assert each_kind([1], 2) == [0]
