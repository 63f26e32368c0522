"""Steps on a CUDA device that is not there run in a process of their own: the device must be loaded before torch."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from medspeed.benchmarks.fake_cuda import shim
from medspeed.common.files import read_object

ROOT = Path(__file__).parents[2]
Found = dict[str, dict[str, list[str]]]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Found]:
    """Return a function that runs parts of `worker.py` and returns what its guards find; skip where none can run."""
    if reason := shim.why_not():
        pytest.skip(reason)

    def run(*parts: str) -> Found:
        folder = tmp_path_factory.mktemp("steps")
        command = [sys.executable, "-m", "tests.gpu_shape.worker", str(folder), *parts]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(read_object(folder / "found.json"))

    return run
