"""Twenty steps of every app and recipe give the losses that they always gave: the same maths, whatever moves."""

import json
from pathlib import Path

import pytest

from tests import golden
from tests.common.rank_programs import StartRanks, start_ranks  # noqa: F401 - the second is a fixture
from tests.emulated_graph import emulated

# Of the loss. Without AVX-512, and with one thread instead of two, the losses differ by 3e-7 (volumes) to 2e-4
# (patches); a smoothing term or a decay that is another shows as 1e-3 and more.
TOLERANCE = 5e-4
KNOWN: dict[str, list[float]] = json.loads(golden.KNOWN.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def few_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one in every step, 45 MB each."""
    monkeypatch.setenv("MEDSPEED_CHECKPOINT_SECONDS", "3600")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden") / "data"
    golden.make_data(folder)
    return folder


@pytest.fixture(scope="module")
def golden_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden-store")


def test_every_recipe_of_every_app_is_held():
    assert set(KNOWN) == set(golden.RUNS)
    assert {len(steps) for steps in KNOWN.values()} == {20}


@pytest.mark.parametrize("name", golden.RUNS)
def test_losses_are_those_of_before(name, data, golden_store, tmp_path):
    assert golden.losses(name, tmp_path / "run", golden_store, data) == pytest.approx(KNOWN[name], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spleen-fast", "brats-fast", "pathology-fast"])
def test_losses_of_captured_steps_are_those_of_before(name, data, golden_store, tmp_path, monkeypatch):
    with emulated(monkeypatch):
        found = golden.losses(name, tmp_path / "run", golden_store, data)
    assert "steps: one CUDA graph per step" in (tmp_path / "run" / "run.log").read_text()
    assert found == pytest.approx(KNOWN[name], rel=TOLERANCE)


def test_losses_of_a_stopped_and_resumed_run_are_those_of_a_whole_one(data, golden_store, tmp_path):
    with golden.told_to_stop(10) as done, pytest.raises(SystemExit):  # within the third epoch
        golden.losses("spleen-fast", tmp_path / "run", golden_store, data)
    assert len(done) == 10
    golden.train("spleen", {"resume": tmp_path / "run"})
    assert golden.recorded(tmp_path / "run") == pytest.approx(KNOWN["spleen-fast"], rel=TOLERANCE)


def test_losses_of_two_ranks_are_those_of_one_process(data, golden_store, tmp_path, start_ranks):  # noqa: F811
    by_ranks("brats-fast", (tmp_path / "run", golden_store, data), start_ranks)
    assert golden.recorded(tmp_path / "run") == pytest.approx(KNOWN["brats-fast"], rel=TOLERANCE)


@pytest.mark.slow
def test_two_ranks_share_the_patches(data, golden_store, tmp_path, start_ranks):  # noqa: F811
    """The losses of batch-normalised parts differ from the whole's; what is judged is all of the patches on each."""
    by_ranks("pathology-muon", (tmp_path / "two", golden_store, data), start_ranks, **{"parallel.partitions": 2})
    log, parts = (tmp_path / "two" / "run.log").read_text(), {"parallel.partitions": 2, "parallel.accumulate": 2}
    assert "batch normalization: per rank" in log
    assert "cache: 8 patches" in log
    one = golden.losses("pathology-muon", tmp_path / "one", golden_store, data, **parts)  # the parts of each batch
    assert golden.recorded(tmp_path / "two")[0] == pytest.approx(one[0], rel=1e-5)  # later: Muon magnifies rounding


def by_ranks(name: str, folders: tuple[Path, ...], start: StartRanks, **changed: object) -> None:
    for program in start(2, "tests.golden", json.dumps([[name, *map(str, folders)], changed])):
        status, output = program.wait()
        assert status == 0, output
