"""Segmentation from file to file: the MONAI way against `infer.py`'s, each side in a process of its own.

It is a part of compare.py for the apps that segment. Peak memory is that of each side's process.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from apps.brats.model import load_model as load_brats
from apps.spleen.model import load_model as load_spleen
from benchmarks.apart import Sides, apart
from benchmarks.in_turn import in_turn, median, ratio
from common.export.onnx_model import export_onnx
from common.inference.options import InferConfig
from common.inference.scan_files import find_scans
from common.inference.scans import open_job, segment_all
from common.inference.segmentation import SegmentationModel
from common.observe.host_memory import peak_memory
from common.observe.timeline import Timeline
from common.training.imported import import_weights

# Of each side the backend, the precision, and whether windows fit the scan; else they are the guide's, or the plan's.
SIDES = {
    "fast fp32": ("torch", "fp32", True),
    "fast bf16": ("torch", "bf16", True),
    "fast fp32, windows of one size": ("torch", "fp32", False),
    "fast bf16, windows of one size": ("torch", "bf16", False),
    "fast ONNX Runtime fp32": ("onnxruntime", "fp32", False),
}
LOAD: dict[str, Callable[[Path], SegmentationModel]] = {"spleen": load_spleen, "brats": load_brats}


@dataclass(frozen=True)
class Scans:
    """What both sides segment.

    Args:
        app: whose `infer.py`.
        inputs: folder of the scans.
        run: folder of the run.
        folder: each side writes into a folder below it, named like the side.
        device: of both.
    """

    app: str
    inputs: Path
    run: Path
    folder: Path
    device: str

    @property
    def names(self) -> list[str]:
        """Names of the scans, which are those of the label maps."""
        return [scan.name for scan in find_scans(self.inputs)]


def lay_out(
    app: str,
    model: SegmentationModel,
    weights: Path,
    files: Sequence[Path],
    folder: Path,
    device: torch.device,
) -> Scans:
    """Make a run of the weights, with its ONNX model, and a folder of links to the scans."""
    run, inputs = folder / "run", folder / "scans"
    import_weights(run, app, model, weights)
    (run / "exports").mkdir()
    window = (model.preparation.channels, *model.window_size)
    export_onnx(model.build(run / "best.safetensors"), run / "exports" / "model_fp32.onnx", window, "fp32", {})
    inputs.mkdir()
    for file in files:
        (inputs / file.name).symlink_to(file.resolve())
    return Scans(app, inputs, run, folder, str(device))


def fast_side(scans: Scans, name: str) -> Sides:
    """Return what segments all scans as `infer.py` does, opened once."""
    backend, precision, fit = SIDES[name]
    config = InferConfig(
        scans.run, scans.inputs, scans.folder / name, backend=backend, precision=precision,  # type: ignore[arg-type]
        device=scans.device, overlays=False, fit_windows=fit,
    )  # fmt: skip
    job = open_job(config, LOAD[scans.app](scans.run))
    found = find_scans(scans.inputs)

    timelines: list[Timeline] = []

    def segment() -> None:
        timelines.append(Timeline())
        failed = segment_all(found, replace(job, timeline=timelines[-1]))
        assert not failed, failed

    def windows() -> float:
        each = [[span for span in timeline.spans() if span.stage == "windows"] for timeline in timelines]
        return median([sum(span.end - span.begin for span in spans) for spans in each])

    return {"segment": segment, "peak": peak_memory, "windows": windows}


def with_peak(make: Callable[..., Sides], *arguments: object) -> Sides:
    """Return the one side that `make` makes, as "segment", and what tells its process's memory."""
    (side,) = make(*arguments).values()
    return {"segment": side, "peak": peak_memory}


def compare(scans: Scans, rounds: int, guide: Callable[..., Sides], *arguments: object) -> dict[str, Any]:
    """Time all sides in turn; return seconds per case, ratios to the guide, and peak memory in MiB.

    Args:
        scans: what they segment.
        rounds: times each side runs.
        guide: a module's function that returns the guide's side.
        *arguments: its arguments.
    """
    on_cpu = scans.device == "cpu"
    with ExitStack() as stack:
        opened = {"guide": stack.enter_context(apart(with_peak, guide, *arguments, keep_freed=False))}
        for name in SIDES:
            opened[name] = stack.enter_context(apart(fast_side, scans, name, keep_freed=on_cpu))
        seconds = in_turn({name: each["segment"] for name, each in opened.items()}, rounds, warm_up=False)
        peaks = {name: round(each["peak"]() / 2**20) for name, each in opened.items()}
        windows = {name: opened[name]["windows"]() for name in SIDES}
    count = len(scans.names)
    return {
        **{f"{name}, s per case": median([each / count for each in found]) for name, found in seconds.items()},
        **{f"guide / {name}": ratio(seconds["guide"], seconds[name]) for name in SIDES},
        **{
            f"{name}, of which the network's windows, s per case": round(each / count, 4)
            for name, each in windows.items()
        },
        **{f"{name}, peak memory MiB": peak for name, peak in peaks.items()},
    }
