import pytest
import torch

from common.training.compiling import compile_network
from models.unet3d import unet3d


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler warns about things of its own
def test_compiling_leaves_the_state_and_computes_the_same():
    torch.manual_seed(0)
    plain, compiled = unet3d(1, 2, (4, 8), 1), unet3d(1, 2, (4, 8), 1)
    compiled.load_state_dict(plain.state_dict())
    image = torch.rand(2, 1, 16, 16, 16)
    compile_network(compiled, torch.zeros_like(image), "fp32")
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, compiled.state_dict()[name]), name
    assert all(parameter.grad is None for parameter in compiled.parameters())
    assert torch.allclose(compiled(image), plain(image), atol=1e-5)
