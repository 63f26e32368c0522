"""Batch normalisations folded into the convolutions before them: one pass over memory less each."""

import copy
from collections import Counter

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)
_TRANSPOSED = (nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


def folded(network: nn.Module) -> nn.Module:
    """Return a network whose batch normalisations are part of the convolutions right before them.

    The logits change by rounding only. A network without batch normalisation is returned as it is, others as a copy.

    Args:
        network: in evaluation mode; what it computes does not depend on values, so that torch.fx can trace it.

    Source:
        Jacob et al., "Quantization and training of neural networks", CVPR 2018, 3.2; as torch.fx's tutorial does it.
    """
    assert not network.training, "folding needs network.eval()"
    if not any(isinstance(module, _NORMS) for module in network.modules()):
        return network
    traced = fx.symbolic_trace(copy.deepcopy(network))
    modules = dict(traced.named_modules())
    calls = Counter(str(node.target) for node in traced.graph.nodes if node.op == "call_module")
    for node in list(traced.graph.nodes):
        before = node.args[0] if node.args else None
        if not (isinstance(before, fx.Node) and node.op == before.op == "call_module"):
            continue
        if len(before.users) > 1 or calls[str(before.target)] > 1:
            continue  # what is read or called elsewhere too must stay as it is
        convolution, norm = modules[str(before.target)], modules[str(node.target)]
        if isinstance(norm, _NORMS) and isinstance(convolution, _CONVOLUTIONS):
            fused = fuse_conv_bn_eval(convolution, norm, transpose=isinstance(convolution, _TRANSPOSED))
            traced.set_submodule(str(before.target), fused)
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.recompile()
    traced.delete_all_unused_submodules()
    return traced
