"""The report of a run: one page that opens anywhere, without a network, and that can be mailed."""

import base64
import gzip
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from markupsafe import Markup
from nibabel.affines import from_matvec
from torch.nn import functional

from medspeed.common.files import printable, read_json_lines, read_object, write_json, write_text
from medspeed.common.observe.overlays import LABEL_COLOURS, Array, Scan

Json = dict[str, Any]
_LONGEST_SIDE = 192  # voxels of a case to scroll through
_MOST_VOXELS, _FEWEST_VOXELS = 96**3, 48**3  # of a case where up to nine share the page, and where many do
_LARGEST_PAGE, _REST = 8_000_000, 1_000_000  # bytes; the rest is all but cases
_LONGEST_VALUE = 1000  # characters


def write_report(directory: Path, summary: Json) -> Path:
    """Write `report.html` into a run folder, from its summary and the files that are there; return its path.

    It stays below 8 MB: cases with the lowest values come first, and the page says how many no longer fit.
    """
    quality = summary["quality"]
    per_case = quality["per_case"]
    # A case without a value is worse than any.
    ranked = sorted(per_case, key=lambda name: (per_case[name] is not None, per_case[name] or 0.0, name))
    pictures = {name: directory / f"{name}.png" for name in ("progress", "monitor")}
    files = [path for name in ranked if (path := directory / "report_cases" / f"{name}.json").is_file()]
    kept = files[: np.count_nonzero(np.cumsum([path.stat().st_size for path in files]) <= _LARGEST_PAGE - _REST)]
    scans, environment = dict[str, Json](), directory / "environment.json"
    for path in kept:
        with suppress(ValueError):  # a damaged one is left out
            scans[path.stem] = read_object(path)
    content = _template().render(
        name=directory.resolve().name,
        summary=summary,
        environment=read_object(environment) if environment.is_file() else {},
        epochs=read_json_lines(directory / "metrics.jsonl"),
        # An app that judges patches has figures of all of them together, in its own order, and no regions.
        cases={name: per_case[name] for name in (ranked if quality["per_region"] else per_case)},
        pictures={name: _base64(path.read_bytes()) for name, path in pictures.items() if path.is_file()},
        scans=scans,
        left_out=len(files) - len(kept),
        colours=LABEL_COLOURS,
    )
    write_text(directory / "report.html", content)
    return directory / "report.html"


def write_report_case(directory: Path, name: str, scan: Scan, names: Sequence[str], of: int = 1) -> None:
    """Write `report_cases/NAME.json` into a run folder: a case, with its truth, that its report lets the reader scroll.

    It is small (as many voxels as a cube of 96 has, fewer where more than nine cases share a report, `of` so many;
    means of the image, middles of the labels; 8 bits), and in words that the page's script understands: volumes are
    base64 of gzip of uint8, z running fastest. Intensities up to the width of the window beyond it are kept.
    """
    assert scan.truth is not None
    sides, (black, white) = np.array(scan.image.shape), map(float, scan.window)
    most = max(_MOST_VOXELS * 9 / max(of, 9), _FEWEST_VOXELS)
    shape = next(few for side in range(_LONGEST_SIDE, 0, -1) if (few := np.minimum(sides, side)).prod() <= most)
    voxels = torch.from_numpy(np.ascontiguousarray(scan.image, np.float32))
    grey = functional.adaptive_avg_pool3d(voxels[None], shape.tolist())[0].numpy()
    low, high = max(2 * black - white, float(grey.min())), min(2 * white - black, float(grey.max()))
    low, high = (low, high) if high > low else (black, white)
    middles = np.ix_(*((2 * np.arange(few) + 1) * side // (2 * few) for few, side in zip(shape, sides, strict=True)))
    found, true = scan.labels[middles], scan.truth[middles]
    occurring = [int(label) for label in np.union1d(found, true) if label > 0]
    content = {
        "shape": shape.tolist(),
        "spacing": (scan.spacing * sides / shape).tolist(),
        "native": scan.spacing.tolist(),  # of the file
        "affine": (scan.affine @ from_matvec(np.diag(sides / shape), (sides / shape - 1) / 2))[:3].tolist(),
        "start": (np.array(scan.largest) * shape // sides).tolist(),
        "labels": {label: names[label] if label < len(names) else f"label {label}" for label in occurring},
        "range": (low, high),  # intensities of the bytes 0 and 255
        "window": (black, white),
        "image": _base64(np.round(255 * ((grey - low) / (high - low)).clip(0, 1))),
        "prediction": _base64(found),
        "truth": _base64(true),
    }
    write_json(directory / "report_cases" / f"{name}.json", content)


def _base64(content: bytes | Array) -> str:
    packed = content if isinstance(content, bytes) else gzip.compress(content.astype(np.uint8).tobytes(), mtime=0)
    return base64.b64encode(packed).decode()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    long = f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
    return long if minutes >= 2 else f"{seconds:.1f} s"


def _one_line(value: object) -> object:
    if isinstance(value, Markup | jinja2.Undefined):
        return value
    return "" if value is None else printable(str(value))[:_LONGEST_VALUE]


def _template() -> jinja2.Template:
    """Return the page: what enters it is escaped and brought into one line, and what is missing is shown as nothing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,
        finalize=_one_line,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = _duration
    # By its digest a content security policy knows a style or a script.
    environment.filters["sha256"] = lambda text: f"sha256-{_base64(hashlib.sha256(text.encode()).digest())}"
    return environment.get_template("report.html.j2")
