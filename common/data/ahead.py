"""One item ahead: the next batch is made in a thread while the present one trains."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")


def one_ahead(items: Generator[Item, None, None], device: torch.device) -> Iterator[Item]:
    """Yield the items; while one is in use, the next is made in a background thread.

    What goes wrong in the thread is raised here, with the traceback that it had there. However the iterator ends, the
    item in work is waited for, `items` is closed and the thread has ended. On a GPU the thread uses the default stream,
    as the reader must: what it has launched is then done before what is launched on its item.

    Args:
        items: made one after the other.
        device: of the items, with its index where there are several: a thread does not inherit the current device.
    """
    pool = ThreadPoolExecutor(1, "one ahead", initializer=_use, initargs=(device,))
    try:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
        items.close()


def _use(device: torch.device) -> None:
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
