"""The best weights of a run: copied where they are, and written while the training goes on."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from medspeed.common.inference.model import save_weights


class BestWeights:
    """Writes weights into a file, in a thread; at any moment it is whole.

    A checkpoint that knows of a validation must not be older than its weights: `wait` before one is written. A run that
    is killed sooner does the validation again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing: Future[None] | None = None

    def keep(self, weights: Mapping[str, torch.Tensor], note: dict[str, str]) -> None:
        """Copy weights on their device, and begin to write them with a note; raises what `wait` does."""
        self.wait()
        copies = {name: value.detach().clone() for name, value in weights.items()}
        device, beside = next(iter(copies.values())).device, None
        if device.type == "cuda":
            beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            beside.wait_stream(torch.cuda.current_stream(device))  # for the copies, and for no step after them
        pool = ThreadPoolExecutor(1, "best weights")
        self._writing = pool.submit(self._write, copies, note, beside)
        pool.shutdown(wait=False)  # the thread ends with the file

    def wait(self) -> None:
        """Wait until the weights are in the file.

        Raises:
            OSError: the disk is full or read-only.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    close = wait

    def _write(self, copies: dict[str, torch.Tensor], note: dict[str, str], beside: torch.cuda.Stream | None) -> None:
        with torch.cuda.stream(beside):
            save_weights(self._path, copies, note)
