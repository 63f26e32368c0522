"""Optimizers."""

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from medspeed.common.kernels.moments import divisors

OptimizerName = Literal["novograd", "muon", "monai_novograd", "adam", "sgd"]

# Parameters lie in flat buffers padded to whole blocks, so that one small table (block -> parameter) lets a single
# operator apply a different number to every parameter: foreach operators take only one number for all of them.
BLOCK = 1024

_BETA1 = 0.9  # the default of MONAI's Novograd
_TINY = 1e-30  # what no length is below, so that a gradient of zeros changes nothing


@dataclass
class _GroupBuffers:
    """The state of one parameter group with P parameters, packed into a few tensors on the parameters' device."""

    parameters: list[Tensor]
    blocks: list[int]  # how many blocks each parameter takes
    owner: Tensor  # [blocks] int64: the parameter a block belongs to
    moment: Tensor  # [blocks, BLOCK]: moving average of the normalised gradients
    scratch: Tensor  # [blocks, BLOCK]: holds the gradients, later the update
    moment_views: list[Tensor]  # `moment` as P tensors with the parameters' shapes and strides
    scratch_views: list[Tensor]
    second: Tensor  # [P]: moving average of the squared gradient norms
    loose: list[int] | None = None  # which gradients have other strides, in axes of length 1; known from the first step


