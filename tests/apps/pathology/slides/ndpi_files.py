"""Slides as Hamamatsu's scanners write them: a JPEG for each level, and where its restart intervals begin."""

import io
import struct
from pathlib import Path

import numpy as np
from PIL import Image

_RESTARTS = range(0xD0, 0xD8)  # marker codes


def write_ndpi(path: Path, pixels: np.ndarray, mpp: float) -> None:
    """Write [H, W, 3] uint8, sides multiples of 32, as an NDPI of two levels (the second of half the size)."""
    half = pixels.reshape(len(pixels) // 2, 2, -1, 2, 3).mean((1, 3)).astype(np.uint8)
    found, link = bytearray(b"II*\0" + bytes(8)), 4
    images = ((pixels, 20.0), (half, 10.0), (np.ascontiguousarray(half[::4, ::4]), -1.0))  # the last: the whole glass
    for image, magnification in images:
        height, width, _ = image.shape
        stream = io.BytesIO()
        blocks = width // 8 // 4 if magnification > 0 else 0
        Image.fromarray(image).save(stream, "JPEG", quality=90, subsampling=0, restart_marker_blocks=blocks)
        start = _put(found, stream.getvalue())
        entries = [
            (254, 4, 1, struct.pack("<I", 0)), (256, 4, 1, struct.pack("<I", width)),
            (257, 4, 1, struct.pack("<I", height)),
            (258, 3, 3, struct.pack("<I", _put(found, struct.pack("<3H", 8, 8, 8)))),
            (259, 3, 1, struct.pack("<HH", 7, 0)), (262, 3, 1, struct.pack("<HH", 6, 0)),
            (271, 2, 10, struct.pack("<I", _put(found, b"Hamamatsu\0"))),
            (272, 2, 10, struct.pack("<I", _put(found, b"NanoZoome\0"))),
            (273, 4, 1, struct.pack("<I", start)), (277, 3, 1, struct.pack("<HH", 3, 0)),
            (278, 4, 1, struct.pack("<I", height)), (279, 4, 1, struct.pack("<I", len(stream.getvalue()))),
            (284, 3, 1, struct.pack("<HH", 1, 0)), (296, 3, 1, struct.pack("<HH", 3, 0)),
            (65420, 4, 1, struct.pack("<I", 1)), (65421, 11, 1, struct.pack("<f", magnification)),
        ]  # fmt: skip
        per_cm = round(1e4 / mpp * width / pixels.shape[1] * 1000)
        entries += [(tag, 5, 1, struct.pack("<I", _put(found, struct.pack("<II", per_cm, 1000)))) for tag in (282, 283)]
        entries += [(tag, 9, 1, struct.pack("<i", 0)) for tag in (65422, 65423, 65424)]
        if blocks:
            begins = _intervals(stream.getvalue())
            entries.append(
                (65426, 4, len(begins), struct.pack("<I", _put(found, struct.pack(f"<{len(begins)}I", *begins))))
            )
        found[link : link + 8] = struct.pack("<Q", len(found))
        found += struct.pack("<H", len(entries))
        for tag, kind, count, value in sorted(entries):
            found += struct.pack("<HHI", tag, kind, count) + value
        link = len(found)
        found += bytes(8 + 4 * len(entries))
    path.write_bytes(found)


def _put(found: bytearray, content: bytes) -> int:
    start = len(found)
    found.extend(content + bytes(len(content) % 2))
    return start


def _intervals(jpeg: bytes) -> list[int]:
    """Return where the intervals of a JPEG begin: behind its header, and behind each restart marker."""
    at = 2
    while True:
        mark, length = struct.unpack(">HH", jpeg[at : at + 4])
        at += 2 + length
        if mark == 0xFFDA:
            break
    begins = [at]
    while (at := jpeg.index(b"\xff", at)) >= 0 and jpeg[at + 1] != 0xD9:
        begins += [at + 2] if jpeg[at + 1] in _RESTARTS else []
        at += 2
    return begins
