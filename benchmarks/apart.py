"""Sides of a comparison in a process of their own.

What our runs tell the C library about freed memory holds for a whole process and cannot be taken back: what it has kept
by then, and that it no longer adapts its thresholds, would help or hinder the guide. So each setting gets a process.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from common.observe.host_memory import keep_freed_memory
from common.observe.timing import synchronise

Sides = Mapping[str, Callable[[], object]]

_sides: dict[str, Callable[[], object]] = {}  # of this process


@contextmanager
def apart(make: Callable[..., Sides], *arguments: object, keep_freed: bool) -> Iterator[dict[str, Callable[[], Any]]]:
    """Make sides in a new process that ends with the block; yield functions that run them there and wait.

    Args:
        make: a module's function that returns the sides by name; it is called there, and so are they.
        arguments: its arguments, which must pickle, as must what the sides return.
        keep_freed: let that process keep freed memory, as our runs on a CPU do.
    """
    context = multiprocessing.get_context("spawn")  # a copy of this process would have its memory, and its threads
    with ProcessPoolExecutor(1, context) as process:
        names = process.submit(_start, make, arguments, keep_freed).result()
        yield {name: partial(_call, process, name) for name in names}


def _start(make: Callable[..., Sides], arguments: tuple[object, ...], keep_freed: bool) -> list[str]:
    if keep_freed:
        keep_freed_memory()
    _sides.update(make(*arguments))
    return list(_sides)


def _call(process: ProcessPoolExecutor, name: str) -> object:
    return process.submit(_run, name).result()


def _run(name: str) -> object:
    result = _sides[name]()
    synchronise()
    return result
