"""Sliding windows against MONAI, against a naive float64 mean, and under faults."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.inferers import sliding_window_inference
from torch.utils._python_dispatch import TorchDispatchMode

from medspeed.common.console import say_once
from medspeed.common.data.geometry import Shape
from medspeed.common.inference.predict import window_plan, window_starts
from medspeed.common.inference.scans import fitted_window
from tests.support import sliding_windows

CPU = torch.device("cpu")
Network = Callable[[torch.Tensor], torch.Tensor]


def network(classes: int, channels: int = 1, seed: int = 0) -> Network:
    """A small network whose logits depend on the neighbourhood and on the place in the window, like a real one's."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, channels, 3, 3, 3, generator=generator)

    def predict(windows: torch.Tensor) -> torch.Tensor:
        place = torch.linspace(-1, 1, windows.shape[-1])
        return torch.nn.functional.conv3d(windows + place, weight.to(windows.device), padding=1)

    return predict


def image_of(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def monai(image: torch.Tensor, roi: Shape, predictor: Network, overlap: float) -> torch.Tensor:
    logits = sliding_window_inference(image[None], roi, 1, predictor, overlap=overlap)
    assert isinstance(logits, torch.Tensor)
    return logits[0]


@pytest.mark.parametrize(
    ("shape", "roi", "overlap"),
    [
        ((40, 33, 27), (16, 16, 16), 0.25),
        ((16, 16, 16), (16, 16, 16), 0.25),  # one window
        ((10, 40, 7), (16, 12, 16), 0.5),  # two axes padded, one of them by an odd number
        ((31, 17, 16), (8, 16, 16), 0.6),
        ((20, 20, 20), (16, 16, 16), 0.0),  # no overlap but for the last window, which is shifted back
        ((9, 9, 9), (4, 4, 4), 0.9),  # an interval of zero voxels becomes one
    ],
)
def test_equals_monai(shape: Shape, roi: Shape, overlap: float):
    image = image_of((2, *shape))
    three, two = network(3, channels=2), network(2, channels=2)
    expected = monai(image, roi, three, overlap)
    torch.testing.assert_close(sliding_windows(image, three, roi, overlap=overlap), expected, rtol=1e-5, atol=1e-5)
    expected = monai(image, roi, two, overlap)
    both = sliding_windows(image, two, roi, overlap=overlap, difference=False)
    torch.testing.assert_close(both, expected, rtol=1e-5, atol=1e-5)
    foreground = sliding_windows(image, two, roi, overlap=overlap)
    assert foreground.shape == (1, *shape)
    torch.testing.assert_close(foreground[0], expected[1] - expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(foreground[0] > 0, expected.argmax(0) == 1)


def test_one_class_and_half_precision_images():
    image = image_of((1, 20, 12, 12)).half()
    expected = monai(image.float(), (12, 12, 12), network(1), 0.25)
    result = sliding_windows(image, network(1), (12, 12, 12))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 10)), min_size=3, max_size=3),
    st.floats(0, 0.95),
    st.integers(1, 5),
)
@settings(deadline=None, max_examples=60)
def test_equals_naive_float64_mean(sides: list[tuple[int, int]], overlap: float, batch: int):
    lengths, roi = tuple(s[0] for s in sides), (sides[0][1], sides[1][1], sides[2][1])
    image = image_of((1, *lengths))
    result = sliding_windows(image, network(3), roi, overlap=overlap, batch_size=batch)
    expected = naive_mean(image, network(3), roi, overlap)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    x, y, z = (max(length, side) for length, side in sides)
    _, scales = window_plan((x, y, z), roi, overlap, CPU)
    assert all(bool(scale.isfinite().all() and (scale > 0).all()) for scale in scales)
    flat = sliding_windows(image, lambda w: torch.full_like(w, 2.5), roi, overlap=overlap)
    torch.testing.assert_close(flat, torch.full_like(flat, 2.5))


