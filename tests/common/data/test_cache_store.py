import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from medspeed.common.data import cache as store
from medspeed.common.data.cache import file_state, prepared_case
from medspeed.common.data.dataset import Case
from medspeed.common.data.preparation import Preparation, PreparedCase, prepare_case
from medspeed.common.data.threads import map_in_threads

ROOT = Path(__file__).resolve().parents[3]
WINDOW = Preparation(spacing=(2.0, 2.0, 3.0), normalisation="window", window=(-100.0, 200.0))


def write_case(folder: Path, name: str, seed: int = 0) -> Case:
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    case = Case(name, folder / f"{name}.nii.gz", folder / f"{name}_label.nii.gz")
    assert case.label is not None
    affine = np.diag([-1.5, 1.5, 3.0, 1.0])
    voxels = random.integers(-300, 300, (20, 18, 10), dtype=np.int16)
    nib.save(nib.Nifti1Image(voxels, affine), case.image)
    nib.save(nib.Nifti1Image(random.integers(0, 3, voxels.shape, dtype=np.uint8), affine), case.label)
    return case


@pytest.fixture
def cases(tmp_path) -> list[Case]:
    return [write_case(tmp_path / "raw", name, seed) for seed, name in enumerate(["c", "a", "b"])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """Return the list of names that have been prepared so far."""
    names: list[str] = []

    def spy(case: Case, *args: object) -> PreparedCase:
        names.append(case.name)
        return prepare_case(case, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "prepare_case", spy)
    return names


def get(
    cases: list[Case], folder: Path, preparation: Preparation = WINDOW, classes: int = 3, workers: int | None = None
) -> list[PreparedCase]:
    one = partial(prepared_case, preparation=preparation, allowed=range(classes), folder=folder)
    return map_in_threads(one, cases, workers=workers)


def is_right(entry: PreparedCase, case: Case, preparation: Preparation = WINDOW) -> bool:
    fresh = prepare_case(case, preparation, range(3))
    assert fresh.label is not None
    assert entry.label is not None
    same = torch.equal(entry.image, fresh.image) and torch.equal(entry.label, fresh.label)
    return same and (entry.name, entry.grid) == (fresh.name, fresh.grid)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.startswith(".part-")]


def test_cold_then_warm(cases, folder, made, caplog):
    cold = get(cases, folder)
    assert sorted(made) == ["a", "b", "c"]
    made.clear()
    warm = get(cases, folder)
    assert made == []
    for entries in (cold, warm):
        assert [entry.name for entry in entries] == ["c", "a", "b"]
        assert all(is_right(entry, case) for entry, case in zip(entries, cases, strict=True))
    assert caplog.records == []
    assert leftovers(folder) == []


def test_what_a_killed_preparation_left_is_removed(cases, folder):
    (folder / "locks").mkdir(parents=True)
    for name in ("a", "b-a"):
        (folder / f".part-0123abcd-{name}.safetensors").write_bytes(b"half")
    get([case for case in cases if case.name == "a"], folder)
    assert leftovers(folder) == [".part-0123abcd-b-a.safetensors"]  # another's, who may be at work


def test_entries_are_as_readable_as_the_umask_allows(cases, folder, made):
    before = os.umask(0o027)
    try:
        get(cases, folder)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*.safetensors")} == {0o640}


def test_only_new_cases_are_prepared(cases, folder, made):
    get(cases[:1], folder)
    made.clear()
    entries = get([cases[1], cases[0], cases[1]], folder)
    assert made == ["a"]
    assert [entry.name for entry in entries] == ["a", "c", "a"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spacing": (3.0, 3.0, 3.0)}, "stale: spacing [2.0, 2.0, 3.0] is now [3.0, 3.0, 3.0]"),
        ({"window": (-100.0, 250.0)}, "stale: window [-100.0, 200.0] is now [-100.0, 250.0]"),
        ({"normalisation": "zscore", "window": None}, "stale: normalisation window is now zscore, window"),
    ],
)
def test_changed_parameters_are_seen(cases, folder, made, caplog, change, said):
    get(cases, folder)
    made.clear()
    changed = replace(WINDOW, **change)
    for _ in range(2):
        entries = get(cases, folder, changed)
        assert all(is_right(entry, case, changed) for entry, case in zip(entries, cases, strict=True))
    assert sorted(made) == ["a", "b", "c"]
    assert len(caplog.records) == 3
    assert all(said in record.message for record in caplog.records)