class _Uncompiled(torch.optim.Optimizer):
    """Without what keeps the compiler from these functions, for which torch would load it: more than a second."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class Muon(_Uncompiled):
    """Momentum whose matrices are made orthogonal, so that a step moves a kernel equally far in every direction.

    For each parameter w with gradient g and learning rate lr::

        m_t = 0.9 * m_{t-1} + 0.1 * g
        u   = 0.9 * m_t + 0.1 * g
        w   = w - lr * sqrt(max(1, rows / columns)) * orthogonal(u)      (kernels: [O, I, ...] is O rows)
        w   = w - lr * u / sqrt(mean(u^2))                               (biases, slopes, scales)

    Args:
        params: parameters; those that are frozen are left as they are.
        lr: learning rate, at least 0; may be changed between steps.

    Source:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing here needs the loss twice
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"])

    def _update(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        moment = state["momentum"].lerp_(gradient, 1 - _BETA1)
        update = gradient.lerp(moment, _BETA1)
        if parameter.ndim < 2:
            length = torch.linalg.vector_norm(update).clamp(min=_TINY)
            parameter.sub_(update / length, alpha=lr * math.sqrt(update.numel()))
            return
        matrix = update.flatten(1)
        rate = lr * math.sqrt(max(1, len(matrix) / matrix.shape[1]))
        parameter.sub_(orthogonal(matrix).reshape(parameter.shape), alpha=rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix [M, N] with the singular vectors of this one and singular values near 1 (0.7 to 1.2).

    Five steps of the Newton-Schulz iteration, on the smaller of the matrix's two Gram matrices, so that large kernels
    cost two large products and not fifteen. Singular values below a hundredth of the matrix's norm end lower.

    Source:
        Jordan et al., as above; the coefficients are theirs.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / torch.linalg.matrix_norm(wide).clamp(min=_TINY)
    gram, one = wide @ wide.T, torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    whole = one
    for _ in range(5):
        factor = 3.4445 * one - 4.7750 * gram + 2.0315 * gram @ gram
        whole, gram = factor @ whole, factor @ gram @ factor
    found: Tensor = whole @ wide
    return found if found.shape == matrix.shape else found.T


class Novograd(_Uncompiled):
    """Novograd with a constant number of operator launches per step and no host synchronisation.

    For each parameter tensor w with gradient g, learning rate lr and step t::

        v_t = beta2 * v_{t-1} + (1 - beta2) * ||g||^2          (v_t = ||g||^2 while v_{t-1} is 0; one number per tensor)
        m_t = beta1 * m_{t-1} + g / (sqrt(v_t) + eps)
        w   = w - lr * m_t

    with the betas (0.9, 0.98) and eps 1e-8 of MONAI's. The weights equal those of `monai.optimizers.Novograd`; the
    gradients are left untouched. Frozen parameters are left out; each of the others must have a gradient at each step.

    Loss scaling happens inside: `torch.amp.GradScaler.step` hands its scale and its overflow flag over as the device
    tensors `grad_scale` and `found_inf`; a step that overflowed changes neither weights nor state.

    Args:
        params: parameters, or dicts of parameter groups; floating point, one dtype and one device per group.
        lr: learning rate, at least 0; may be changed between steps, as schedulers do. As a scalar tensor on the
            parameters' device it is read there, so that a step which a CUDA graph repeats follows it.

    Source:
        Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", arXiv:1905.11286.
    """

    _step_supports_amp_scaling = True  # read by GradScaler: it then leaves unscaling and skipping to `step`

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3) -> None:
        self._buffers: list[_GroupBuffers] = []  # one per parameter group; filled by the first step
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing here needs the loss twice
        """Update every parameter that is not frozen."""
        self.pack()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for buffers, group in zip(self._buffers, self.param_groups, strict=True):
            _step_group(buffers, group["lr"], grad_scale, found_inf)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made by `state_dict`; each parameter keeps its device, dtype and memory format."""
        super().load_state_dict(state_dict)
        self.pack()  # at once: torch leaves what was loaded shared with `state_dict`

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, as torch loads, copies and unpickles it; the next `pack` gives it buffers."""
        super().__setstate__(state)
        self._buffers = []

    def pack(self) -> list[Tensor]:
        """Make the state of the groups that have none yet; return the few tensors that hold the state of all."""
        for group in self.param_groups[len(self._buffers) :]:
            self._buffers.append(_pack([each for each in group["params"] if each.requires_grad], self.state))
        return [tensor for buffers in self._buffers for tensor in (buffers.moment, buffers.second)]


def _pack(parameters: list[Tensor], state: dict[Tensor, Any]) -> _GroupBuffers:
    """Return the buffers of one group, filled with its state; the entries of `state` then are views of them."""
    first = parameters[0]
    assert all(p.device == first.device and p.dtype == first.dtype for p in parameters), "one device, one dtype a group"
    blocks = [math.ceil(parameter.numel() / BLOCK) for parameter in parameters]
    moment = first.new_zeros(sum(blocks), BLOCK)
    scratch = torch.zeros_like(moment)  # a storage of its own: that of `moment` is saved with the state
    buffers = _GroupBuffers(
        parameters=parameters,
        blocks=blocks,
        owner=torch.tensor([index for index, count in enumerate(blocks) for _ in range(count)], device=first.device),
        moment=moment,
        scratch=scratch,
        moment_views=_views(moment, parameters, blocks),
        scratch_views=_views(scratch, parameters, blocks),
        second=first.new_zeros(len(blocks)),
    )
    for index, parameter in enumerate(parameters):
        views = {"exp_avg": buffers.moment_views[index], "exp_avg_sq": buffers.second[index]}
        for name in views.keys() & state[parameter].keys():
            views[name].copy_(state[parameter][name])
        state[parameter] = views
    return buffers


def _views(flat: Tensor, parameters: list[Tensor], blocks: list[int]) -> list[Tensor]:
    """Return the buffer as tensors with the parameters' shapes and strides (foreach kernels want equal strides)."""
    parts = torch.split(flat.view(-1), [count * BLOCK for count in blocks])
    # `empty_like` gives the strides a dense tensor of that memory format has, also for a parameter that is not dense.
    strides = [torch.empty_like(parameter, device="meta").stride() for parameter in parameters]
    return [
        part.as_strided(parameter.shape, stride, part.storage_offset())
        for part, parameter, stride in zip(parts, parameters, strides, strict=True)
    ]


def _step_group(
    buffers: _GroupBuffers, lr: float | Tensor, grad_scale: Tensor | None, found_inf: Tensor | None
) -> None:
    torch._foreach_copy_(buffers.scratch_views, _gradients(buffers))
    norms = torch.linalg.vector_norm(buffers.scratch, dim=1)
    of_parameters = buffers.blocks, buffers.owner, buffers.second
    divisor = divisors(norms, *of_parameters, grad_scale, found_inf).unsqueeze(1)
    # A rate that is a number is part of what a CUDA graph repeats; a tensor is read anew.
    if buffers.moment.is_cuda or found_inf is not None:
        usual: dict[str, Any] = {"weight_decay": 0.0, "momentum": _BETA1, "dampening": 0.0, "nesterov": False}
        usual |= {"maximize": False, "is_first_step": False, "found_inf": found_inf}
        buffers.scratch.div_(divisor)
        torch._fused_sgd_(buffers.parameters, buffers.scratch_views, buffers.moment_views, lr=lr, **usual)
        return
    buffers.moment.mul_(_BETA1).addcdiv_(buffers.scratch, divisor)  # what a CPU does faster
    if isinstance(lr, Tensor):
        torch._foreach_addcmul_(buffers.parameters, buffers.moment_views, [lr] * len(buffers.blocks), value=-1)
    else:
        torch._foreach_add_(buffers.parameters, buffers.moment_views, alpha=-lr)


def _gradients(buffers: _GroupBuffers) -> list[Tensor]:
    """Return the gradients with the strides of the buffer, which foreach kernels are only fast with.

    In axes of length 1, as of a 1 x 1 x 1 kernel, a stride has no meaning, and libraries write what they like.
    """
    gradients = [parameter.grad for parameter in buffers.parameters if parameter.grad is not None]
    assert len(gradients) == len(buffers.parameters), "each parameter that is not frozen has a gradient at each step"
    if buffers.loose is None:
        pairs = list(zip(gradients, buffers.scratch_views, strict=True))
        buffers.loose = [place for place, (one, other) in enumerate(pairs) if one.stride() != other.stride()]
        assert all(_meant(one) == _meant(other) for one, other in pairs), "a gradient is laid out unlike its parameter"
    for place in buffers.loose:
        view = buffers.scratch_views[place]
        gradients[place] = gradients[place].as_strided(view.shape, view.stride())
    return gradients


def _meant(tensor: Tensor) -> list[int]:
    """Return the strides of the axes that are longer than 1."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def build_optimizer(name: OptimizerName, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return an optimizer for a network's parameters, with the learning rate to start with.

    Source:
        SGD's momentum 0.9 and weight decay 4e-5: the MONAI fast training tutorial since May 2022.
    """
    if name == "novograd":
        return Novograd(parameters, lr)
    if name == "muon":
        return Muon(parameters, lr)
    if name == "monai_novograd":
        from monai.optimizers import Novograd as MonaiNovograd  # here: MONAI takes longer to load than all the rest

        return MonaiNovograd(parameters, lr)  # type: ignore[no-any-return]
    if name == "adam":
        return torch.optim.Adam(parameters, lr)
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=4e-5)
