"""Optimizers."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import monai.optimizers
import torch
from torch import Tensor

OptimizerName = Literal["novograd", "monai_novograd", "adam", "sgd"]

# Parameters lie in flat buffers padded to whole blocks, so that one small table (block -> parameter) lets a single
# operator apply a different number to every parameter: foreach operators take only one number for all of them.
BLOCK = 1024

_BETA1, _BETA2, _EPSILON = 0.9, 0.98, 1e-8  # the defaults of MONAI's Novograd


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
    pattern: list[bool]  # which parameters had a gradient when `present` was made
    present: Tensor  # [P] bool: `pattern` on the device


class Novograd(torch.optim.Optimizer):
    """Novograd with a constant number of operator launches per step and no host synchronisation.

    For each parameter tensor w with gradient g, learning rate lr and step t::

        v_t = beta2 * v_{t-1} + (1 - beta2) * ||g||^2          (v_t = ||g||^2 while v_{t-1} is 0; one number per tensor)
        m_t = beta1 * m_{t-1} + g / (sqrt(v_t) + eps)
        w   = w - lr * m_t

    with the betas (0.9, 0.98) and eps 1e-8 of MONAI's. The weights equal those of `monai.optimizers.Novograd`; the
    gradients are left untouched. Parameters without a gradient are left out of the step, weights and state.

    Loss scaling happens inside: `torch.amp.GradScaler.step` hands its scale and its overflow flag over as the device
    tensors `grad_scale` and `found_inf`; a step that overflowed changes neither weights nor state.

    Args:
        params: parameters, or dicts of parameter groups; floating point, one dtype and one device per group.
        lr: learning rate, at least 0; may be changed between steps, as schedulers do.

    Raises:
        ValueError: the learning rate is negative or not finite.

    Source:
        Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", arXiv:1905.11286.
    """

    _step_supports_amp_scaling = True  # read by GradScaler: it then leaves unscaling and skipping to `step`

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 1e-3) -> None:
        self._buffers: list[_GroupBuffers] = []  # one per parameter group; filled by the first step
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that may have a learning rate of its own.

        Raises:
            ValueError: the learning rate is negative or not finite.
        """
        super().add_param_group(param_group)
        rate = self.param_groups[-1]["lr"]
        if not 0 <= rate < math.inf:
            raise ValueError(f"Novograd: lr is {rate}: it must be finite and at least 0")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss and its gradients first; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._pack_new_groups()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for buffers, group in zip(self._buffers, self.param_groups, strict=True):
            if any(parameter.grad is not None for parameter in buffers.parameters):
                _step_group(buffers, group["lr"], grad_scale, found_inf)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made by `state_dict`; each parameter keeps its device, dtype and memory format.

        Raises:
            ValueError: the state is of other parameters than these.
        """
        held, saved = self.param_groups, state_dict["param_groups"]
        if len(held) != len(saved):
            raise ValueError(f"the optimizer state holds {len(saved)} parameter groups, this optimizer {len(held)}")
        for index, (group, saved_group) in enumerate(zip(held, saved, strict=True)):
            _check_saved_group(index, group["params"], saved_group["params"], state_dict["state"])
        super().load_state_dict(state_dict)
        self._buffers = []
        self._pack_new_groups()  # at once: torch leaves what was loaded shared with `state_dict`

    def _pack_new_groups(self) -> None:
        for group in self.param_groups[len(self._buffers) :]:
            self._buffers.append(_pack(group["params"], self.state))


def _check_saved_group(index: int, parameters: list[Tensor], saved: list[int], state: dict[int, Any]) -> None:
    if len(parameters) != len(saved):
        raise ValueError(
            f"group {index} of the optimizer state holds {len(saved)} parameters, this optimizer {len(parameters)}: "
            "the state is of another network"
        )
    for parameter, key in zip(parameters, saved, strict=True):
        if key in state and state[key]["exp_avg"].shape != parameter.shape:
            shapes = f"{tuple(state[key]['exp_avg'].shape)} in the optimizer state, {tuple(parameter.shape)} here"
            raise ValueError(f"parameter {key} has shape {shapes}: the state is of another network")


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
        pattern=[True] * len(blocks),
        present=first.new_ones(len(blocks), dtype=torch.bool),
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


def _step_group(buffers: _GroupBuffers, lr: float, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    keep = _parameters_to_update(buffers, found_inf)
    before = buffers.moment if keep is None else buffers.moment.clone()
    index = [i for i, has_gradient in enumerate(buffers.pattern) if has_gradient]
    parameters = [buffers.parameters[i] for i in index]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_copy_([buffers.scratch_views[i] for i in index], gradients)
    divisor = _update_second_moments(buffers, grad_scale, keep)
    buffers.moment.mul_(_BETA1).addcdiv_(buffers.scratch, divisor.index_select(0, buffers.owner).unsqueeze(1))

    update = buffers.moment_views
    if keep is not None:
        keep_block = keep.index_select(0, buffers.owner).unsqueeze(1)
        torch.where(keep_block, buffers.moment, before, out=buffers.moment)
        torch.mul(buffers.moment, keep_block, out=buffers.scratch)
        update = buffers.scratch_views
    torch._foreach_add_(parameters, [update[i] for i in index], alpha=-lr)


def _parameters_to_update(buffers: _GroupBuffers, found_inf: Tensor | None) -> Tensor | None:
    """Return which parameters this step changes, [P] bool on the device; None where it changes all of them."""
    pattern = [parameter.grad is not None for parameter in buffers.parameters]
    if pattern != buffers.pattern:
        buffers.pattern = pattern
        buffers.present = torch.tensor(pattern).to(buffers.second.device, non_blocking=True)
    if found_inf is None:
        return None if all(pattern) else buffers.present
    return buffers.present & (found_inf == 0)


def _update_second_moments(buffers: _GroupBuffers, grad_scale: Tensor | None, keep: Tensor | None) -> Tensor:
    """Update the moving averages of the squared norms; return what each parameter's gradient is divided by, [P]."""
    # First of each block, then over the blocks in float64: summed at once in float32, as the CPU does it, the norm of
    # millions of elements would be off by up to 1e-3.
    block_norms = torch.linalg.vector_norm(buffers.scratch, dim=1).split_with_sizes(buffers.blocks)
    norms = torch.stack(torch._foreach_norm(block_norms, 2, torch.float64))
    if grad_scale is not None:
        norms = norms / grad_scale
    squares = norms.square().to(buffers.second.dtype)
    averaged = torch.where(buffers.second == 0, squares, buffers.second * _BETA2 + squares * (1 - _BETA2))
    buffers.second.copy_(averaged if keep is None else torch.where(keep, averaged, buffers.second))
    divisor: Tensor = buffers.second.sqrt() + _EPSILON
    return divisor if grad_scale is None else divisor * grad_scale


def build_optimizer(name: OptimizerName, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return an optimizer for these parameters.

    Args:
        name: "novograd" (ours), "monai_novograd" (the guide's), "adam" (torch's defaults) or "sgd" (see Source).
        parameters: the network's parameters.
        lr: learning rate at the start, at least 0.

    Raises:
        ValueError: the learning rate is negative.

    Source:
        SGD's momentum 0.9 and weight decay 4e-5: the MONAI fast training tutorial since May 2022.
    """
    build: dict[OptimizerName, Callable[[], torch.optim.Optimizer]] = {
        "novograd": lambda: Novograd(parameters, lr=lr),
        "monai_novograd": lambda: monai.optimizers.Novograd(parameters, lr=lr),
        "adam": lambda: torch.optim.Adam(parameters, lr=lr),
        "sgd": lambda: torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=4e-5),
    }
    return build[name]()
