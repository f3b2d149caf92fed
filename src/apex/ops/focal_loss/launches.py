"""From tensors to kernel launches: launch configuration, allocation, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _device
from .reference import FocalSpec

if TYPE_CHECKING:
    from .._launch import BoundLaunch

# 8x76725x80 on an H200, microseconds: bfloat16 loss in 68.4 with 32 programs per multiprocessor (16: 71.1) and as long
# with other blocks; groups of 16 elements take 107.
BLOCK = 1024
PER_THREAD = 8
PROGRAMS_PER_MULTIPROCESSOR = 32
SUM_BLOCK = 1024


def vector(element_size: int, want_loss: bool) -> int:
    """Elements that share a target where they divide the classes: 16 bytes, but a float32 loss is no faster for it."""
    return 8 if want_loss else 16 // element_size


@functools.lru_cache(maxsize=4096)
def _pass_plan(
    total: int,
    columns: int,
    spec: FocalSpec,
    want_loss: bool,
    want_grad: bool,
    scaled: bool,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    facts: _device.DeviceFacts,
) -> tuple[BoundLaunch, BoundLaunch, int]:
    """The pass over the logits, the sum of its partial losses, and how many of them there are."""
    from . import kernels  # at first use: importing apex needs no Triton

    lanes = vector(dtypes[0].itemsize, want_loss)
    blocks = max(1, total // BLOCK)
    programs = min(blocks, PROGRAMS_PER_MULTIPROCESSOR * facts.multiprocessors) if want_loss else blocks
    main = kernels.focal_loss_pass.bind(
        (programs,),
        (total, spec.alpha, spec.gamma, spec.smoothing / 2),
        (
            columns,
            spec.classes,
            spec.gamma == 2,
            want_loss,
            want_grad,
            scaled,
            BLOCK // lanes,
            lanes,
            total % BLOCK == 0,
        ),
        device=device,
        num_warps=BLOCK // PER_THREAD // facts.warp_size,
    )
    sum_losses = kernels.focal_loss_sum.bind((1,), (programs,), (SUM_BLOCK,), device=device, num_warps=8)
    return main, sum_losses, programs


def _plan(
    logits: Tensor,
    targets: Tensor,
    num_positives: Tensor,
    spec: FocalSpec,
    want_loss: bool,
    want_grad: bool,
    grad_loss: Tensor | None = None,
) -> tuple[BoundLaunch, BoundLaunch, int]:
    dtypes = [tensor.dtype for tensor in (logits, targets, num_positives, grad_loss) if tensor is not None]
    return _pass_plan(
        logits.numel(),
        logits.shape[-1],
        spec,
        want_loss,
        want_grad,
        grad_loss is not None,
        tuple(dtypes),
        logits.device,
        _device.facts(logits.device),
    )


def triton_forward(
    logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec, want_grad: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Loss and, if wanted, the gradient before it is divided by the number of positives; logits have elements."""
    logits, targets = logits.contiguous(), targets.contiguous()
    main, sum_losses, programs = _plan(logits, targets, num_positives, spec, True, want_grad)
    grad = torch.empty_like(logits) if want_grad else None
    partials = torch.empty(programs, dtype=torch.float32, device=logits.device)
    main(logits, targets, grad, partials, None, None)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    sum_losses(partials, num_positives, loss)
    return loss, grad


def triton_backward(
    grad_loss: Tensor, logits: Tensor, targets: Tensor, num_positives: Tensor, spec: FocalSpec
) -> Tensor:
    """The gradient of logits that have elements."""
    logits, targets = logits.contiguous(), targets.contiguous()
    main, _, _ = _plan(logits, targets, num_positives, spec, False, True, grad_loss)
    grad = torch.empty_like(logits)
    main(logits, targets, grad, None, grad_loss, num_positives)
    return grad
