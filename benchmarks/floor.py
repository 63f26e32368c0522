"""Count what a training step costs on a GPU, without one, and what differs from its budget; estimate time and floor.

Run: python benchmarks/floor.py [APP ...] [--gpu h200] [--write]
"""

from typing import NamedTuple

from medspeed.apps import APPS
from medspeed.benchmarks.fake_cuda import shim
from medspeed.common.flags import Parser


class Gpu(NamedTuple):
    """What a GPU reaches: products of matrices in bf16, FLOP/s, and a large copy, bytes/s."""

    flops: float
    bandwidth: float


# An H200 was once measured at 0.80 and 0.90 of its data sheet (another, records/2026-11-27_h200_steps: 741 TFLOP/s and
# 3.8 TB/s); the others have those shares of theirs (NVIDIA; dense bf16 that adds up in float32; SXM, A100: 80 GB).
_DATA_SHEETS = {"h100": (989e12, 3.35e12), "a100": (312e12, 2.04e12), "l40s": (362e12, 0.864e12)}
_DATA_SHEETS |= {"rtx5090": (209.5e12, 1.79e12)}
GPUS = {"h200": Gpu(790e12, 4.3e12)} | {name: Gpu(0.8 * a, 0.9 * b) for name, (a, b) in _DATA_SHEETS.items()}

PARSER = Parser(description=__doc__)
PARSER.add_argument("apps", nargs="*", metavar="APP", choices=[*APPS, []], help=f"{', '.join(APPS)}; all by default")
PARSER.add_argument("--gpu", choices=GPUS, default="h200", help="GPU to estimate for")
PARSER.add_argument("--write", action="store_true", help="make what is counted now the budget")

if __name__ == "__main__":
    PARSER.parse_args()
    if reason := shim.why_not():
        PARSER.error(reason)
    shim.load()  # before torch is loaded

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from medspeed.benchmarks.fake_cuda.costs import TABLE, Kernel, Kind, kernels, total
from medspeed.benchmarks.fake_cuda.device import Layout, Operator
from medspeed.benchmarks.fake_cuda.steps import VARIANTS, flags_of, opened, write_data
from medspeed.benchmarks.visit_parts import NETWORKS
from medspeed.common.files import read_object, write_json
from medspeed.common.observe.roofline import count_work, floor

# Of the bandwidth of a large copy, and of the products of large matrices, what kernels of each kind reach.
_BANDWIDTH: dict[Kind, float] = {
    "convolution": 0.75, "layout": 0.45, "norm": 0.65, "reduce": 0.7, "gather": 0.5, "sample": 0.4, "foreach": 0.7,
    "pointwise": 0.8, "upload": 0.01, "fused": 0.75,
}  # fmt: skip
# Fitted to an H200 in bf16, where cuDNN takes as long a voxel for 2 x 2 channels as for 32 x 32.
_PRODUCTS, _CHANNELS = 0.55, 2000
_LEAST = 2.2e-6  # seconds of a kernel
_HOST, _HOST_CONVOLUTION, _HOST_GRAPH = 9e-6, 20e-6, 20e-6  # seconds to launch an operator, to prepare a convolution
_ASSUMED = f"""assumed, not measured: kernels reach {_BANDWIDTH["pointwise"]:.0%} of the bandwidth element by element, \
{_BANDWIDTH["norm"]:.0%} in a normalisation, {_BANDWIDTH["layout"]:.0%} where they turn a layout, \
{_BANDWIDTH["fused"]:.0%} where they are ours; no kernel takes less than \
{_LEAST * 1e6:.1f} us. The host takes {_HOST * 1e6:.0f} us an operator, {_HOST_CONVOLUTION * 1e6:.0f} more a \
convolution; a graph is one launch. A compiler lets element-wise operators join the kernel before them. \
Fitted to an H200: convolutions reach {_PRODUCTS:.0%} of the products, and so much less as input times output \
channels are fewer than {_CHANNELS}. Expect 50 percent more or less of the default; plain torch may take four \
times as long as estimated, as for brats, since its group normalisation does."""


class Estimate(NamedTuple):
    """A step's estimated cost: kernels, bytes, and seconds of the device and of the host; the slower counts."""

    kernels: int
    bytes: int
    device: float
    host: float


def seconds(one: Kernel, gpu: Gpu) -> float:
    """Return the estimated seconds of a kernel."""
    slow = max(1.0, _CHANNELS / one.channels) if one.channels else 1.0
    return max(_LEAST, one.bytes / (_BANDWIDTH[one.kind] * gpu.bandwidth), slow * one.flops / (_PRODUCTS * gpu.flops))


