import os
import pickle
import re
import resource

import pytest
import torch

from medspeed.common.inference.model import load_weights, save_weights
from medspeed.common.training.state import load_checkpoint, save_checkpoint

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


def test_round_trip(tmp_path):
    state = {"step": 7, "optimizer": {"v": torch.ones(2)}, "losses": [0.5, 0.25]}
    save_checkpoint(tmp_path, (2, 7), WEIGHTS, state)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert all(torch.equal(found[0][name], WEIGHTS[name]) for name in WEIGHTS)
    assert found[1]["step"] == 7
    assert found[1]["losses"] == [0.5, 0.25]
    assert (tmp_path / "last").resolve() == tmp_path / "epoch-000002-step-000007.safetensors"


def test_the_newest_and_the_one_before_are_kept(tmp_path):
    for position in [(0, 1), (0, 2), (1, 0)]:
        save_checkpoint(tmp_path, position, WEIGHTS, {"position": list(position)})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch-000000-step-000002.safetensors", "epoch-000001-step-000000.safetensors", "last"]  # fmt: skip
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found[1]["position"] == [1, 0]


def test_nothing_there(tmp_path):
    assert load_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize(
    "function",
    ["torch.save", "medspeed.common.training.state.save_weights", "medspeed.common.files.flush_to_disk"],
)
def test_a_write_that_fails_keeps_the_checkpoint_before(tmp_path, monkeypatch, function):
    save_checkpoint(tmp_path, (0, 1), WEIGHTS, {"step": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function, full)
    with pytest.raises(OSError, match="No space left") as full_disk:
        save_checkpoint(tmp_path, (0, 2), WEIGHTS, {"step": 2})
    assert function == "torch.save" or full_disk.value.filename is not None
    monkeypatch.undo()
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found[1]["step"] == 1
    assert not list(tmp_path.glob(".part-*"))


def test_what_a_killed_process_left_is_cleared_away(tmp_path):
    """Also the link that was about to become `last`, which leads to a whole checkpoint."""
    whole = save_checkpoint(tmp_path, (1, 2), {"a": torch.ones(2)}, {"step": 2})
    (tmp_path / ".part-7").symlink_to(whole.name)
    (tmp_path / ".part-dangling").symlink_to("nowhere")
    (tmp_path / ".part-8").touch()
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint is not None
    assert torch.equal(checkpoint[0]["a"], torch.ones(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [whole.name, "last"]


def test_a_folder_of_an_earlier_version_is_refused(tmp_path):
    (tmp_path / "epoch-000000-step-000009").mkdir()
    (tmp_path / "last").symlink_to("epoch-000000-step-000009")
    with pytest.raises(ValueError, match="a checkpoint of an earlier version; resume with that version, "):
        load_checkpoint(tmp_path)


def test_a_users_copy_is_no_checkpoint(tmp_path):
    copy = tmp_path / "epoch-000009-step-000001.safetensors.bak"
    copy.touch()
    assert load_checkpoint(tmp_path) is None
    for number in (1, 2, 3):
        save_checkpoint(tmp_path, (0, number), WEIGHTS, {"step": number})
    assert (load_checkpoint(tmp_path) or ({}, {}))[1]["step"] == 3
    assert copy.exists()


def test_a_pickled_bomb_is_named_and_never_runs(tmp_path):
    save_checkpoint(tmp_path, (0, 1), WEIGHTS, {"step": 1})
    marker = tmp_path / "executed"
    bomb = torch.frombuffer(bytearray(pickle.dumps(Bomb(marker), protocol=2)), dtype=torch.uint8)
    save_weights((tmp_path / "last").resolve(), WEIGHTS | {"state of the training": bomb}, {})
    with pytest.raises(ValueError, match=r"step-000001.safetensors: cannot be loaded safely .* to start over"):
        load_checkpoint(tmp_path)
    torch.save({"model": Bomb(marker)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt: cannot be loaded safely as a state dict"):
        load_weights(tmp_path / "model.pt")
    assert not marker.exists()


def test_a_full_disk_is_an_error_of_the_system_that_names_the_folder(tmp_path):
    """As no error of torch.save is, nor one of safetensors; the checkpoint before stays."""
    state = {"step": 1, "optimizer": torch.zeros(20_000)}
    save_checkpoint(tmp_path, (0, 1), WEIGHTS, state)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for weights in (WEIGHTS, {"a": torch.zeros(20_000)}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            with pytest.raises(OSError, match=re.escape(str(tmp_path))):
                save_checkpoint(tmp_path, (0, 2), weights, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found[1]["step"] == 1


@pytest.mark.parametrize("place", [0.25, 0.75])  # of the state, and of the weights
def test_a_flipped_bit_is_refused_and_the_one_before_named(tmp_path, place):
    for step in (1, 2):
        save_checkpoint(tmp_path, (0, step), {"a": torch.zeros(1000)}, {"optimizer": torch.zeros(1000)})
    file = tmp_path / "last"
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 16
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"has changed .* remove it to resume from epoch-000000-step-000001"):
        load_checkpoint(tmp_path)
    (tmp_path / "epoch-000000-step-000002.safetensors").unlink()
    assert load_checkpoint(tmp_path) is not None
