"""Passes over all gradients: norm, scaling with overflow check, clipping; ours and PyTorch's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..contrib.clip_grad import clip_grad_norm_
from ..ops.multi_tensor import l2norm, scale
from .problems import Algorithm, Maker, Running, gradients

# Nearly 1, so that gradients scaled or clipped thousands of times stay in range.
FACTOR = 1 - 2**-12


def _measuring(norm: Callable[[list[Tensor]], Tensor]) -> Maker:
    def make(params: list[nn.Parameter]) -> Running:
        grads, found = gradients(params), list[Tensor]()

        def step() -> None:
            found[:] = [norm(grads)]

        return Running(step, lambda: [grads, found])

    return make


def _scaling(start: Callable[[list[Tensor], Tensor], Callable[[], object]]) -> Maker:
    """Return a function that prepares a step: `start` returns one that scales by FACTOR and flags non-finite ones."""

    def make(params: list[nn.Parameter]) -> Running:
        grads = gradients(params)
        flag = torch.zeros(1, device=grads[0].device)
        step = start(grads, flag)

        def results() -> list[list[Tensor]]:
            """Return gradients and flag, and the flag after a step with an overflow."""
            scaled, clean_flag = [grad.clone() for grad in grads], flag.clone()
            grads[-1].view(-1)[-1] = math.inf
            step()
            return [scaled, [clean_flag], [flag]]

        return Running(step, results)

    return make


def _torch_scaling(grads: list[Tensor], flag: Tensor) -> Callable[[], object]:
    """Return a step that scales like torch.amp.GradScaler."""
    factor = torch.full_like(flag, FACTOR)
    return lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, factor)


def _foreach_scaling(grads: list[Tensor], flag: Tensor) -> Callable[[], object]:
    def step() -> None:
        largest = torch.stack(torch._foreach_norm(grads, math.inf))
        torch._foreach_mul_(grads, FACTOR)
        flag.copy_(~torch.isfinite(largest).all())

    return step


def _clipping(clip: Callable[..., Tensor]) -> Maker:
    """Return a function that prepares a step, which clips to a smaller norm at every call to have something to clip."""

    def make(params: list[nn.Parameter]) -> Running:
        limit, found = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients(params))), list[Tensor]()

        def step() -> None:
            nonlocal limit
            limit *= FACTOR
            found[:] = [clip(params, limit)]

        return Running(step, lambda: [gradients(params), found])

    return make


_NORM = _measuring(lambda grads: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))))
_SCALE = _scaling(_foreach_scaling)
_TWO, _THREE = (torch.float32,) * 2, (torch.float32,) * 3
PASSES = (
    Algorithm(
        "l2norm", 4, _measuring(lambda grads: l2norm(grads)[0]), _NORM, {"torch_foreach": _NORM}, result_dtypes=_TWO
    ),
    Algorithm(
        "scale+overflow",
        8,
        _scaling(lambda grads, flag: lambda: scale(grads, grads, FACTOR, overflow=flag)),
        _SCALE,
        {"torch": _scaling(_torch_scaling), "torch_foreach": _SCALE},
        result_dtypes=_THREE,
    ),
    Algorithm(
        "clip_grad_norm",
        12,
        _clipping(clip_grad_norm_),
        _clipping(nn.utils.clip_grad_norm_),
        {"torch": _clipping(functools.partial(nn.utils.clip_grad_norm_, foreach=True))},
        result_dtypes=_TWO,
    ),
)
