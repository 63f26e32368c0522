import os
from pathlib import Path

import numpy as np
import pytest

from apps.pathology.patches.table import PatchTable, hold_out


def table(folder: Path, labels: list[int], files: int = 2, size: int = 32) -> PatchTable:
    folder.mkdir(exist_ok=True)
    paths = tuple(folder / f"slide_{number}.tif" for number in range(files))
    for path in paths:
        if not path.exists():
            path.write_bytes(b"pixels")
            os.utime(path, (1, 1))
    rows = np.arange(len(labels), dtype=np.int32)
    return PatchTable(paths, rows % files, np.stack([rows * 7, rows * 3], 1), np.array(labels, np.uint8), size)


def test_take_keeps_order_and_files(tmp_path):
    whole = table(tmp_path, [0, 1, 0, 1])
    some = whole.take(np.array([3, 0]))
    assert len(some) == 2
    assert some.label.tolist() == [1, 0]
    assert some.corner.tolist() == [[21, 9], [0, 0]]
    assert some.file.tolist() == [1, 0]
    assert some.files == whole.files
    assert whole.take(np.array([True, False, False, True])).label.tolist() == [0, 1]


def test_digest_is_the_same_in_another_folder(tmp_path):
    assert table(tmp_path / "a", [0, 1]).digest() == table(tmp_path / "b", [0, 1]).digest()


def test_digest_tells_whatever_changes(tmp_path):
    whole = table(tmp_path, [0, 1, 1])
    found = [whole.digest(), table(tmp_path, [0, 1, 0]).digest(), table(tmp_path, [0, 1, 1], size=64).digest()]
    found += [table(tmp_path, [0, 1, 1], files=3).digest(), whole.take(np.array([1, 0, 2])).digest()]
    whole.corner[0, 0] += 1
    found.append(whole.digest())
    os.utime(whole.files[0], (2, 2))
    found.append(whole.digest())
    whole.files[0].write_bytes(b"other pixels")
    os.utime(whole.files[0], (2, 2))
    found.append(whole.digest())
    assert len(set(found)) == len(found) == 8


@pytest.mark.parametrize("wrong", ["file", "corner", "label"])
def test_wrong_types_are_the_callers_mistake(tmp_path, wrong):
    whole = table(tmp_path, [0, 1])
    arrays = {"file": whole.file, "corner": whole.corner, "label": whole.label}
    arrays[wrong] = arrays[wrong].astype(np.int64)
    with pytest.raises(AssertionError):
        PatchTable(whole.files, size=32, **arrays)


@pytest.mark.parametrize(
    ("tumour", "normal", "held"), [(4, 4, (1, 1)), (8, 20, (2, 5)), (2, 3, (1, 1)), (1, 3, (0, 1)), (3, 0, (1, 0))]
)
def test_a_share_of_each_kind_is_held_out(tumour, normal, held):
    labels, names = np.array([1] * tumour + [0] * normal), [f"slide_{n}" for n in range(tumour + normal)]
    out = hold_out(labels, names, 0.25, 0)
    assert (int(labels[out].sum()), int((1 - labels[out]).sum())) == held


def test_what_is_held_out_depends_on_seed_and_names_alone():
    labels, names = np.array([0, 1] * 20), [f"slide_{n}" for n in range(40)]
    out = hold_out(labels, names, 0.3, 5)
    assert np.array_equal(hold_out(labels, names[::-1], 0.3, 5)[::-1], hold_out(labels[::-1], names, 0.3, 5))
    assert not np.array_equal(out, hold_out(labels, names, 0.3, 6))
    assert out[np.argsort(names)].tolist() == hold_out(labels[np.argsort(names)], sorted(names), 0.3, 5).tolist()


def test_nothing_to_hold_out():
    with pytest.raises(ValueError, match="2 to train on: to hold one out"):
        hold_out(np.array([1, 0]), ["a", "b"], 0.5, 0)
