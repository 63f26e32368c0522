"""MONAI's ThreadDataLoader with its lost exceptions forwarded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from monai.data import ThreadBuffer, ThreadDataLoader


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class ForwardingThreadDataLoader(ThreadDataLoader):  # type: ignore[misc]
    """A `monai.data.ThreadDataLoader` whose producer thread does not lose what goes wrong in it.

    MONAI's own ends the epoch early and normally when a sample fails; this one raises the sample's error, with the
    producer's traceback, in the loop that reads.
    """

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; raise what the producer thread raised."""
        source = super(ThreadDataLoader, self).__iter__()
        for item in ThreadBuffer(_caught(source), self.buffer_size, self.buffer_timeout):
            if isinstance(item, _Failure):
                raise item.error
            yield item


def _caught(source: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from source
    except Exception as error:  # it crosses to the reading thread, whatever it is; a reader that stops is none
        yield _Failure(error)