def estimate(launched: Iterable[Sequence[Kernel]], gpu: Gpu, *, graph: bool = False) -> Estimate:
    """Return the estimate of operators, each by its kernels, launched one by one or as one graph."""
    groups = [each for each in launched if each]
    every = [kernel for each in groups for kernel in each]
    products = sum(kernel.kind == "convolution" for kernel in every)
    host = _HOST_GRAPH if graph else _HOST * len(groups) + _HOST_CONVOLUTION * products
    return Estimate(len(every), sum(each.bytes for each in every), sum(seconds(each, gpu) for each in every), host)


def compiled(operators: Sequence[Operator]) -> list[list[Kernel]]:
    """Return the kernels that a compiler would leave of operators.

    One that works element by element, or adds up, does so in the kernel of the one before it whose result it takes, if
    that is element-wise or a normalisation: its launch and one read are saved. (That result is still written: most are
    needed backward.)
    """
    found: list[list[Kernel]] = []
    before: Layout | None = None  # what the last kernel gave, where another may join it
    for each in operators:
        launched = kernels(each)
        if not launched:
            continue
        kind = launched[-1].kind
        if before in each.inputs and len(launched) == 1 and kind in ("pointwise", "reduce"):
            last = found[-1].pop()
            launched = [last._replace(bytes=last.bytes + max(0, launched[0].bytes - before.size))]
        found.append(launched)
        before = each.outputs[0] if each.outputs and kind in ("pointwise", "norm") else None
    return found


def main() -> None:
    """Count the steps of apps, print what has changed and what is estimated, and write the budget where asked to."""
    given, table = PARSER.parse_args(), read_object(TABLE)
    for app in given.apps or APPS:
        before = table.get(app, {})
        table[app], estimates = count(app, GPUS[given.gpu])
        for variant, costs in table[app].items():
            was = before.get(variant, costs)
            told = [f"{name} {now:,}{f' (before {was[name]:,})' * (was[name] != now)}" for name, now in costs.items()]
            print(f"{app}, {variant}: {', '.join(told)}")
        tell(app, given.gpu, estimates)
    print(_ASSUMED)
    if given.write:
        write_json(TABLE, table)


def count(app: str, gpu: Gpu) -> tuple[dict[str, dict[str, int]], dict[str, Estimate]]:
    """Return what steps and a validation of an app cost, and estimates for a GPU."""
    costs, estimates = dict[str, dict[str, int]](), dict[str, Estimate]()
    with TemporaryDirectory() as folder:
        data = write_data(app, Path(folder) / "data")
        for variant in VARIANTS:
            with opened(app, data, flags_of(app, variant)) as training:
                operators = training.steps()[-1]
                costs[variant] = total(operators)
                if variant == "bf16":
                    costs["validation"] = total(training.validation())
            if variant in ("bf16", "bf16, plain torch"):
                launched = [kernels(each) for each in operators]
                estimates[f"{variant}, eager"] = estimate(launched, gpu)
                estimates[f"{variant}, in a graph"] = estimate(launched, gpu, graph=True)
            if "plain" in variant:
                estimates[f"{variant}, compiled"] = estimate(compiled(operators), gpu)
    return costs, estimates


def tell(app: str, name: str, estimates: Mapping[str, Estimate]) -> None:
    """Print the floor of an app's step on a GPU, and estimates above it."""
    (make, _, shape), gpu = NETWORKS[app], GPUS[name]
    work = count_work(make(), shape)
    least, flops = floor(work, 2, *gpu), sum(each.flops for each in work)
    reached = f"{gpu.flops / 1e12:.0f} TFLOP/s and {gpu.bandwidth / 1e12:.2f} TB/s"
    print(f"AN ESTIMATE, nothing was run: a training step of {app} in bf16 on one {name} ({reached})")
    print(f"floor of its layers, {flops / 1e12:.3f} TFLOP: {1e3 * least:.2f} ms")
    for each, found in estimates.items():
        times = f"device {1e3 * found.device:6.2f} ms, host {1e3 * found.host:6.2f} ms"
        share = f"{100 * least / max(found.device, found.host):3.0f} percent of the floor's speed"
        print(f"{each:30} {found.kernels:4} kernels, {found.bytes / 1e9:6.2f} GB: {times}; {share}")


if __name__ == "__main__":
    main()
