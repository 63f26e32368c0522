import pytest

from medspeed.benchmarks.fake_cuda.costs import Kernel, kernels, total
from medspeed.benchmarks.fake_cuda.device import Layout, Operator
from tests.gpu_shape.guards import exceeded

FIRST, LAST = (8 * 64, 64, 16, 4, 1), (8 * 64, 1, 8 * 16, 8 * 4, 8)  # of [2, 8, 4, 4, 4]
BYTES = 2 * 8 * 64 * 2  # of that in bf16


def tensor(strides: tuple[int, ...] = FIRST, dtype: str = "bfloat16", device: str = "cuda") -> Layout:
    return Layout((2, 8, 4, 4, 4), strides, dtype, device)


def operator(name: str, inputs: list[Layout], outputs: list[Layout], crossing: str = "", flops: int = 0) -> Operator:
    return Operator(name, "train", tuple(inputs), tuple(outputs), (), crossing, flops)


def test_a_pointwise_operator_reads_its_inputs_and_writes_its_output():
    assert kernels(operator("add.Tensor", [tensor(), tensor()], [tensor()])) == [Kernel("pointwise", 3 * BYTES)]


def test_an_expanded_axis_is_read_once():
    expanded = tensor((0, 64, 16, 4, 1))
    assert kernels(operator("mul.Tensor", [expanded], [tensor()])) == [Kernel("pointwise", BYTES // 2 + BYTES)]


@pytest.mark.parametrize("name", ["clone", "_to_copy", "copy_"])
def test_a_copy_into_another_order_of_axes_is_a_layout_copy(name):
    given = [tensor(LAST), tensor(FIRST)] if name == "copy_" else [tensor(FIRST)]
    assert kernels(operator(name, given, [tensor(LAST)])) == [Kernel("layout", 2 * BYTES)]
    assert kernels(operator("clone", [tensor(LAST)], [tensor(LAST)])) == [Kernel("pointwise", 2 * BYTES)]


def test_a_convolution_turns_an_image_of_another_layout_and_adds_its_bias_by_itself():
    weight, bias = Layout((8, 8, 1, 1, 1), (8, 1, 8, 8, 8), "bfloat16", "cuda"), Layout((8,), (1,), "bfloat16", "cuda")
    found = kernels(operator("convolution", [tensor(FIRST), weight, bias], [tensor(LAST)], flops=100))
    assert found == [
        Kernel("layout", 2 * BYTES),
        Kernel("convolution", 2 * BYTES + 128, 100, 64),
        Kernel("pointwise", 2 * BYTES),
    ]


def test_the_gradients_of_a_convolution_are_two_products_and_a_sum():
    weight, bias = Layout((8, 8, 1, 1, 1), (8, 1, 8, 8, 8), "bfloat16", "cuda"), Layout((8,), (1,), "bfloat16", "cuda")
    given, made = [tensor(LAST), tensor(LAST), weight], [tensor(LAST), weight, bias]
    product = Kernel("convolution", 2 * BYTES + 128, 50, 64)
    assert kernels(operator("convolution_backward", given, made, flops=100)) == [
        product,
        product,
        Kernel("reduce", BYTES),
    ]
    assert kernels(operator("convolution_backward", given, [weight], flops=50)) == [product]


def test_a_normalisation_reads_its_input_twice():
    moved = [kernel.bytes for kernel in kernels(operator("native_group_norm", [tensor()], [tensor()]))]
    assert moved == [BYTES, 0, 2 * BYTES]


def test_an_operator_of_our_own_is_one_kernel_over_what_it_takes_and_gives():
    assert kernels(operator("medspeed::some", [tensor(), tensor()], [tensor()])) == [Kernel("fused", 3 * BYTES)]


def test_an_operator_that_needs_sums_is_two_kernels():
    found = kernels(operator("medspeed::norm_backward", [tensor(), tensor()], [tensor()]))
    assert found == [Kernel("fused", 2 * BYTES), Kernel("fused", 3 * BYTES)]


def test_totals_add_up_and_tell_what_crosses_the_bus():
    wide = tensor(dtype="float32")
    ran = [
        operator("empty_like", [tensor()], [tensor()]),
        operator("add.Tensor", [wide], [wide]),
        operator("_to_copy", [tensor(device="cpu")], [tensor()], crossing="upload"),
        operator("_local_scalar_dense", [tensor()], [], crossing="wait"),
    ]
    found = total(ran)
    assert (found["kernels"], found["bytes"], found["uploads"], found["waits"]) == (2, 4 * BYTES + BYTES, 1, 1)
    assert found["float32_bytes"] == 4 * BYTES


def test_only_what_is_five_percent_above_the_budget_exceeds_it():
    budget = total([operator("add.Tensor", [tensor()], [tensor()])]) | {"kernels": 100, "waits": 0}
    assert not list(exceeded(budget | {"kernels": 105}, budget))
    assert list(exceeded(budget | {"kernels": 106}, budget)) == ["kernels: 106, and the budget is 100"]
    assert list(exceeded(budget | {"waits": 1}, budget)) == ["waits: 1, and the budget is 0"]
