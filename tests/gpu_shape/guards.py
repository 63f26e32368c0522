"""What must be true of a step on a GPU: each guard returns, in words, what is not."""

from collections import Counter
from collections.abc import Iterator, Mapping

from medspeed.benchmarks.fake_cuda.costs import kernels, total
from medspeed.benchmarks.fake_cuda.device import Operator

Steps = list[list[Operator]]  # of two consecutive steps, at two rates
MORE = 1.05  # so many times the budget is too much


def exceeded(costs: Mapping[str, int], budget: Mapping[str, int]) -> Iterator[str]:
    """Yield in words which costs are above the budget by more than is let pass."""
    for name in costs:
        if costs[name] > MORE * budget[name]:
            yield f"{name}: {costs[name]:,}, and the budget is {budget[name]:,}"


def bus(steps: Steps, budget: Mapping[str, int]) -> Iterator[str]:
    """Nothing crosses the bus but a batch's tables, from pinned memory, and the host waits for nothing."""
    for one in steps[1]:
        if one.crossing and (one.stage, one.crossing) != ("batch", "upload"):
            yield f"{one.crossing}: {one.name} in stage {one.stage}"


def precision(steps: Steps, budget: Mapping[str, int]) -> Iterator[str]:
    """Convolutions and normalisations run in the half precision that was asked for."""
    names = (
        "convolution",
        "native_batch_norm",
        "cudnn_batch_norm",
        "native_group_norm",
        "native_layer_norm",
        "medspeed::norm",
    )
    wide = Counter(one.name for one in steps[1] if one.name.startswith(names) and one.inputs[0].dtype == "float32")
    yield from (f"{name} in float32, {count} times" for name, count in wide.items())


def layouts(steps: Steps, budget: Mapping[str, int]) -> Iterator[str]:
    """No kernel only changes the order of a tensor's axes."""
    turned = Counter(one.name for one in steps[1] if any(each.kind == "layout" for each in kernels(one)))
    yield from (f"{name} changes the layout, {count} times" for name, count in turned.items())


def costs(steps: Steps, budget: Mapping[str, int]) -> Iterator[str]:
    """The step costs what the table says, or less."""
    yield from exceeded(total(steps[1]), budget)


def steady(steps: Steps, budget: Mapping[str, int]) -> Iterator[str]:
    """From the batch on, each step issues the same operators on the same shapes and strides."""
    yield from _differences(*([one for one in step if one.stage == "train"] for step in steps), scalars=False)


def capturable(steps: Steps, budget: Mapping[str, int]) -> Iterator[str]:
    """A captured graph of the whole step freezes nothing that changes; of the host it reads a batch's tables."""
    yield from _differences(*steps, scalars=True)
    uploads = ("batch", "upload")
    yield from (
        f"{one.crossing}: {one.name}" for one in steps[1] if one.crossing and (one.stage, one.crossing) != uploads
    )


GUARDS = {guard.__name__: guard for guard in (bus, precision, layouts, costs, steady, capturable)}


def _differences(first: list[Operator], second: list[Operator], *, scalars: bool) -> Iterator[str]:
    if len(first) != len(second):
        yield f"{len(first)} operators, then {len(second)}"
    for one, other in zip(first, second, strict=False):
        if one.name != other.name:
            yield f"{one.name}, then {other.name}"
            return
        if (one.inputs, one.outputs) != (other.inputs, other.outputs):
            yield f"{one.name}: {one.inputs}, then {other.inputs}"
            return
        if scalars and one.scalars != other.scalars:
            yield f"{one.name}: {one.scalars}, then {other.scalars}"
