"""Work in threads, since decoding, resampling and hashing release Python's lock."""

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch
from tqdm import tqdm

from medspeed.common.console import hides_bar, say

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return how many cores this process may use, the machine's divided among torchrun's ranks on it."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def map_in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], title: str = "", workers: int | None = None
) -> list[Result]:
    """Return `[function(item) for item in items]`, computed in parallel; a title is that of a progress bar, or said.

    The first error, or Ctrl-C, cancels what has not begun, waits for what has, and is raised. By default there is a
    worker for each of `usable_cores`; torch runs single-threaded in it.
    """
    if not items:
        return []
    with thread_pool(min(workers or usable_cores(), len(items)), "case") as pool:
        futures = [pool.submit(function, item) for item in items]
        bar = tqdm(as_completed(futures), title, len(items), unit="case", disable=hides_bar(not title))
        if title and bar.disable:
            say(f"{title}: {len(items)}")
        for future in bar:
            future.result()
        return [future.result() for future in futures]


@contextmanager
def thread_pool(threads: int, name: str) -> Generator[ThreadPoolExecutor, None, None]:
    """Yield threads in which torch computes on one core each; at the end what has not begun is dropped."""
    # A thread's count becomes the default of every thread that has not used torch yet, the main one included.
    torch_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, name, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(torch_threads)


def prefetch(items: Generator[Item, None, None], device: torch.device) -> Generator[Item, None, None]:
    """Yield the items; while one is in use, the next is made in a background thread.

    What goes wrong in the thread is raised here. However the iterator ends, the item in work is waited for, `items` is
    closed and the thread has ended. On a GPU the thread uses the default stream, as the reader must: what it has
    launched is then done before what is launched on its item. A thread does not inherit the current device.
    """
    known = device.type == "cuda" and device.index is not None
    pool = ThreadPoolExecutor(1, "prefetch", *((torch.cuda.set_device, (device,)) if known else ()))
    try:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
        items.close()
