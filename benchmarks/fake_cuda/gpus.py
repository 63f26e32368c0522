"""What GPUs reach."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """What a GPU reaches: products of matrices in bf16, FLOP/s, and a large copy, bytes/s."""

    flops: float
    bandwidth: float


# An H200 was measured once, at 0.80 and 0.90 of its data sheet; the others have those shares of theirs (NVIDIA; dense
# bf16 that adds up in float32; SXM, and the A100 with 80 GB).
_DATA_SHEETS = {"h100": (989e12, 3.35e12), "a100": (312e12, 2.04e12), "l40s": (362e12, 0.864e12)}
_DATA_SHEETS |= {"rtx5090": (209.5e12, 1.79e12)}
GPUS = {"h200": Gpu(790e12, 4.3e12)} | {name: Gpu(0.8 * a, 0.9 * b) for name, (a, b) in _DATA_SHEETS.items()}
