"""Trains on the device of `device.py`, which must be loaded before torch, and writes down the losses."""

import sys
from pathlib import Path

from tests.host_cuda import device

if __name__ == "__main__":
    device.load()  # before torch is loaded

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from medspeed.common.files import write_json
from medspeed.common.inference import predict
from medspeed.common.kernels import trust
from medspeed.common.observe import roofline
from tests import emulated_graph, golden

ON_DEVICE = {"device": "cuda", "kernels": "torch"}


def trained(name: str, folder: Path, **changed: object) -> list[float]:
    """Return the losses of one of the golden runs, on the device, with the cases in its memory where they can be."""
    app, options = golden.RUNS[name]
    own = {"cache": "gpu"} if options["recipe"] == "fast" and app != "pathology" else {}
    given = {"data": folder / "data" / app, "run": folder / name, "store": folder / "store"}
    golden.train(app, {**options, **given, **own, **ON_DEVICE, **changed})
    return golden.recorded(folder / name)


def resumed(name: str, folder: Path) -> list[float]:
    """Return the losses of a run that is told to stop within its third epoch, and goes on."""
    with golden.told_to_stop(10) as done:
        try:
            trained(name, folder, graph="off")
            raise AssertionError("the run was not stopped")
        except SystemExit:
            assert len(done) == 10
    golden.train(golden.RUNS[name][0], {"resume": folder / name})
    return golden.recorded(folder / name)


def without_room(name: str, folder: Path) -> list[list[float]]:
    """Return the Dice of a run's validations where whole volumes fit on the device, and where they do not."""
    total, runs = predict._sum_windows, [folder / f"{name}-whole", folder / name]

    def short(image: torch.Tensor, *given: Any) -> torch.Tensor:
        if image.is_cuda:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return total(image, *given)

    runs[1].rename(runs[0])
    with mock.patch.object(predict, "_sum_windows", short):
        trained(name, folder)
    return [[row["dice"] for row in golden.logged(run) if "dice" in row] for run in runs]


def chosen(trials: Sequence[trust.Trial], wish: str, *_: Any) -> list[str]:
    """Stand for `trust.choose`: what is right is taken, and nothing is timed."""
    return [] if wish == "torch" else emulated_graph.tried(trials)


def main(folder: Path, names: list[str]) -> None:
    """Write the losses by name of the run, and whether its steps were those of a graph."""
    golden.make_data(folder / "data")
    graph = mock.patch.multiple(trust, record=emulated_graph.record, choose=chosen)
    ceiling = mock.patch.object(roofline, "measure_ceiling", return_value=1.0)  # a GPU's takes a CPU a minute
    with graph, ceiling:
        found = {name: trained(name, folder) for name in names}
        graphs = [name for name in names if "one CUDA graph per step" in (folder / name / "run.log").read_text()]
        (folder / names[0]).rename(folder / "whole")
        again = resumed(names[0], folder)
        dice = without_room(names[0], folder)
    write_json(folder / "found.json", {"losses": found, "graphs": graphs, "resumed": again, "dice": dice})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
