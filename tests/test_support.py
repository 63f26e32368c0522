import pytest
import torch

from tests.support import count_operators, refuse_host_sync


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
        lambda x: x[: x.long().sum()],
        lambda x: x.__setitem__(x > 0, torch.zeros(3)),
    ],
)
def test_every_way_to_read_a_value_is_refused(read):
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="makes the host wait"), refuse_host_sync():
        read(x)


def test_device_arithmetic_is_allowed():
    x = torch.ones(3, requires_grad=True)
    with refuse_host_sync():
        (gradient,) = torch.autograd.grad(torch.where(x > 0, x, 0).sum(), x)
        x.detach()[x.detach() > 5] = 0
    assert torch.equal(gradient, torch.ones(3))


def test_operators_are_counted_by_name_and_foreach_once():
    many = [torch.ones(2) for _ in range(7)]
    with count_operators() as launched:
        torch._foreach_mul_(many, 2.0)
        many[0].add_(1)
        many[1].add_(1)
    assert launched == {"aten::_foreach_mul_": 1, "aten::add_": 2}
