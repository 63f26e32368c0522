"""Medical image segmentation and slide detection, from raw scans to checked engines; see the README.

`train`, `predict` and `evaluate` do what the commands do; `medspeed.api` describes them.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medspeed.api import evaluate as evaluate
    from medspeed.api import predict as predict
    from medspeed.api import train as train

try:
    __version__ = version("medspeed")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+checkout"
__all__ = ["evaluate", "predict", "train"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a function of the interface
    """Load the interface when it is asked for: the commands start without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from medspeed import api

    return getattr(api, name)
