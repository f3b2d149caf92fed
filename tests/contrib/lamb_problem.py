"""A small training problem whose gradients are the same however many processes share them, and its solution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from apex.optimizers import FusedLAMB
from tests.optimizers.references import Lamb
from tests.parallel.processes import assert_same_everywhere

# Sizes that no number of processes divides; parameters that lie in several shards, and shards with many parameters.
SHAPES = ((7, 5), (13,), (3, 4, 2), (1,), (129,), (), (0,), (2, 3))
# How many gradients are averaged: the processes share them.
PARTS = 4
HYPER: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "max_grad_norm": 3.0}
STEPS = 3
# Options of FusedLAMB and of the formula too; the others only say how the work is shared.
SHARED = ("lr", "betas", "eps", "bias_correction", "adam_w_mode", "grad_averaging", "use_nvlamb", "max_grad_norm")


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """With decay and without."""
    return [{"params": list(params[:4]), "weight_decay": 0.1}, {"params": list(params[4:]), "weight_decay": 0.0}]


def part(step: int, index: int, params: Sequence[Tensor]) -> list[Tensor]:
    """One of the gradients that are averaged: multiples of 1/64, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 * step + index)
    return [torch.randint(-99, 100, param.shape, generator=generator) / 64 for param in params]


def averaged(step: int, params: Sequence[Tensor]) -> list[Tensor]:
    parts = [part(step, index, params) for index in range(PARTS)]
    return [sum(each) / PARTS for each in zip(*parts, strict=True)]


def share(step: int, params: Sequence[Tensor]) -> list[Tensor]:
    """This process's gradient."""
    count, rank = dist.get_world_size(), dist.get_rank()
    parts = [part(step, index, params) for index in range(rank * PARTS // count, (rank + 1) * PARTS // count)]
    return [sum(each) / len(parts) for each in zip(*parts, strict=True)]


def backward(params: Sequence[Tensor], gradients: Sequence[Tensor], scale: Any = 1.0) -> None:
    """Adds these to the gradients, times the scale."""
    sum((param.float() * gradient).sum() for param, gradient in zip(params, gradients, strict=True)).mul(
        scale
    ).backward()


def distributed_step(optimizer: DistributedFusedLAMB, params: Sequence[Tensor], step: int) -> None:
    optimizer.zero_grad()
    backward(params, share(step, params))
    optimizer.complete_reductions()
    optimizer.step()


def solved(
    make: Callable[..., torch.optim.Optimizer],
    dtype: torch.dtype,
    steps: int,
    gradients: Callable[[int, Sequence[Tensor]], list[Tensor]] = averaged,
    start: Sequence[Tensor] | None = None,
    **options: Any,
) -> list[Tensor]:
    """The parameters after training in one process, with all gradients at once."""
    params = [nn.Parameter(param.detach().to(dtype)) for param in (start or parameters())]
    optimizer = make(groups(params), **{**HYPER, **options})
    for step in range(steps):
        for param, gradient in zip(params, gradients(step, params), strict=True):
            param.grad = gradient.to(dtype)
        optimizer.step()
    return [param.detach() for param in params]


@functools.cache
def solutions(steps: int, **shared: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The formula's in float64, and FusedLAMB's."""
    return solved(Lamb, torch.float64, steps, **shared), solved(FusedLAMB, torch.float32, steps, **shared)


def assert_solved(params: Sequence[Tensor], steps: int, **options: Any) -> None:
    """As the formula in float64 and as FusedLAMB have it; the same in all processes."""
    exact, fused = solutions(steps, **{name: options[name] for name in SHARED if name in options})
    for index, (found, truth, other) in enumerate(zip(params, exact, fused, strict=True)):
        torch.testing.assert_close(found.detach().double(), truth, rtol=1e-5, atol=2e-6, msg=f"parameter {index}")
        torch.testing.assert_close(found.detach(), other, rtol=1e-5, atol=1e-6, msg=f"parameter {index}")
    assert_same_everywhere([param for param in params if param.numel()])


def made(params: Sequence[nn.Parameter], **options: Any) -> DistributedFusedLAMB:
    return DistributedFusedLAMB(groups(params), **{**HYPER, **options})
