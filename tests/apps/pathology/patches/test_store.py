import os
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from medspeed.apps.pathology.config import JITTER, Augmentation, PathologyConfig
from medspeed.apps.pathology.patches import store as patch_store
from medspeed.apps.pathology.patches.store import (
    Patches,
    decoded,
    hold,
    patch_batches,
    rank_rows,
)
from medspeed.apps.pathology.patches.table import PatchTable
from medspeed.apps.pathology.patches.table import decode as decode_patches
from medspeed.common.clock import Clock
from medspeed.common.data.batches import Batches
from medspeed.common.ranks import Ranks
from medspeed.common.run import Run
from medspeed.common.training.config import Parallel
from tests.support import refuse_host_sync

CPU = torch.device("cpu")
COUNT = 23
COLOURS = Augmentation(JITTER)
MOVES = Augmentation((0, 0, 0, 0), (1.0, 1.0))  # flips and quarter turns


def noise(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)


@pytest.fixture
def images(tmp_path: Path) -> PatchTable:
    """Two images, the second one first."""
    files = tuple(tmp_path / name for name in ("a.png", "b.png"))
    for number, file in enumerate(files):
        Image.fromarray(noise(32, 32, seed=number)).save(file)
    order, corner = np.array([1, 0], np.int32), np.zeros((2, 2), np.int32)
    return PatchTable(files, order, corner, np.array([1, 0], np.uint8), 32, whole=True)


@pytest.fixture
def squares(tmp_path: Path) -> PatchTable:
    """Squares of two slides in turn."""
    files = tuple(tmp_path / name for name in ("s.tif", "t.tif"))
    for number, file in enumerate(files):
        tifffile.imwrite(file, noise(256, 320, seed=number), tile=(64, 64), photometric="rgb")
    corner = np.array([[100, 50], [0, 0], [3, 200]], np.int32)
    return PatchTable(files, np.array([1, 0, 1], np.int32), corner, np.array([1, 0, 0], np.uint8), 32)


def stored(table: PatchTable, folder: Path) -> np.ndarray:
    run = Run(folder, CPU, Clock(), resumed=False, ranks=Ranks())
    return np.array(decoded(table, PathologyConfig(store=folder, reader="tifffile", workers=1), run).pixels)


def test_patches_are_those_of_their_files_in_the_tables_order(tmp_path: Path, images: PatchTable, squares: PatchTable):
    found = stored(images, tmp_path / "store")
    assert found.dtype == np.uint8
    assert np.array_equal(found, [np.asarray(Image.open(file)).transpose(2, 0, 1) for file in images.files[::-1]])
    slides = [tifffile.imread(squares.files[file]) for file in squares.file]
    due = [each[y : y + 32, x : x + 32].transpose(2, 0, 1) for each, (x, y) in zip(slides, squares.corner, strict=True)]
    assert np.array_equal(stored(squares, tmp_path / "store"), due)


