"""Three at a time: the next item is read while this one is computed and the last one is written."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Read = TypeVar("Read")
Computed = TypeVar("Computed")
Written = TypeVar("Written")

BAD_INPUT = (ValueError, OSError)
IN_FLIGHT = 3  # items in memory at once: one read, one computed, one written


def streamed(
    items: Sequence[Item],
    read: Callable[[Item], Read],
    compute: Callable[[Item, Read], Computed],
    write: Callable[[Item, Computed], Written],
) -> Iterator[tuple[Item, Written | Exception]]:
    """Yield each item, in order, with what `write` returned for it, or with the error that set it aside.

    `compute` runs in the calling thread, `read` and `write` in a thread each; no more than one item waits between them,
    so that memory is bounded whichever of them is slow. A bad input (ValueError or OSError of reading or computing,
    ValueError of writing) costs its item alone. All other errors are raised, a full disk among them; what was written
    until then is whole.

    Args:
        items: in the order in which they are done.
        read: from an item to what is computed on.
        compute: from that to what is written.
        write: returns what is to be yielded.
    """
    with ThreadPoolExecutor(1, "read") as reader, ThreadPoolExecutor(1, "write") as writer:
        behind: tuple[Item, Future[Written | Exception]] | None = None
        coming = [reader.submit(read, item) for item in items[:1]]
        for number, item in enumerate(items):
            coming += [reader.submit(read, following) for following in items[number + 1 : number + 2]]
            try:
                computed = compute(item, coming.pop(0).result())
            except BAD_INPUT as error:
                done: Future[Written | Exception] = Future()
                done.set_result(error)
            else:
                done = writer.submit(_forgiving, write, item, computed)
                del computed  # the thread has it now
            if behind is not None:
                yield behind[0], behind[1].result()
            behind = item, done
        if behind is not None:
            yield behind[0], behind[1].result()


def _forgiving(write: Callable[[Item, Computed], Written], item: Item, computed: Computed) -> Written | Exception:
    try:
        return write(item, computed)
    except ValueError as error:
        return error
