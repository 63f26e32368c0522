"""The parts of `gpu_visit.sh` that no other benchmark has: convolutions by themselves, and each way to a training step.

Run: python benchmarks/visit_parts.py --part survey|APP --to FILE.json [--ways WAY ...] [-- FLAGS of train.py]
"""

from pathlib import Path

from medspeed.apps import APPS, parse_flags
from medspeed.common.flags import Parser

WAYS: dict[str, dict[str, str]] = {
    "guide": {}, "eager": {}, "graph": {"graph": "auto"}, "auto": {"graph": "auto", "kernels": "auto"},
    "compiled": {"compile": "true"},
}  # fmt: skip
PARSER = Parser(description=__doc__)
PARSER.add_argument("--part", required=True, choices=("survey", *APPS), help="survey, or the training steps of an app")
PARSER.add_argument("--to", type=Path, required=True, help="JSON file for the results")
PARSER.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways to run a step")
PARSER.add_argument("flags", nargs="*", help="flags of train.py, after --")
if __name__ == "__main__":
    PARSER.parse_args()  # before torch is loaded: --help answers at once

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from medspeed.benchmarks.harness import Figures, attempt, guide_steps, in_a_process, save_batch, trained
from medspeed.common.files import write_json
from medspeed.common.observe.roofline import measure_bandwidth, measure_ceiling
from medspeed.common.run import environment
from medspeed.models.resnet18_fcn import resnet18_fcn
from medspeed.models.segresnet3d import segresnet3d
from medspeed.models.unet3d import unet3d

# Each network with the batch of a step: a CPU's, for a rehearsal, and a GPU's.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "spleen": (partial(unet3d, 1, 2), (2, 1, 16, 16, 16), (16, 1, 96, 96, 96)),
    "brats": (partial(segresnet3d, 4, 3), (1, 4, 16, 16, 16), (1, 4, 224, 224, 144)),
    "pathology": (resnet18_fcn, (1, 3, 224, 224), (256, 3, 224, 224)),
}
LAYOUTS = {"channels last": (True, False), "contiguous": (False, False), "channels last, benchmark": (True, True)}
PASSES = {"forward": None, "image's gradient": [True, False, False], "weight's gradient": [False, True, False]}
OFF = {"graph": "off", "kernels": "torch", "compile": "false"}  # what a way does not name
_ROUNDS = 10


def survey(device: torch.device, to: Path) -> None:
    """Time every distinct convolution of the networks."""
    dtype, rows = torch.bfloat16 if device.type == "cuda" else torch.float32, list[Figures]()
    about: Figures = {"environment": environment(device), "copies, GB/s": measure_bandwidth(device) / 1e9}
    about["products, TFLOP/s"] = measure_ceiling(device, dtype) / 1e12
    for app, (make, *shapes) in NETWORKS.items():
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
            make().to("meta")(torch.empty(shapes[device.type == "cuda"], device="meta"))
        ran = [one for one in found.events() or () if one.name == "aten::convolution"]
        seen = ([*one.input_shapes[:2], *one.concrete_inputs[3:]] for one in ran)  # image, weight, and what it is told
        distinct = Counter(tuple(tuple(x) if isinstance(x, list) else x for x in one) for one in seen)
        for (image, weight, *told), count in distinct.items():
            x, w = (torch.rand(each, device=device, dtype=dtype) for each in (image, weight))
            case = {"app": app, "image": image, "weight": weight, "stride": told[0], "calls": count}
            rows.append({**case, "ms": attempt(partial(layouts, x, w, told))})
            write_json(to, {**about, "convolutions": rows})


def layouts(image: torch.Tensor, weight: torch.Tensor, told: Sequence[Any]) -> Figures:
    """Return the milliseconds of a convolution and its gradients in each layout."""
    found, threads = Figures(), torch.get_num_threads()  # of which a `Timer` takes one unless told
    last = torch.channels_last if image.ndim == 4 else torch.channels_last_3d
    for layout, (inner, benchmark) in LAYOUTS.items():
        order = last if inner else torch.contiguous_format
        x, w = (each.contiguous(memory_format=order) for each in (image, weight))
        forward = partial(torch.ops.aten.convolution, x, w, None, *told)
        backward = partial(torch.ops.aten.convolution_backward, torch.rand_like(forward()), x, w, None, *told)
        with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
            for name, mask in PASSES.items():
                run = partial(backward, mask) if mask else forward
                seconds = Timer("run()", globals={"run": run}, num_threads=threads).timeit(_ROUNDS).mean
                found.setdefault(layout, {})[name] = round(1000 * seconds, 4)
    return found


def steps(app: str, flags: Sequence[str], ways: Sequence[str], device: torch.device, to: Path) -> None:
    """Time an app's training steps in each way; the run folders lie beside the figures, and stay."""
    record: Figures = {"app": app, "flags": list(flags), "environment": environment(device)}
    for way in ways:
        choices = [f"--{name}={value}" for name, value in {**OFF, **WAYS[way]}.items()]
        config = parse_flags(app, [*flags, *choices, "--run", str(to.with_suffix("") / way)])
        record[way] = attempt(partial(guide, config, device, to) if way == "guide" else partial(trained, config))
        print(f"{app} {way}: {record[way]}", flush=True)
        write_json(to, record)


def guide(config: Any, device: torch.device, to: Path) -> Figures:  # noqa: ANN401 - an app's configuration
    """Return what the guide's step takes as it runs there, on a batch of ours, which stays beside the figures."""
    in_a_process(save_batch, config, to.with_suffix(".pt"))
    return guide_steps(config.APP, to.with_suffix(".pt"), {}, "fp16" if device.type == "cuda" else "fp32")


def main() -> None:
    """Run a part."""
    given = PARSER.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.part == "survey":
        survey(device, given.to)
    else:
        steps(given.part, given.flags, given.ways, device, given.to)


if __name__ == "__main__":
    main()
