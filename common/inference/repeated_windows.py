"""Windows in a CUDA graph: a network's work on windows of one shape is captured once and then repeated as a whole."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from medspeed.common.inference.predictors import Predictor
from medspeed.common.kernels import trust
from medspeed.common.kernels.trust import record

_STORE = Path("~/.cache/medspeed")  # of verdicts, as of `--store`
_MOST_SHAPES = 2  # that are captured: each holds the memory of a call of its own
_TOLERANCE = 0.01  # of the logits: some kernels add in another order each time


class RepeatingPredictor:
    """A predictor on a GPU that repeats a captured call of another one, where that is equal and faster.

    The first windows of a shape decide; windows of more than two shapes go to the other predictor. Every call returns
    memory of its own, and the host waits for nothing but the first decision.

    Args:
        predict: launches its work operator by operator, and reads nothing from the host.
        about: what the verdict holds for besides shape and machine: network, precision.
        say: gets a line for each decision.
    """

    def __init__(self, predict: Predictor, about: str, say: Callable[[str], None]) -> None:
        self._predict, self._about, self._say = predict, about, say
        self._calls: dict[tuple[int, ...], Predictor] = {}

    def __call__(self, windows: Tensor) -> Tensor:
        """Return logits [B, K, *sides] float32 for windows [B, C, *sides] float32 on the GPU."""
        shape = tuple(windows.shape)
        if shape not in self._calls and len(self._calls) < _MOST_SHAPES:
            self._calls[shape] = self._decided(windows)
        return self._calls.get(shape, self._predict)(windows)

    def _decided(self, windows: Tensor) -> Predictor:
        """Return what is to be called for windows of this shape; what the graph does is tried on others than these."""
        repeated = _repeated(self._predict, windows)
        some = windows, -windows.flip(-1)
        graph, eager = (lambda call=call: [call(each) for each in some] for call in (repeated, self._predict))
        trial = trust.Trial("windows in a graph", graph, eager, _TOLERANCE, f"{self._about}, {list(windows.shape)}")
        try:
            if trust.choose([trial], "auto", _STORE.expanduser(), self._say):
                repeated(windows)  # a verdict of an earlier run has captured nothing
                return repeated
        except RuntimeError as error:
            self._say(f"windows: no CUDA graph, capture failed: {str(error).splitlines()[0]}")
        return self._predict


def _repeated(predict: Predictor, like: Tensor) -> Predictor:
    """Return what captures the work on windows of one shape at its first call, and repeats it."""
    held, logits, replay = torch.empty_like(like), [like], list[Callable[[], object]]()

    def work() -> None:
        logits[0] = predict(held)

    def call(windows: Tensor) -> Tensor:
        held.copy_(windows)
        if not replay:
            replay.append(record(work))
        replay[0]()
        return logits[0].clone()

    return call