def test_more_classes_and_a_raised_version_are_seen(cases, folder, made, monkeypatch, caplog):
    get(cases[:1], folder)
    get(cases[:1], folder, classes=4)
    assert "classes [0, 1, 2] is now [0, 1, 2, 3]" in caplog.text
    monkeypatch.setattr(store, "PREPARATION_VERSION", 1000)
    get(cases[:1], folder, classes=4)
    assert "is now 1000" in caplog.text
    assert made == ["c", "c", "c"]


@pytest.mark.parametrize("which", ["image", "label"])
def test_a_changed_source_is_seen(cases, folder, made, caplog, which):
    get(cases, folder)
    made.clear()
    other = write_case(folder.parent / "other", "x", seed=9)
    shutil.copy(getattr(other, which), getattr(cases[1], which))
    entries = get(cases, folder)
    assert made == ["a"]
    assert is_right(entries[1], cases[1])
    assert [record.name for record in caplog.records] == ["medspeed.common.data.cache"]
    assert f"a.safetensors: preparing it again: stale: {which} " in caplog.text


def flip(position: float) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        place = int(position * (len(content) - 1))
        return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]

    return changed


@pytest.mark.parametrize(
    "damage",
    [
        *[pytest.param(flip(position), id=f"byte at {position:.0%}") for position in (0, 0.01, 0.03, 0.3, 0.8, 1)],
        pytest.param(lambda content: content[:-1], id="one byte short"),
        pytest.param(lambda content: content[: len(content) // 2], id="half"),
        pytest.param(lambda content: content[:5], id="five bytes"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: bytes(len(content)), id="zeros"),
    ],
)
def test_a_damaged_entry_is_made_again(cases, folder, made, caplog, damage):
    get(cases, folder)
    made.clear()
    entry = folder / "a.safetensors"
    sound = entry.read_bytes()
    entry.write_bytes(damage(sound))
    others = {path: path.stat().st_ino for path in folder.glob("[bc].safetensors")}
    entries = get(cases, folder)
    assert made == ["a"]
    assert entry.read_bytes() == sound
    assert all(is_right(entry, case) for entry, case in zip(entries, cases, strict=True))
    assert {path: path.stat().st_ino for path in others} == others
    assert len(caplog.records) == 1
    assert "a.safetensors: preparing it again: damaged" in caplog.text


def test_a_damaged_source_is_named_and_loses_nothing_else(cases, folder, made):
    label = cases[1].label
    assert label is not None
    sound = label.read_bytes()
    label.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(ValueError, match=r"raw/a_label\.nii\.gz .* is truncated or damaged"):
        get(cases, folder, workers=1)
    assert made[:2] == ["c", "a"]
    assert leftovers(folder) == []
    label.write_bytes(sound)
    already = {path.stem for path in folder.glob("*.safetensors")}
    assert "c" in already
    made.clear()
    entries = get(cases, folder)
    assert set(made) == {"a", "b", "c"} - already
    assert all(is_right(entry, case) for entry, case in zip(entries, cases, strict=True))


def test_labels_outside_the_list_are_named(cases, folder):
    with pytest.raises(ValueError, match=r"_label\.nii\.gz: expected label values 0, 1, found 0, 1, 2"):
        get(cases, folder, classes=2)


SHARED = """
import json, sys, time
from pathlib import Path
from medspeed.common.data import cache as store
from medspeed.common.data.dataset import Case
from medspeed.common.data.preparation import Preparation, prepare_case
from medspeed.common.data.threads import map_in_threads

root, me, names, upper_bound = Path(sys.argv[1]), *json.loads(sys.argv[2])
made = []
def slow(case, *rest):
    made.append(case.name)
    time.sleep(0.05)
    return prepare_case(case, *rest)
store.prepare_case = slow
cases = [Case(n, root / f"raw/{n}.nii.gz", root / f"raw/{n}_label.nii.gz") for n in names]
(root / f"{me}.ready").touch()
while len(list(root.glob("*.ready"))) < 2:
    time.sleep(0.01)
for folder, upper in ("shared", 200.0), ("disputed", upper_bound):
    wanted = Preparation((2.0, 2.0, 3.0), "window", (-100.0, upper))
    def stored(case):
        return store.prepared_case(case, wanted, range(3), root / folder)

    entries = map_in_threads(stored, cases, workers=2)
    print(json.dumps([[e.name, e.image.double().sum().item(), e.label.long().sum().item()] for e in entries]))
    print(json.dumps(made))
"""


def figures(case: Case, upper: float) -> list[object]:
    fresh = prepare_case(case, replace(WINDOW, window=(-100.0, upper)), range(3))
    assert fresh.label is not None
    return [case.name, fresh.image.double().sum().item(), fresh.label.long().sum().item()]


def test_two_processes_on_one_folder(tmp_path):
    names = [f"case{i}" for i in range(8)]
    cases = [write_case(tmp_path / "raw", name, seed) for seed, name in enumerate(names)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARED, tmp_path, json.dumps([me, names, upper])],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for me, upper in enumerate((200.0, 100.0))
    ]
    answers = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    (shared_0, made_0, disputed_0, _), (shared_1, made_1, disputed_1, _) = (map(json.loads, lines) for lines in answers)
    assert sorted(made_0 + made_1) == names  # where they agree, each case is prepared by one of the two
    assert shared_0 == shared_1 == [figures(case, 200.0) for case in cases]
    assert disputed_0 == [figures(case, 200.0) for case in cases]  # where they do not, each gets its own
    assert disputed_1 == [figures(case, 100.0) for case in cases]
    assert leftovers(tmp_path) == []


def test_the_room_needed_is_an_upper_bound(cases, folder):
    get(cases, folder)
    for case in cases:
        written = (folder / f"{case.name}.safetensors").stat().st_size
        assert written - 4096 < store.prepared_bytes(case, WINDOW) < 2 * written
        # RAS 20 x 18 x 10 at 1.5 x 1.5 x 3 mm becomes 15 x 14 x 10 at 2 x 2 x 3 mm
        assert store.prepared_bytes(case, WINDOW) == 15 * 14 * 10 * 3


def test_a_disk_that_fills_up_keeps_what_it_has(cases, folder, made):
    get(cases[:1], folder)
    sound = (folder / "c.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # writing past it fails as a full disk does
    try:
        with pytest.raises(OSError, match=rf"{folder}/[ab]\.safetensors: cannot be written: .*File too large.*; free"):
            get(cases, folder)
        with pytest.raises(OSError, match="cannot be written"):
            get(cases[:1], folder, replace(WINDOW, window=(0.0, 100.0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert leftovers(folder) == []
    assert [path.name for path in folder.glob("*.safetensors")] == ["c.safetensors"]
    assert (folder / "c.safetensors").read_bytes() == sound
    made.clear()
    get(cases, folder)
    assert sorted(made) == ["a", "b"]


def test_a_folder_that_cannot_be_made_is_named(cases, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "file" / "store")):
        get(cases, tmp_path / "file" / "store")


def test_a_warm_start_writes_nothing(cases, folder, made):
    get(cases, folder)
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    get(cases, folder)
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]} == before


def test_changed_content_of_equal_size_and_time_is_seen(tmp_path):
    file = tmp_path / "scan"
    file.write_bytes(b"voxels")
    first, status = file_state(file), file.stat()
    file.write_bytes(b"VOXELS")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_state(file)[:2] == first[:2]
    assert file_state(file) != first


@pytest.mark.real_data
def test_real_scans(real_data, tmp_path):
    image, label = (real_data / "ct_spleen_real" / sub / "real_a.nii.gz" for sub in ("imagesTr", "labelsTr"))
    preparation = Preparation((1.5, 1.5, 2.0), "window", (-57.0, 164.0))
    for _ in range(2):
        case = Case("real_a", image, label)
        entry = prepared_case(case, preparation, range(2), tmp_path)
        fresh = prepare_case(case, preparation, range(2))
        assert torch.equal(entry.image, fresh.image)
        assert entry.grid == fresh.grid
