import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monai.data
import nibabel
import numpy as np
import pytest
import torch

from medspeed.common.clock import Clock
from medspeed.common.data.dataset import Case
from medspeed.common.data.preparation import Preparation
from medspeed.common.ranks import SINGLE
from medspeed.common.run import one_line_errors
from medspeed.common.training import monai_batches
from medspeed.common.training.monai_batches import ForwardingThreadDataLoader, guide_batches
from medspeed.common.training.volume_config import Crops, SegmentationConfig


class Scans(monai.data.Dataset):  # type: ignore[misc]
    """Four samples, of which one may be damaged."""

    def __init__(self, damaged=None):
        super().__init__(list(range(4)))
        self.damaged = damaged

    def __getitem__(self, index):
        if index == self.damaged:
            raise ValueError(f"scan_{index}.nii.gz: truncated")
        return index


def numbers(loader):
    return [int(batch) for batch in loader]


def test_all_batches_come_in_order_and_every_epoch_anew():
    loader = ForwardingThreadDataLoader(Scans(), batch_size=1, num_workers=0)
    assert numbers(loader) == numbers(loader) == [0, 1, 2, 3]


def test_what_goes_wrong_in_the_thread_is_raised_where_the_batches_are_read():
    loader = ForwardingThreadDataLoader(Scans(damaged=2), batch_size=1, num_workers=0)
    seen: list[int] = []
    with pytest.raises(ValueError, match=r"scan_2\.nii\.gz: truncated"):
        seen.extend(int(batch) for batch in loader)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_monais_own_loader_ends_early_without_a_word():
    """Why this class exists; when this fails, MONAI has mended it and the class can go."""
    loader = monai.data.ThreadDataLoader(Scans(damaged=2), batch_size=1, num_workers=0)
    assert numbers(loader) == [0, 1]


def die(item):
    os.kill(os.getpid(), signal.SIGKILL)


def write_scan(path: Path, *shape: int) -> Path:
    nibabel.save(nibabel.Nifti1Image(np.ones(shape, np.float32), np.eye(4)), path)
    return path


def test_a_loader_process_that_is_killed_ends_the_program_in_a_line(capsys, monkeypatch, tmp_path):
    cases = [Case("scan", scan := write_scan(tmp_path / "scan.nii", 2, 2, 2), scan)]
    config = SegmentationConfig(cache="uncached", crops=Crops(per_case=1), batch_size=1, workers=1)
    run: Any = SimpleNamespace(device=torch.device("cpu"), ranks=SINGLE, clock=Clock())
    model: Any = SimpleNamespace(
        preparation=Preparation((1.0, 1.0, 1.0), "zscore", None), labelling=SimpleNamespace(numbers=(0, 1))
    )
    monkeypatch.setattr(monai_batches, "read_case", lambda *given, **named: None)
    batches = guide_batches([die], cases, model, config, run)
    with pytest.raises(SystemExit, match="1"), one_line_errors():
        list(batches.epoch(0))
    assert "a data-loading process was killed" in capsys.readouterr().err.splitlines()[0]


def test_a_last_batch_that_does_not_divide_is_refused_before_anything_is_read():
    """Three cases of two crops: a batch of four, and one of two."""
    cases = [Case(name, Path(name), Path(name)) for name in "abc"]
    run: Any = SimpleNamespace(ranks=SINGLE)
    config = SegmentationConfig(cache="uncached", crops=Crops(per_case=2), batch_size=4)
    config = replace(config, parallel=replace(config.parallel, accumulate=4))
    with pytest.raises(ValueError, match=r"parallel\.accumulate 4: must divide the 2 crops of the last batch"):
        guide_batches([], cases, None, config, run)  # type: ignore[arg-type]


def test_a_format_that_monai_cannot_read_here_is_named_before_anything_is_read():
    cases = [Case(name, Path(f"{name}.nii.gz"), Path(f"{name}.nrrd")) for name in "ab"]
    run: Any = SimpleNamespace(ranks=SINGLE)
    config = SegmentationConfig(cache="uncached", crops=Crops(per_case=2), batch_size=4)
    with pytest.raises(ValueError, match=r"a\.nrrd: MONAI's transforms read only NIfTI here: convert it, or use"):
        guide_batches([], cases, None, config, run)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2, 2, 2, 1, 3), (2, 2, 2, 1, 1)], ids=str)
def test_a_file_of_more_axes_than_monais_transforms_take_is_named(tmp_path, monkeypatch, shape):
    """Vectors, as SimpleITK writes channels: the recipe `fast` reads them."""
    cases = [Case("a", write_scan(tmp_path / "a.nii", *shape), write_scan(tmp_path / "b.nii", 2, 2, 2))]
    run: Any = SimpleNamespace(ranks=SINGLE, clock=Clock())
    model: Any = SimpleNamespace(
        preparation=Preparation((1.0, 1.0, 1.0), "zscore", None), labelling=SimpleNamespace(numbers=(0, 1))
    )
    monkeypatch.setattr(monai_batches, "read_case", lambda *given, **named: None)
    config = SegmentationConfig(cache="uncached", crops=Crops(per_case=2), batch_size=2)
    with pytest.raises(ValueError, match=r"a\.nii: MONAI's transforms read at most 4 axes: save it with 4, or use"):
        guide_batches([], cases, model, config, run)