def test_a_sound_store_is_read_and_a_damaged_one_made_anew(
    tmp_path: Path, squares: PatchTable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(patch_store, "_CHECKED_AT_ONCE", 1000)
    whole = stored(squares, tmp_path / "store")
    read: list[list[int]] = []

    def noting(*given: Any) -> Any:
        for rows, pixels in decode_patches(*given):
            read.append(rows.tolist())
            yield rows, pixels

    monkeypatch.setattr(patch_store, "decode", noting)
    stored(squares, tmp_path / "store")
    assert read == []
    (path,) = (tmp_path / "store").rglob("*.npy")
    content = bytearray(path.read_bytes())
    content[200] ^= 1  # in the first of several blocks
    path.write_bytes(content)
    assert np.array_equal(stored(squares, tmp_path / "store"), whole)
    assert read == [[1], [0, 2]]  # slide by slide
    for torn in (content[:-100], b""):
        path.write_bytes(torn)
        assert np.array_equal(stored(squares, tmp_path / "store"), whole)


def test_damage_is_told_once_by_every_run_and_another_reader_decodes_anew(
    tmp_path: Path,
    squares: PatchTable,
    images: PatchTable,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Readers make different pixels of what is damaged; image files have none."""
    read: list[str] = []

    def damaged(table: PatchTable, reader: Any, workers: int, tell: Any) -> Any:
        read.append(reader)
        yield from decode_patches(table, reader, workers, tell)
        tell("s.tif: 2 DAMAGED TILES treated as white", "warning")

    monkeypatch.setattr(patch_store, "decode", damaged)
    for number, reader in enumerate(("tifffile", "tifffile", "openslide")):
        (tmp_path / str(number)).mkdir()
        run = Run(tmp_path / str(number), CPU, Clock(), resumed=False, ranks=Ranks())
        config = PathologyConfig(store=tmp_path / "store", reader=reader, workers=1)  # type: ignore[arg-type]
        for _ in range(2):  # a run asks for its patches to train and to judge
            decoded(squares, config, run)
        assert capsys.readouterr().out.count("s.tif: 2 DAMAGED TILES") == 1
        decoded(images, config, run)
    assert read == ["tifffile", "tifffile", "openslide"]  # the second is of the images


def test_another_file_gives_another_store(tmp_path: Path, images: PatchTable):
    stored(images, tmp_path / "store")
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(images.files[0])
    assert stored(images, tmp_path / "store")[1].max() == 0


def test_a_file_replaced_by_one_of_its_size_and_time_is_decoded_anew(tmp_path: Path):
    """As copying tools leave it; what is of the same content is decoded once."""
    file = tmp_path / "a.bmp"
    table = PatchTable((file,), np.zeros(1, np.int32), np.zeros((1, 2), np.int32), np.ones(1, np.uint8), 32, whole=True)
    for value in (0, 9):
        Image.fromarray(np.full((32, 32, 3), value, np.uint8)).save(file)
        os.utime(file, (1e9, 1e9))
        assert (stored(table, tmp_path / "store") == value).all()
    assert len(list((tmp_path / "store").rglob("*.npy"))) == 1


def test_a_file_replaced_after_the_clock_went_back_is_decoded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another file of the set has the latest time before and after."""
    files, one = (tmp_path / "a.bmp", tmp_path / "b.bmp"), np.zeros((2, 2), np.int32)
    table = PatchTable(files, np.arange(2, dtype=np.int32), one, np.ones(2, np.uint8), 32, whole=True)
    times, plain = dict(zip(files, (20, 99), strict=True)), Path.stat

    def stat(path: Path, **how: Any) -> Any:
        found = plain(path, **how)
        return (
            mock.Mock(wraps=found, st_size=found.st_size, st_mtime_ns=1, st_ctime_ns=times[path])
            if path in times
            else found
        )

    for value, hour in ((0, 20), (9, 10)):
        for file, level in zip(files, (value, 7), strict=True):
            Image.fromarray(np.full((32, 32, 3), level, np.uint8)).save(file)
        times[files[0]] = hour
        with monkeypatch.context() as clock:
            clock.setattr(Path, "stat", stat)
            assert (stored(table, tmp_path / "store")[0] == value).all()


def test_what_a_killed_process_left_is_removed(tmp_path: Path, images: PatchTable):
    whole = stored(images, tmp_path / "store")
    (path,) = (tmp_path / "store").rglob("*.npy")
    left = path.with_name(f".part-01234567-{path.name}")
    path.rename(left)
    assert np.array_equal(stored(images, tmp_path / "store"), whole)
    assert not left.exists()


def test_a_damaged_header_is_made_anew(tmp_path: Path, images: PatchTable):
    whole = stored(images, tmp_path / "store")
    (path,) = (tmp_path / "store").rglob("*.npy")
    path.write_bytes(path.read_bytes().replace(b")", b"(", 1))
    assert np.array_equal(stored(images, tmp_path / "store"), whole)


def test_images_must_be_alike_and_whole(tmp_path: Path, images: PatchTable):
    Image.fromarray(np.zeros((32, 40, 3), np.uint8)).save(images.files[1])
    with pytest.raises(ValueError, match=r"b\.png: 40 x 32 pixels, expected 32 x 32"):
        stored(images, tmp_path / "store")
    images.files[1].write_bytes(images.files[0].read_bytes()[:200])
    with pytest.raises(ValueError, match=r"b\.png: cannot be read as an image"):
        stored(images, tmp_path / "store")
    assert not list((tmp_path / "store").rglob("*.npy"))


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, images: PatchTable, monkeypatch: pytest.MonkeyPatch
):
    class Usage:
        free = 100

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(OSError, match=r"2 patches of 32 pixels need .* is free; free some space"):
        stored(images, tmp_path / "store")


@pytest.fixture
def patches() -> Patches:
    """Patches that carry their own number in every pixel."""
    label = np.arange(COUNT, dtype=np.uint8) % 2
    table = PatchTable((Path("a.tif"),), np.zeros(COUNT, np.int32), np.zeros((COUNT, 2), np.int32), label, 32)
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 3, 32, 32)).astype(np.uint8)
    pixels[:, :, 0, 0] = np.arange(COUNT)[:, None]
    return Patches(table, pixels)


