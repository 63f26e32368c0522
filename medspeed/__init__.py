"""Medical image segmentation and slide detection, from raw scans to checked engines; `medspeed.api` describes it."""

import os
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("USER", str(os.getuid()))  # MONAI asks for a name, which a container's user may not have
if os.path.expanduser("~") == "~":  # noqa: PTH111 - such a user without HOME, for whom pathlib's raises
    _home = Path(tempfile.gettempdir(), f"medspeed-{os.getuid()}")
    _home.mkdir(mode=0o700, exist_ok=True)
    os.environ["HOME"] = str(_home) if _home.stat().st_uid == os.getuid() else tempfile.mkdtemp()
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else 40 lines of C++ frames come before ours on a lost rank
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime, as those below, would report to its makers
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

from medspeed.api import evaluate, predict, train

try:
    __version__ = version("medspeed")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+checkout"
__all__ = ["evaluate", "predict", "train"]
