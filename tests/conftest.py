"""Fixtures that any test may use."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # one process of tests on each core: each computes with one thread
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if shutil.which("nvidia-smi") is None:  # before anything loads Triton: its kernels are interpreted then
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Whatever started the tests may ignore some signals (a shell in the background, nohup), and children would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(_number, signal.SIG_DFL)

# Property tests draw the same examples everywhere, so that a green run stays green; to look further afield:
# `pytest --hypothesis-profile default`.
settings.register_profile("same_everywhere", derandomize=True, database=None, deadline=None)
settings.load_profile("same_everywhere")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real scans; skip, with the reason shown, where it is missing."""
    root = Path(__file__).resolve().parents[1]
    folder = Path(os.environ.get("MEDSPEED_REAL_DATA", root.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real scans: {folder} is missing (set MEDSPEED_REAL_DATA to the folder)")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; where there is one, its libraries may warn."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    there = torch.cuda.is_available()
    for item in on_gpu:
        # Drivers and CUDA builds warn of things of their own, which fail no test.
        item.add_marker(pytest.mark.filterwarnings("default") if there else pytest.mark.skip(reason="no CUDA device"))