def batches_of(
    patches: Patches, size: int, partitions: int = 1, mine: tuple[int, ...] | None = None, on_device: bool = False
) -> Batches:
    here = range(partitions) if mine is None else mine
    rows = np.flatnonzero(np.isin(np.arange(COUNT) % partitions, here))
    config = PathologyConfig(batch_size=size, parallel=Parallel(partitions=partitions), augmentation=COLOURS, seed=3)
    return patch_batches(patches.on_device(rows, CPU) if on_device else patches, here, config, CPU)


def test_epochs_of_a_part_of_the_patches_make_the_same_passes(patches: Patches):
    config = PathologyConfig(batch_size=5, parallel=Parallel(partitions=1), augmentation=COLOURS, seed=3)
    whole = [list(patch_batches(patches, range(1), config, CPU).epoch(number)) for number in range(3)]
    parts = patch_batches(patches, range(1), replace(config, patches_per_epoch=17), CPU)
    assert (parts.steps_per_epoch, len(whole[0])) == (3, 4)
    found = [batch for number in range(3) for batch in parts.epoch(number)]
    for one, other in zip([*whole[0], *whole[1], whole[2][0]], found, strict=True):
        assert torch.equal(one.image, other.image)
        assert torch.equal(one.label, other.label)


def test_an_epoch_takes_each_patch_once_at_most_with_its_label(patches: Patches):
    config = PathologyConfig(batch_size=5, parallel=Parallel(partitions=1), augmentation=MOVES)
    batches = patch_batches(patches, range(1), config, CPU)
    assert batches.steps_per_epoch == 4
    numbers = {}
    for epoch in range(2):
        found = []
        for batch in batches.epoch(epoch):
            assert batch.image.shape == (5, 3, 32, 32)
            # a turned patch has its number in another corner
            corners = ((batch.image[:, 0, [0, 0, -1, -1], [0, -1, 0, -1]] + 1) * 127.5).round().int()
            mine = [
                next(
                    n
                    for n in range(COUNT)
                    if n in corner and sorted(np.asarray(patches.pixels)[n, 0].ravel()) == sorted(pixels)
                )
                for corner, pixels in zip(
                    corners.tolist(),
                    ((batch.image[:, 0] + 1) * 127.5).round().int().flatten(1).tolist(),
                    strict=True,
                )
            ]
            assert batch.label.tolist() == [float(n % 2) for n in mine]
            found += mine
        assert len(set(found)) == len(found) == 20
        numbers[epoch] = found
    assert numbers[0] != numbers[1]


def test_an_epoch_can_be_entered_at_any_step_and_repeats(patches: Patches):
    batches = batches_of(patches, 5)
    whole = list(batches.epoch(2))
    later = list(batches_of(patches, 5).epoch(2, 2))
    assert len(later) == 2
    for one, other in zip(whole[2:], later, strict=True):
        assert torch.equal(one.image, other.image)
        assert torch.equal(one.label, other.label)


def test_two_processes_with_a_partition_each_hold_the_batch_of_one_with_two(patches: Patches):
    one = next(batches_of(patches, 6, partitions=2).epoch(1))
    two = [next(batches_of(patches, 6, partitions=2, mine=(number,)).epoch(1)) for number in (0, 1)]
    assert [len(part.image) for part in two] == [3, 3]
    assert torch.equal(one.image, torch.cat([part.image for part in two]))
    assert torch.equal(one.label, torch.cat([part.label for part in two]))


