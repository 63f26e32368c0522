"""The steps of golden runs on a CUDA device of host memory give the losses that they give on the CPU.

Where they lie on the device without its numbers, `tests/gpu_shape` counts steps and no more; here whole trainings run,
from the files to the last validation, with the branches that only a GPU takes.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from medspeed.benchmarks.fake_cuda import shim
from medspeed.common.files import read_object
from tests import golden
from tests.apps.test_golden_losses import KNOWN, TOLERANCE

pytestmark = pytest.mark.slow
GRAPHS = ["spleen-fast", "brats-fast", "pathology-fast"]
NAMES = [*GRAPHS, "spleen-muon", "spleen-guide", "spleen-baseline", "brats-guide", "pathology-guide"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if reason := shim.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("host-cuda")
    command = [sys.executable, "-m", "tests.host_cuda.worker", str(folder), *NAMES]
    root, told = Path(__file__).parents[2], {"OMP_NUM_THREADS": "1", "MEDSPEED_MONITOR_SECONDS": "0"}
    done = subprocess.run(command, cwd=root, env={**os.environ, **told}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(read_object(folder / "found.json"))


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_the_cpu(found, name):
    assert len(found["losses"][name]) == len(KNOWN[name]) == 4 * golden.EPOCHS
    assert found["losses"][name] == pytest.approx(KNOWN[name], rel=TOLERANCE)


def test_what_lies_on_the_device_steps_by_a_graph(found):
    assert found["graphs"] == GRAPHS


def test_a_run_that_was_stopped_goes_on_to_the_very_same_losses(found):
    assert found["resumed"] == found["losses"][GRAPHS[0]]


def test_volumes_that_do_not_fit_on_the_device_are_validated_from_the_host(found):
    whole, cramped = found["dice"]
    assert len(whole) >= 1
    assert max(whole) > 0
    assert cramped == pytest.approx(whole, rel=1e-6)