def naive_mean(image: torch.Tensor, predictor: Network, roi: Shape, overlap: float) -> torch.Tensor:
    """The definition in float64 with no shared code: pad, cut, predict, add, divide."""
    missing = [max(side - length, 0) for side, length in zip(roi, image.shape[1:], strict=True)]
    before = [m // 2 for m in missing]
    pads = [p for m, b in zip(reversed(missing), reversed(before), strict=True) for p in (b, m - b)]
    padded = torch.nn.functional.pad(image, pads)
    along = []
    for length, side in zip(padded.shape[1:], roi, strict=True):
        first = [0]
        while first[-1] + side < length:
            first.append(min(first[-1] + max(int(side * (1 - overlap)), 1), length - side))
        along.append(first)
    total = torch.zeros((3, *padded.shape[1:]), dtype=torch.float64)
    for x, y, z in itertools.product(*along):
        place = (slice(None), slice(x, x + roi[0]), slice(y, y + roi[1]), slice(z, z + roi[2]))
        total[place] += predictor(padded[place][None])[0].double()
    count = torch.zeros(padded.shape[1:], dtype=torch.float64)
    for x, y, z in itertools.product(*along):
        count[x : x + roi[0], y : y + roi[1], z : z + roi[2]] += 1
    inside = tuple(slice(b, b + length) for b, length in zip(before, image.shape[1:], strict=True))
    return (total / count)[(slice(None), *inside)]


def test_window_starts_by_hand():
    assert window_starts(300, 96, 0.25) == (0, 72, 144, 204)
    assert window_starts(96, 96, 0.25) == (0,)
    assert window_starts(50, 96, 0.25) == (0,)
    assert window_starts(168, 96, 0.25) == (0, 72)
    assert window_starts(169, 96, 0.25) == (0, 72, 73)


def test_plans_are_made_once():
    first = window_plan((30, 30, 30), (16, 16, 16), 0.25, CPU)
    assert window_plan((30, 30, 30), (16, 16, 16), 0.25, CPU) is first


@pytest.mark.parametrize("batch_size", [1, 3, 5, 40])
def test_every_batch_is_full_and_contiguous(batch_size: int):
    image = image_of((1, 30, 16, 16))
    seen: list[torch.Tensor] = []

    def predict(windows: torch.Tensor) -> torch.Tensor:
        assert windows.is_contiguous()
        seen.append(windows.clone())
        return network(3)(windows)

    result = sliding_windows(image, predict, (8, 16, 16), batch_size=batch_size)  # windows at 0, 6, 12, 18, 22
    assert [len(windows) for windows in seen] == [batch_size] * -(-5 // batch_size)
    windows = torch.cat(seen)
    cut = torch.stack([image[:, x : x + 8] for x in (0, 6, 12, 18, 22)])
    assert torch.equal(windows[:5], cut)
    assert torch.equal(windows[5:], cut[4:].expand(len(windows) - 5, -1, -1, -1, -1))
    torch.testing.assert_close(result, monai(image, (8, 16, 16), network(3), 0.25), rtol=1e-5, atol=1e-5)


def test_image_is_left_as_it_was():
    image = image_of((1, 20, 8, 6))
    before = image.clone()
    sliding_windows(image, lambda w: w, (8, 8, 8), batch_size=1)
    assert torch.equal(image, before)


@pytest.mark.parametrize("fits", [1, 2, 3])
def test_out_of_memory_halves_the_batch_and_goes_on(fits: int, capsys: pytest.CaptureFixture[str]):
    image = image_of((1, 30, 30, 12))
    sizes = []

    def predict(windows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(windows))
        if len(sizes) > 1 and len(windows) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.cat([3 * windows, windows.sin()], dim=1)

    say_once.cache_clear()
    result = sliding_windows(image, predict, (12, 12, 12), batch_size=4)
    messages = capsys.readouterr().out.splitlines()
    assert len(messages) == (2 if fits == 1 else 1)
    assert messages[0].startswith("a batch of 4 windows of 12 x 12 x 12 voxels does not fit")
    assert messages[0].endswith("trying 2")
    assert sizes[:3] == [4, 4, 2]  # the first four windows are not predicted again
    assert sizes.count(4) == 2
    calm = sliding_windows(image, lambda w: torch.cat([3 * w, w.sin()], dim=1), (12, 12, 12), batch_size=4)
    assert torch.equal(result, calm)


def test_out_of_memory_with_one_window_says_what_to_lower():
    def predict(windows: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    match = r"one window of 12 x 12 x 12 voxels.*use half precision.*--windows.size"
    with pytest.raises(torch.OutOfMemoryError, match=match) as caught:
        sliding_windows(image_of((1, 20, 20, 20)), predict, (12, 12, 12), batch_size=2)
    assert "9 GiB" in str(caught.value.__cause__)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("difference", [True, False])
def test_logits_that_are_not_finite_are_refused(value: float, difference: bool):
    def predict(windows: torch.Tensor) -> torch.Tensor:
        logits = torch.cat([windows, windows], dim=1)
        logits[0, 1, 2, 3, 4] = value
        return logits

    with pytest.raises(ValueError, match="1 of 512 voxels have non-finite logits, 0 voxels of the image"):
        sliding_windows(torch.zeros(1, 8, 8, 8), predict, (8, 8, 8), batch_size=1, difference=difference)


def test_image_that_is_not_finite_is_named():
    image = torch.zeros(1, 8, 8, 8)
    image[0, 1, 1, :2] = torch.nan
    with pytest.raises(ValueError, match="2 voxels of the image"):
        sliding_windows(image, lambda w: w, (8, 8, 8))


@pytest.mark.parametrize("predict", [lambda w: w[:1], lambda w: w[..., ::2], lambda w: w[:, 0], lambda w: w.to("meta")])
def test_logits_of_another_shape_or_device_are_a_programmers_error(predict: Network):
    with pytest.raises(AssertionError):
        sliding_windows(torch.zeros(1, 16, 8, 8), predict, (8, 8, 8), batch_size=2)


def test_what_no_windows_can_be_cut_from_is_refused():
    with pytest.raises(AssertionError):
        sliding_windows(torch.zeros(8, 8, 8), network(2), (8, 8, 8))


def test_no_gradients_are_kept_and_inference_tensors_serve():
    image = image_of((1, 12, 8, 8)).requires_grad_()
    assert not sliding_windows(image, network(2), (8, 8, 8)).requires_grad
    window_plan.cache_clear()
    with torch.inference_mode():
        inside = sliding_windows(image, network(2), (8, 8, 8))
    outside = sliding_windows(image, torch.inference_mode()(network(2)), (8, 8, 8))
    assert torch.equal(inside, outside)
    outside += 1  # the result is an ordinary tensor


class CountWaits(TorchDispatchMode):
    """Counts the operators for which the host waits for the device."""

    waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.waits += 1
        return func(*args, **(kwargs or {}))


def test_the_host_waits_once_per_volume():
    with CountWaits() as counter:
        sliding_windows(image_of((1, 20, 20, 5)), network(2), (8, 8, 8), batch_size=2)
    assert counter.waits == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_equals_the_cpu_on_a_gpu_and_waits_once():
    image = image_of((1, 40, 33, 10)).half()

    def predict(windows: torch.Tensor) -> torch.Tensor:
        return torch.cat([3 * windows, windows.square()], dim=1)

    def run(volume: torch.Tensor) -> torch.Tensor:
        return sliding_windows(volume, predict, (16, 16, 16), batch_size=2)

    expected = run(image)
    on_device = image.cuda()
    run(on_device)  # the plan is made here
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation") as warned:
            result = run(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(warned) == 1
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((307, 211, 136), (128, 128, 160)),  # 3 x 2 x 1 windows, as with 160
        ((254, 195, 96), (160, 128, 96)),
        ((160, 160, 160), (160, 160, 160)),
        ((20, 50, 33), (32, 64, 64)),
    ],
)
def test_a_fitted_window_is_the_smallest_that_needs_no_more_windows(shape, fits):
    found = fitted_window(shape, (160, 160, 160), 0.25)
    assert found == fits
    for length, side in zip(shape, found, strict=True):
        count = len(window_starts(length, 160, 0.25))
        assert len(window_starts(length, side, 0.25)) <= count
        assert side % 32 == 0  # the power of two in 160
        shorter = side - 32
        assert shorter == 0 or shorter < length if count == 1 else len(window_starts(length, shorter, 0.25)) > count


@given(st.tuples(*[st.integers(1, 400)] * 3), st.sampled_from([(64, 64, 48), (160, 160, 160), (104, 80, 72)]))
def test_a_fitted_window_is_never_larger(shape, most):
    found = fitted_window(shape, most, 0.25)
    assert all(
        0 < side <= full and side % (math.gcd(*most) & -math.gcd(*most)) == 0
        for side, full in zip(found, most, strict=True)
    )
