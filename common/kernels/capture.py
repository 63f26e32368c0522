"""CUDA graphs: work that was launched once, operator by operator, is launched again as a whole."""

from collections.abc import Callable

import torch

_WARM_UP = 3  # runs before a capture. Source: torch's notes on CUDA graphs


def record(body: Callable[[], object]) -> Callable[[], object]:
    """Capture what `body` launches as a CUDA graph, and return what launches that.

    It runs a few times before, on a stream of its own, as torch asks: libraries choose and allocate then. Other threads
    may load cases meanwhile: only this thread's calls can break the capture.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    return graph.replay
