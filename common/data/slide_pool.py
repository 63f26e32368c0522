"""Open slides, a bounded number of them, kept for the next read."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.data.slides import Reader, Slide, Tile, open_slide


class SlidePool:
    """Slides that stay open between reads; beyond `limit`, the ones not used for longest are closed.

    Threads may share a pool. Slides in use are never closed: there may be more than `limit` of them meanwhile.

    Args:
        limit: slides to keep open; each holds two or three file descriptors, with OpenSlide a cache of 32 MiB too.
        reader: as `open_slide`.
    """

    def __init__(self, limit: int = 16, reader: Reader = "auto") -> None:
        assert limit >= 1, limit
        self._limit, self._reader = limit, reader
        self._open: OrderedDict[Path, Slide] = OrderedDict()  # least recently used first
        self._users: dict[Path, int] = {}
        self._damaged: dict[Path, set[Tile]] = {}  # of slides closed since
        self._lock = threading.Lock()

    @contextmanager
    def use(self, path: Path) -> Iterator[Slide]:
        """Yield the slide, opened where it is not yet; it stays open within the block.

        Raises:
            FileNotFoundError, ModuleNotFoundError, ValueError: as `open_slide`.
        """
        with self._lock:
            if path not in self._open:
                self._open[path] = open_slide(path, self._reader)
            slide = self._open[path]
            self._open.move_to_end(path)
            self._users[path] = self._users.get(path, 0) + 1
        try:
            yield slide
        finally:
            with self._lock:
                self._users[path] -= 1
                self._close_idle(self._limit)

    @property
    def damaged(self) -> dict[Path, tuple[Tile, ...]]:
        """Return the tiles that could not be decoded so far, by slide; slides without any are left out."""
        with self._lock:
            found = {path: set(tiles) for path, tiles in self._damaged.items()}
            for path, slide in self._open.items():
                found.setdefault(path, set()).update(slide.damaged_tiles)
        return {path: tuple(sorted(tiles)) for path, tiles in found.items() if tiles}

    def close(self) -> None:
        """Close all slides that are not in use."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, limit: int) -> None:
        idle = [path for path in self._open if not self._users[path]]
        for path in idle[: max(0, len(self._open) - limit)]:
            slide = self._open.pop(path)
            del self._users[path]
            self._damaged.setdefault(path, set()).update(slide.damaged_tiles)
            slide.close()
