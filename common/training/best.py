"""The best weights of a run: kept where they are, and written while the training goes on."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from common.inference.model import save_weights


class BestWeights:
    """Writes copies of a network's weights as `best.safetensors`, each in a thread; the file is whole at any moment.

    A checkpoint that knows of a validation must not be older than the weights of it: `wait` before one is written. A
    run killed before that does the validation again, and keeps the same weights again.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing: Future[None] | None = None

    def keep(self, weights: Mapping[str, torch.Tensor], note: dict[str, str]) -> None:
        """Copy the weights on their device, and begin to write them with a note; steps may change them meanwhile.

        Raises:
            OSError: the weights before could not be written.
        """
        self.wait()
        copies = {name: value.detach().clone() for name, value in weights.items()}
        device = next(iter(copies.values())).device
        made = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        pool = ThreadPoolExecutor(1, "best weights")
        self._writing = pool.submit(self._write, copies, note, made)
        pool.shutdown(wait=False)  # the thread ends with the file

    def wait(self) -> None:
        """Wait until the weights are in the file.

        Raises:
            OSError: they could not be written: the disk is full or read-only.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    close = wait

    def _write(self, copies: dict[str, torch.Tensor], note: dict[str, str], made: torch.cuda.Event | None) -> None:
        if made is None:
            return save_weights(self._path, copies, note)
        beside = torch.cuda.Stream(next(iter(copies.values())).device)  # type: ignore[no-untyped-call]
        beside.wait_event(made)  # the copies, and not the steps that have been launched since
        with torch.cuda.stream(beside):
            save_weights(self._path, copies, note)
