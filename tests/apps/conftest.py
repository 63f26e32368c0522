"""What the apps' tests share: a few phantoms, and the real programs started as a user starts them."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from medspeed.common.export.export import QUALITY_BOUNDS
from medspeed.data_scripts.make_phantoms import make_phantoms
from tests.without_exports import NONE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four CT phantoms in MSD layout."""
    return make_phantoms("ct", tmp_path_factory.mktemp("data") / "phantoms", 4)


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five MRI phantoms in MSD layout."""
    return make_phantoms("mri", tmp_path_factory.mktemp("data") / "heads", 5)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of prepared cases for all tests."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module", autouse=True)  # of a session it would hold for tests elsewhere that come later
def a_checkpoint_in_every_step() -> Iterator[None]:
    """Save after every step, and draw no curves of the machine, also in the programs that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDSPEED_CHECKPOINT_SECONDS", "0")
        patch.setenv("MEDSPEED_MONITOR_SECONDS", "0")
        yield


@pytest.fixture(scope="module")
def any_quality() -> Iterator[None]:
    """Let the gate pass an export whatever its quality: a network of six steps ranks by the last bit of its logits.

    Two scores that rounding swaps are 0.02 of the AUC of 24 patches, and which they are is the processor's choice.
    """
    with pytest.MonkeyPatch.context() as patch:
        for precision in QUALITY_BOUNDS:
            patch.setitem(QUALITY_BOUNDS, precision, 1.0)
        yield


@pytest.fixture
def no_export() -> Iterator[None]:
    """Let runs in this process end without exports, which take most of the time of one of a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("medspeed.apps.pathology.train.export", lambda *_: NONE)
        for app in ("spleen", "brats"):
            patch.setattr(f"medspeed.apps.{app}.train.export_best", lambda *_: NONE)
        yield


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[str]]:
    """Start `python SCRIPT ARGUMENTS...` from the repository's root, its output readable as text."""

    def run(script: str, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, script, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run
