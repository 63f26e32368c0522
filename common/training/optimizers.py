"""Optimizers."""

import inspect
import math
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

# Parameters lie in flat buffers padded to whole blocks, so that one small table (block -> parameter) lets a single
# operator apply a different number to every parameter: foreach operators take only one number for all of them.
BLOCK = 1024
_BETA1, _BETA2, _EPSILON = 0.9, 0.98, 1e-8  # the first is Muon's too. Source: MONAI's Novograd
_LARGE = 512  # rows and columns of a kernel that Muon does not make orthogonal
_TINY = 1e-30  # what no length is below, so that a gradient of zeros changes nothing


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

    A kernel of at least 512 rows and columns moves as far along u itself: its orthogonal matrix would take longer than
    the rest of the step. Frozen parameters are left as they are; the learning rate may be changed between steps.

    Source:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing here needs the loss twice
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            given = [each for each in group["params"] if each.grad is not None]
            if given:
                self._update(given, [each.grad for each in given], group["lr"])

    def _update(self, given: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        for each in given:
            if not self.state[each]:
                self.state[each]["momentum"] = torch.zeros_like(each)
        moments = [self.state[each]["momentum"] for each in given]
        torch._foreach_lerp_(moments, gradients, 1 - _BETA1)
        updates = torch._foreach_lerp(gradients, moments, _BETA1)
        lengths = torch._foreach_norm(updates)
        torch._foreach_clamp_min_(lengths, _TINY)
        torch._foreach_div_(updates, lengths)
        sides = [min(len(each), each.numel() // len(each)) if each.ndim > 1 else 0 for each in given]
        small = [side and side < _LARGE for side in sides]
        turned = iter(orthogonal([each.flatten(1) for each in compress(updates, small)]))
        for each, update, side, turns in zip(given, updates, sides, small, strict=True):
            wide = max(1, len(each) ** 2 / each.numel()) if side else each.numel()
            if turns:
                each.sub_(next(turned).reshape(each.shape), alpha=lr * math.sqrt(wide))
            else:  # `update` has length 1, an orthogonal matrix the root of its smaller side
                each.sub_(update, alpha=lr * math.sqrt(wide * max(1, side)))


def orthogonal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices [M, N] of length 1 with their singular vectors kept and singular values near 1 (0.7 to 1.2).

    Five steps of the Newton-Schulz iteration with the coefficients of Jordan et al., on the smaller of the two Gram
    matrices, so that large kernels cost two large products; Gram matrices of one size go through it together. Singular
    values below a hundredth of the length end lower.
    """
    wide = [each if len(each) <= each.shape[1] else each.T for each in matrices]
    found = list(matrices)
    for side in {len(each): None for each in wide}:
        places = [place for place, each in enumerate(wide) if len(each) == side]
        gram = torch.stack([wide[place] @ wide[place].T for place in places])
        factor = whole = one = torch.eye(side, dtype=gram.dtype, device=gram.device)
        for step in range(5):
            gram = factor @ gram @ factor if step else gram
            factor = torch.baddbmm(3.4445 * one - 4.7750 * gram, gram, gram, alpha=2.0315)
            whole = factor @ whole if step else factor
        for place, each in zip(places, whole, strict=True):
            turned = each @ wide[place]
            found[place] = turned if turned.shape == matrices[place].shape else turned.T
    return found


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

    The parameters are dense, of one dtype and one device. The learning rate may be changed between steps; as a scalar
    tensor on that device it is read there, so that a step which a CUDA graph repeats follows it.

    Source:
        Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", arXiv:1905.11286.
    """

    _step_supports_amp_scaling = True  # read by GradScaler: it then leaves unscaling and skipping to `step`

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self._pack()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, as torch loads, copies and unpickles it; parameters keep device, dtype and format."""
        super().__setstate__(state)
        self._pack()  # torch leaves what was loaded shared with the state dict

    def _pack(self) -> None:
        """Make buffers, `packed`: two that hold the state, whose entries are views of them, and that of the gradients.

        They are the moving averages of the normalised gradients, [blocks, BLOCK], and of the squared norms of the
        gradients of the P parameters, [P]. In the third, [blocks, BLOCK], what pads a parameter's last block stays 0.
        """
        self._parameters = parameters = [each for each in self.param_groups[0]["params"] if each.requires_grad]
        first, state = parameters[0], self.state
        assert {(p.device, p.dtype) for p in parameters} == {(first.device, first.dtype)}, "one device, one dtype"
        spans = [1 + sum((n - 1) * far for n, far in zip(p.shape, p.stride(), strict=True)) for p in parameters]
        assert spans == [p.numel() for p in parameters], "no gaps in a parameter's memory"
        self._blocks = [math.ceil(parameter.numel() / BLOCK) for parameter in parameters]
        self._owner = torch.repeat_interleave(torch.tensor(self._blocks)).to(first.device)  # whose a block is
        average, second = first.new_zeros(len(self._owner), BLOCK), first.new_zeros(len(parameters))
        # The gradients, later the update, in a storage of their own: that of the moment is saved with the state.
        self._scratch = torch.zeros_like(average)
        self._moments, self._updates = self._views(average), self._views(self._scratch)
        for parameter, moment, square in zip(parameters, self._moments, second, strict=True):
            views = {"exp_avg": moment, "exp_avg_sq": square}
            for name in views.keys() & state[parameter].keys():
                views[name].copy_(state[parameter][name])
            state[parameter] = views
        self.packed = [average, second, self._scratch]

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return a buffer as tensors with the parameters' shapes and strides (foreach kernels want equal strides)."""
        parts = torch.split(flat.view(-1), [count * BLOCK for count in self._blocks])
        pairs = zip(parts, self._parameters, strict=True)
        return [part.as_strided(each.shape, each.stride(), part.storage_offset()) for part, each in pairs]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing here needs the loss twice
        """Update every parameter that is not frozen."""
        assert len(self.param_groups) == 1, "one group of parameters"
        second = self.packed[1]
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        torch._foreach_copy_(self._updates, self._gradients())
        norms = torch.linalg.vector_norm(self._scratch, dim=1)
        divisor = self._divisors(norms, second, grad_scale, found_inf).unsqueeze(1)
        usual: dict[str, Any] = {"weight_decay": 0.0, "momentum": _BETA1, "dampening": 0.0, "nesterov": False}
        usual |= {"maximize": False, "is_first_step": False, "found_inf": found_inf}
        self._scratch.div_(divisor)
        torch._fused_sgd_(self._parameters, self._updates, self._moments, lr=self.param_groups[0]["lr"], **usual)

    def _divisors(self, norms: Tensor, second: Tensor, scale: Tensor | None, skip: Tensor | None) -> Tensor:
        """Update the second moments, unless the step is to be skipped; return what each block is divided by, [blocks].

        The norms are those of the blocks' gradients, [blocks], and `scale` is their scale.
        """
        # Over the blocks in float64: in float32, as the CPU sums it, the norm of millions would be off by up to 1e-3.
        whole = torch.stack(torch._foreach_norm(norms.split_with_sizes(self._blocks), 2, torch.float64))
        squares = torch.square(whole if scale is None else whole / scale, out=torch.empty_like(second))
        averaged = torch.lerp(second, squares, 1 - _BETA2)
        if skip is not None:
            squares, averaged = (torch.where(skip == 0, each, second) for each in (squares, averaged))
        torch.where(second == 0, squares, averaged, out=second)
        divisor = second.sqrt() + _EPSILON
        return (divisor if scale is None else divisor * scale).index_select(0, self._owner)

    def _gradients(self) -> list[Tensor]:
        """Return the gradients with the strides of the buffer, which foreach kernels are only fast with.

        In axes of length 1, as of a 1 x 1 x 1 kernel, a stride has no meaning, and libraries write what they like.
        """
        found = []
        for parameter, view in zip(self._parameters, self._updates, strict=True):
            gradient = parameter.grad
            assert gradient is not None, "each parameter that is not frozen has a gradient at each step"
            if gradient.stride() != view.stride():
                same = gradient.squeeze().stride() == view.squeeze().stride()
                assert same, "a gradient is laid out unlike its parameter"
                gradient = gradient.as_strided(view.shape, view.stride())
            found.append(gradient)
        return found


def build_optimizer(name: str, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return an optimizer for a network's parameters, with the learning rate to start with."""
    if name == "monai_novograd":
        from monai.optimizers import Novograd as MonaiNovograd  # here: MONAI takes longer to load than all the rest

        return MonaiNovograd(parameters, lr)  # type: ignore[no-any-return]
    if name == "sgd":  # Source of both numbers: the MONAI fast training tutorial since May 2022.
        return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=4e-5)
    kinds = {"novograd": Novograd, "muon": Muon, "adam": torch.optim.Adam}
    return kinds[name](parameters, lr)  # type: ignore[no-any-return]
