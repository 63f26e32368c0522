import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from medspeed.common.data.cache import read_entry, write_entry
from medspeed.common.data.geometry import working_grid
from medspeed.common.data.preparation import PreparedCase

KEY = json.dumps({"image": "ab", "spacing": [1.5, 1.5, 2.0], "version": 1})


def prepared() -> PreparedCase:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(2, 3, 4, 5, generator=generator).half()
    label = torch.randint(0, 3, (3, 4, 5), generator=generator, dtype=torch.uint8)
    affine = torch.diag(torch.tensor([0.7, -0.8, 5.0, 1.0])).double().numpy()
    return PreparedCase("a", image, label, working_grid((6, 8, 2), affine, (1.5, 1.5, 2.0)))


def equal(a: PreparedCase, b: PreparedCase) -> bool:
    assert a.label is not None
    assert b.label is not None
    return (a.name, a.grid) == (b.name, b.grid) and torch.equal(a.image, b.image) and torch.equal(a.label, b.label)


@pytest.fixture(scope="module")
def entry(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("entries") / "a.safetensors"
    write_entry(path, prepared(), KEY)
    return path


def test_what_is_written_comes_back(tmp_path):
    write_entry(tmp_path / "a.safetensors", prepared(), KEY)
    back = read_entry(tmp_path / "a.safetensors", "a", KEY)
    assert equal(back, prepared())
    assert back.image.dtype == torch.float16
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_an_entry_is_plain_safetensors(entry):
    stored = load_file(entry)
    assert torch.equal(stored["image"], prepared().image)
    assert stored["label"].shape == (3, 4, 5)


def test_the_tensors_are_the_file_mapped(entry):
    back = read_entry(entry, "a", KEY)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(entry))]
    spans = [tuple(int(bound, 16) for bound in line[0].split("-")) for line in maps]
    assert back.label is not None
    for tensor in (back.image, back.label):
        assert any(low <= tensor.data_ptr() < high for low, high in spans)
        assert tensor.is_contiguous()


def test_writing_to_the_tensors_leaves_the_file_alone(entry):
    read_entry(entry, "a", KEY).image.fill_(7)
    assert equal(read_entry(entry, "a", KEY), prepared())


def test_an_older_entry_stays_mapped_when_it_is_replaced(tmp_path):
    path = tmp_path / "a.safetensors"
    write_entry(path, prepared(), KEY)
    old = read_entry(path, "a", KEY)
    newer = replace(prepared(), image=prepared().image + 1)
    write_entry(path, newer, KEY)
    assert equal(old, prepared())
    assert equal(read_entry(path, "a", KEY), newer)


def test_no_entry_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_entry(tmp_path / "a.safetensors", "a", KEY)


def test_another_key_says_what_has_changed(entry):
    wanted = json.dumps({"image": "ab", "spacing": [1.0, 1.0, 1.0], "version": 2})
    with pytest.raises(ValueError, match="stale") as error:
        read_entry(entry, "a", wanted)
    assert str(error.value) == "stale: spacing [1.5, 1.5, 2.0] is now [1.0, 1.0, 1.0], version 1 is now 2"


@settings(deadline=None, max_examples=300)
@given(position=st.integers(0, 10**6), change=st.integers(1, 255))
@example(position=1444, change=ord(" ") ^ ord("\t"))
def test_no_changed_byte_changes_what_is_read(entry, position, change):
    content = bytearray(entry.read_bytes())
    original = bytes(content)
    content[position % len(content)] ^= change
    damaged = entry.with_name("damaged.safetensors")
    damaged.write_bytes(content)
    refusal, back = None, None
    try:
        back = read_entry(damaged, "a", KEY)
    except ValueError as error:
        refusal = str(error)
    if back is None:
        assert refusal is not None
        assert refusal.startswith("damaged")
    else:  # white space between the parts of the header is no content: one kind of it for another is no damage
        assert equal(back, prepared())
        assert bytes(content).split() == original.split()


def test_no_missing_or_added_byte_goes_unseen(entry):
    content = entry.read_bytes()
    damaged = entry.with_name("cut.safetensors")
    for length in [*range(0, len(content), 7), len(content) - 1]:
        damaged.write_bytes(content[:length])
        with pytest.raises(ValueError, match="damaged"):
            read_entry(damaged, "a", KEY)
    damaged.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match="damaged"):
        read_entry(damaged, "a", KEY)


def test_a_safetensors_file_of_something_else_is_no_entry(tmp_path):
    save_file({"weight": torch.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="damaged: CRC-32"):
        read_entry(tmp_path / "a.safetensors", "a", KEY)


def test_a_failed_write_leaves_the_older_entry(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_entry(path, prepared(), KEY)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_entry(path, replace(prepared(), image=prepared().image + 1), KEY)
    monkeypatch.undo()
    assert equal(read_entry(path, "a", KEY), prepared())
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
