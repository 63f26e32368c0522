import os
from pathlib import Path

import numpy as np
import pytest

from apps.pathology.patch_table import PatchTable, cut_validation


def table(folder: Path, labels: list[int], files: int = 2, size: int = 32) -> PatchTable:
    folder.mkdir(exist_ok=True)
    paths = tuple(folder / f"slide_{number}.tif" for number in range(files))
    for path in paths:
        if not path.exists():
            path.write_bytes(b"pixels")
            os.utime(path, (1, 1))
    rows = np.arange(len(labels), dtype=np.int32)
    return PatchTable(paths, rows % files, np.stack([rows * 7, rows * 3], 1), np.array(labels, np.uint8), size)


def places(part: PatchTable) -> set[tuple[int, ...]]:
    return set(map(tuple, np.column_stack([part.file, part.corner]).tolist()))


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


def test_cut_is_stratified_and_whole(tmp_path):
    whole = table(tmp_path, [1] * 8 + [0] * 40)
    training, validation = cut_validation(whole, 0.25, 0)
    assert (int(validation.label.sum()), len(validation)) == (2, 12)
    assert places(training) | places(validation) == places(whole)
    assert not places(training) & places(validation)


def test_cut_depends_on_seed_names_and_places_alone(tmp_path):
    whole = table(tmp_path, [0, 1] * 20)
    again = cut_validation(whole.take(np.arange(40)[::-1]), 0.3, 5)[1]
    assert places(cut_validation(whole, 0.3, 5)[1]) == places(again)
    assert places(cut_validation(whole, 0.3, 6)[1]) != places(again)


def test_cut_leaves_each_label_on_both_sides_where_it_can(tmp_path):
    training, validation = cut_validation(table(tmp_path, [1, 1, 0]), 0.01, 0)
    assert (sorted(training.label.tolist()), validation.label.tolist()) == ([0, 1], [1])
    with pytest.raises(ValueError, match="2 training patches: to hold one out"):
        cut_validation(table(tmp_path, [1, 0]), 0.5, 0)
