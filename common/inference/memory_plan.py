"""How much memory the segmentation of scans takes, known before it begins: the plan that it prints and keeps to."""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from common.inference.scan_files import Scan
from common.inference.segmentation import SegmentationModel
from common.inference.stream import BAD_INPUT, IN_FLIGHT
from common.observe.host_memory import free_memory

_DECODED = 8  # bytes a voxel and channel of the file: as float32, and the file's own numbers that it is made from
_NATIVE = 20  # bytes a voxel of the file: labels, masks and numbered parts, interpolated logits
_STRUCTURE = 2  # bytes a voxel of a series and structure: the masks of the DICOM-SEG
_WORKING = 12  # bytes a voxel and channel of the working grid: resampled, normalised, padded
_LOGITS = 8  # bytes a voxel and channel of the output: the sum over windows, and what is interpolated from it


@dataclass(frozen=True)
class ScanBytes:
    """Upper bounds of the memory that a scan takes, in bytes.

    Attributes:
        name: of the scan.
        host: from its decoding to its label map.
        device: where the windows are computed, which may be the host.
    """

    name: str
    host: int
    device: int


def scan_bytes(scan: Scan, model: SegmentationModel) -> ScanBytes:
    """Return what a scan takes, from its header.

    Raises:
        FileNotFoundError, ValueError: its header cannot be read.
    """
    shape, voxel = scan.size()
    voxels, channels = math.prod(shape[:3]), math.prod(shape[3:])
    finer = 1.0 if math.isnan(voxel) else voxel / math.prod(model.preparation.spacing)
    working = max(voxels * finer, math.prod(model.window_size))
    segments = len(model.labelling.regions) if scan.series is not None else 0
    return ScanBytes(
        scan.name,
        int(voxels * (_DECODED * channels + _NATIVE + _STRUCTURE * segments)),
        int(working * (_WORKING * channels + _LOGITS * model.labelling.channels)),
    )


def most_bytes(scans: Iterable[Scan], model: SegmentationModel) -> tuple[int, int, str]:
    """Return the bytes on the host of the largest scans in flight at once, those on the device of one, and its name.

    Scans that cannot be read count as nothing: they will be set aside.
    """
    found = []
    for scan in scans:
        try:
            found.append(scan_bytes(scan, model))
        except BAD_INPUT:
            continue
    host = sorted((each.host for each in found), reverse=True)[:IN_FLIGHT]
    largest = max(found, key=lambda each: each.device, default=ScanBytes("", 0, 0))
    return sum(host), largest.device, largest.name


def say_plan(scans: Sequence[Scan], model: SegmentationModel, device: torch.device) -> None:
    """Say how much memory the scans will take, and warn where there is less."""
    host, working, largest = most_bytes(scans, model)
    working += window_bytes(model)
    gpu = device.type == "cuda"
    needs = {"host": (host if gpu else host + working, free_memory())}
    if gpu:
        needs[str(device)] = working, int(torch.cuda.mem_get_info(device)[0])
    words = [
        f"{needed / 2**30:.1f} of {free / 2**30:.1f} GiB free on the {name}" for name, (needed, free) in needs.items()
    ]
    tqdm.write(f"plan: at most {IN_FLIGHT} scans in memory (the largest is {largest}): at most {', '.join(words)}")
    if any(needed > free for needed, free in needs.values()):
        tqdm.write("WARNING: that may be more than there is; segment the largest scans one by one, or on another host")


def window_bytes(model: SegmentationModel) -> int:
    """Return the most memory, in bytes, that the network's activations take on a batch of windows in fp32.

    Nothing is computed: the network runs on tensors without content, whose lives are followed.
    """
    network: nn.Module = model.build().to("meta").eval()
    windows = torch.empty(model.window_batch, model.preparation.channels, *model.window_size, device="meta")
    with torch.no_grad(), _Lives() as lives:
        network(windows)
    return int(lives.most)


class _Lives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows how many bytes of tensors are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._users: Counter[int] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (_storage(tensor) not in given or _storage(tensor) in self._users):
                self._begin(tensor)
        return made

    def _begin(self, tensor: torch.Tensor) -> None:
        key, size = _storage(tensor), tensor.untyped_storage().nbytes()
        if not self._users[key]:
            self.now += size
            self.most = max(self.most, self.now)
        self._users[key] += 1
        weakref.finalize(tensor, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.now -= size


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
