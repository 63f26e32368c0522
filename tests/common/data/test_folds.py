"""Which cases each fold holds out: every case once, groups whole, labels and volumes balanced, the same everywhere."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medspeed.common.data.dataset import Case, Dataset, read_split
from medspeed.common.data.folds import Content, deal_folds, group_cases, split_fold, trained_before
from medspeed.common.files import write_json
from medspeed.common.training.resolve import _model_of


def plain(count: int, *labels: str) -> dict[str, Content]:
    return {f"c{number:02}": (labels, 1) for number in range(count)}


cases = st.dictionaries(
    st.text("abc_1", min_size=1, max_size=4),
    st.tuples(st.lists(st.sampled_from(["liver", "cyst", "tumor"]), unique=True), st.integers(0, 10**9)),
    min_size=6,
    max_size=40,
)


@given(cases, st.integers(2, 6), st.integers(0, 99))
def test_each_case_is_held_out_once_by_folds_of_one_size(contents, folds, seed):
    fold_of = deal_folds(contents, folds, None, seed)["fold_of"]
    assert fold_of.keys() == contents.keys()
    sizes = Counter(fold_of.values())
    assert set(sizes) == set(range(folds))
    assert max(sizes.values()) - min(sizes.values()) <= 1


@given(cases, st.integers(2, 3), st.integers(0, 99))
def test_a_group_is_never_divided_and_no_fold_is_empty(contents, folds, seed):
    groups = {name: name[0] for name in contents}
    if len({*groups.values()}) < folds:
        with pytest.raises(ValueError, match=rf"folds {folds}: there are only . groups? of cases; lower --folds"):
            deal_folds(contents, folds, "^.", seed)
        return
    record = deal_folds(contents, folds, "^.", seed)
    assert record["group_of"] == groups
    assert len({(groups[name], fold) for name, fold in record["fold_of"].items()}) == len({*groups.values()})
    assert {*record["fold_of"].values()} == set(range(folds))


def test_folds_that_could_not_be_measured_are_refused_at_once():
    cases = tuple(Case(f"c{number}", Path(f"{number}.nii"), Path(f"{number}.nii")) for number in range(6))
    dataset = Dataset(Path("x"), "x", ("CT",), ("background", "organ"), cases, (), False)
    volumes = [(0.0, float(number < 2)) for number in range(6)]
    with pytest.raises(ValueError, match="folds 3: only 2 hold out a case with a label; lower --folds"):
        split_fold(dataset, volumes, 0, 3, None, 0)
    assert len(split_fold(dataset, volumes, 0, 2, None, 0).validation) == 3


def test_what_weights_before_those_of_init_knew_may_be_of_another_dataset(tmp_path):
    """The names of the run's own cases are of its dataset; those that its own --init knew may be of any."""
    write_json(tmp_path / "summary.json", {"data": {"name": "x"}})
    write_json(tmp_path / "split.json", {"training": ["a", "b"], "trained_before": ["c"]})
    weights = tmp_path / "best.safetensors"
    assert trained_before(weights, "x", ["d"]) == (["a", "b", "c"], "")
    assert trained_before(weights, "x", ["b", "c"])[1].startswith(
        "NOT HELD OUT: the weights of --init were trained on b"
    )
    for name, judged in (("x", ["c"]), ("y", ["a"])):
        assert trained_before(weights, name, judged)[1].startswith("NOT HELD OUT, if these are the same scans: the wei")
    trained, said = trained_before(tmp_path / "none" / "best.safetensors", "x", ["a"])
    assert not trained
    assert said.endswith(": validation cases may be among them")


def test_initial_weights_behind_a_link_are_known(tmp_path):
    (run := tmp_path / "run").mkdir()
    write_json(run / "summary.json", {"data": {"name": "x"}})
    write_json(run / "split.json", {"training": ["a"]})
    model = {"labelling": {}, "preparation": {"spacing": [1, 1, 4]}}
    write_json(run / "model.json", model)
    (run / "best.safetensors").touch()
    (link := tmp_path / "good.safetensors").symlink_to(run / "best.safetensors")
    for weights in (run / "best.safetensors", link):
        trained, said = trained_before(weights, "x", ["a"])
        assert (trained, said[:13]) == (["a"], "NOT HELD OUT:")
        assert _model_of(weights) == model
    other = {**model, "preparation": {"spacing": [2, 2, 2]}}
    write_json(tmp_path / "model.json", other)  # what lies beside the link itself comes first
    assert _model_of(link) == other


def test_the_order_of_cases_does_not_matter_and_the_seed_does():
    contents = plain(20, "liver")
    dealt = [deal_folds(each, 5, None, 0)["fold_of"] for each in (contents, dict(reversed(contents.items())))]
    assert dealt[0] == dealt[1]
    assert deal_folds(contents, 5, None, 1)["fold_of"] != dealt[0]


def test_the_same_cases_are_dealt_on_every_platform():
    """By hand: equal cases go round in the order of their names; the first goes to the fold of the smallest digest."""
    fold_of = deal_folds(plain(3, "liver"), 3, None, 0)["fold_of"]
    assert fold_of == {"c00": 1, "c01": 2, "c02": 0}