def test_where_patches_lie_changes_nothing(patches: Patches):
    one, other = (next(batches_of(patches, 6, 2, (1,), on_device=each).epoch(0)) for each in (False, True))
    assert torch.equal(one.image, other.image)
    assert torch.equal(one.label, other.label)


@pytest.mark.parametrize("on_device", [True, False])
def test_what_does_not_lie_on_the_device_is_made_one_batch_ahead(patches: Patches, on_device: bool):
    """While a batch is in use, the next one is being taken; on the device nothing is worth a thread."""
    threads: list[str] = []
    take = Patches.take

    def noting(self: Patches, rows: np.ndarray, device: torch.device) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return take(self, rows, device)

    with mock.patch.object(Patches, "take", noting):
        assert len(list(batches_of(patches, 5, on_device=on_device).epoch(0))) == 4
    assert len(threads) == 4
    assert all(name.startswith("prefetch") != on_device for name in threads)


def test_patches_are_sent_through_a_buffer_and_never_lie_in_host_memory_as_a_whole(monkeypatch: pytest.MonkeyPatch):
    """The device is "meta", which takes no memory: all that remains is the buffer on the host."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 3, 128, 128), np.uint8)
    nothing: Any = None
    patches = Patches(nothing, pixels)
    rows = np.arange(1, 40, 2)  # of 48 KiB each
    monkeypatch.setattr(patch_store, "_SENT_AT_ONCE", 100_000)  # bytes: ten pieces of two
    assert np.array_equal(patches.on_device(rows, CPU).pixels, pixels[rows])
    assert np.array_equal(patches.on_device(rows[:5], CPU).pixels, pixels[rows[:5]])  # the last piece is half of one
    made: list[int] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if not func.is_view and isinstance(out, torch.Tensor) and out.device == CPU:
                made.append(out.nbytes)
            return out

    with Made():  # what torch imports for that counts for nothing
        patches.on_device(rows, torch.device("meta"))
    made.clear()
    tracemalloc.start()
    try:
        with Made():
            patches.on_device(rows, torch.device("meta"))
        peak = tracemalloc.get_traced_memory()[1]  # of numpy's arrays and Python's objects; torch's are in `made`
    finally:
        tracemalloc.stop()
    assert made == [2 * pixels[0].nbytes]
    assert peak < 5 * pixels[0].nbytes


def test_pieces_larger_than_the_set_change_nothing(patches: Patches):
    rows = np.arange(0, COUNT, 3)
    assert np.array_equal(patches.on_device(rows, CPU).pixels, np.asarray(patches.pixels)[rows])


@pytest.mark.parametrize(("free", "held"), [(18 * 3 * 32 * 32, True), (18 * 3 * 32 * 32 - 1, False), (None, False)])
def test_validation_patches_lie_on_the_device_where_they_fit_beside_those_to_train_on(
    patches: Patches, free: int | None, held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of two ranks the second judges 11 of 23 patches and trains on 7 of 14; without a GPU there is no budget."""
    budgets = {"ram": 2**40, "disk": 2**40} | ({} if free is None else {"gpu": free})
    monkeypatch.setattr(patch_store, "measure_budgets", lambda *_: budgets)
    run = Run(tmp_path, CPU, Clock(), resumed=False, ranks=Ranks(rank=1, world=2))
    mine = rank_rows(patches, run)
    assert mine.tolist() == list(range(1, COUNT, 2))
    found = hold(patches, mine, 14 // 2, PathologyConfig(), run)
    assert isinstance(found.pixels, torch.Tensor) == held
    assert np.array_equal(found.take(mine, CPU).numpy(), np.asarray(patches.pixels)[mine])


def test_a_batch_waits_for_nothing(patches: Patches):
    batches = batches_of(patches, 5, on_device=True)
    with refuse_host_sync():
        assert len(list(batches.epoch(0))) == 4


def test_a_batch_larger_than_the_set_is_refused(patches: Patches):
    with pytest.raises(ValueError, match="batch_size 24: 23 training patches in 1 partitions do not fill one batch"):
        batches_of(patches, 24)