def test_a_rare_label_is_in_every_fold():
    contents = {**plain(20, "liver"), **{f"d{number}": (["liver", "tumor"], 1) for number in range(5)}}
    for seed in range(20):
        fold_of = deal_folds(contents, 5, None, seed)["fold_of"]
        assert Counter(fold for name, fold in fold_of.items() if name[0] == "d") == dict.fromkeys(range(5), 1)


def test_a_rare_label_goes_before_those_that_most_cases_have():
    """Three folds of two cases; where all labels weighed the same, one fold had two of the rare in 13 of 20 seeds."""
    held = ["common", "common usual", "usual", "usual rare", "common rare", "usual rare"]
    contents = {f"c{number}": (tuple(labels.split()), 1) for number, labels in enumerate(held)}
    for seed in range(20):
        fold_of = deal_folds(contents, 3, None, seed)["fold_of"]
        assert {fold_of[name] for name in ("c3", "c4", "c5")} == {0, 1, 2}


def test_large_and_small_organs_are_in_every_fold():
    contents = {f"c{number:02}": (["liver"], 10**number) for number in range(10)}
    fold_of = deal_folds(contents, 5, None, 0)["fold_of"]
    assert {fold_of[f"c{number:02}"] for number in range(5)} == set(range(5))  # the smaller half: one each


def test_groups_are_told_by_a_pattern():
    names = ["a_1", "a_2", "b_1"]
    assert group_cases(None, names) == {"a_1": "a_1", "a_2": "a_2", "b_1": "b_1"}
    assert group_cases("(.*)_", names) == group_cases("^[^_]+", names) == {"a_1": "a", "a_2": "a", "b_1": "b"}
    with pytest.raises(ValueError, match=r"groups a_\(\.\): no group for 1 of 3: b_1"):
        group_cases("a_(.)", names)
    with pytest.raises(ValueError, match=r"groups \(: expected FILE\.csv:COLUMN or a regular expression"):
        group_cases("(", names)


def test_groups_are_told_by_a_column(tmp_path):
    table = tmp_path / "patients.csv"
    table.write_text("case,sex,patient\na.nii.gz,f,one\nb,m,one\nunknown,m,three\nimages/c.d,f,two\ne.tif,f,two\n")
    names = ["a", "b", "images/c.d", "e"]
    found = group_cases(f"{table}:patient", names)
    assert found == {"a": "one", "b": "one", "images/c.d": "two", "e": "two"}
    with pytest.raises(ValueError, match=r"patients\.csv: expected one column 'case' after the first"):
        group_cases(f"{table}:case", names)
    with pytest.raises(ValueError, match="no group for 1 of 5: f"):
        group_cases(f"{table}:patient", [*names, "f"])
    with pytest.raises(
        ValueError, match=r"patients\.csv: no group for 4 of 4: .*; expected FILE\.csv:COLUMN that lists all"
    ):
        group_cases(f"{table}", names)
    table.write_text("case,patient\na,one\na.nii.gz,two\n")
    with pytest.raises(ValueError, match="line 3: an earlier line gives a another patient; keep one of them"):
        group_cases(f"{table}:patient", ["a"])
    table.write_text("")
    with pytest.raises(ValueError, match=r"one column 'patient' .*: \[\]"):
        group_cases(f"{table}:patient", ["a"])
    table.write_text("case,patient,patient\na,one,two\n")
    with pytest.raises(ValueError, match=r"one column 'patient' .*: \['case', 'patient', 'patient'\]"):
        group_cases(f"{table}:patient", ["a"])
    with pytest.raises(FileNotFoundError):
        group_cases(f"{tmp_path / 'none.csv'}:patient", ["a"])


def test_a_fold_of_volumes_is_stratified_by_what_their_label_maps_hold(tmp_path):
    """Two scans without label, two with a large and a small organ: each of two folds gets one of either kind."""
    volumes = {"a": 0.0, "b": 0.0, "c": 0.048, "d": 0.012}
    listed = tuple(Case(name, tmp_path / f"{name}.nii.gz", tmp_path / f"{name}.nii.gz") for name in volumes)
    dataset = Dataset(tmp_path, "Organ", ("CT",), ("background", "organ"), listed, (), False)
    splits = [split_fold(dataset, [(0.0, each) for each in volumes.values()], fold, 2, None, 0) for fold in (0, 1)]
    for split in splits:
        assert len({case.name for case in split.validation} & {"a", "b"}) == 1
        assert {*split.validation} | {*split.training} == {*listed}
        assert split.held_out
    assert splits[0].training == splits[1].validation
    assert splits[0].description.startswith("fold 0 of 2 (from 0): 2 of 4 cases held out; stratified by labels")
    write_json(tmp_path / "split.json", splits[0].to_json())
    again = read_split(dataset, Path(tmp_path / "split.json"))
    assert replace(again, description=splits[0].description, record=splits[0].record) == splits[0]
    assert {"fold": 0, "folds": 2, "seed": 0, "groups": None}.items() <= splits[0].to_json().items()


@pytest.mark.parametrize("seed", range(8))
def test_of_cases_with_the_same_labels_the_two_largest_are_apart(seed):
    contents: dict[str, Content] = {"a": (["liver"], 1), "b": (["liver"], 90), "c": (["liver"], 100)}
    fold_of = deal_folds(contents, 2, None, seed)["fold_of"]
    assert fold_of["b"] != fold_of["c"]
