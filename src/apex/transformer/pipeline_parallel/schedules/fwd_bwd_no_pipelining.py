"""A step without pipelining: microbatches one after the other through the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._execute import Options, Step
from .._gradient_sync import GradientSync
from .._schedule import Action, Kind
from ..utils import listify_model
from .common import Batch, FwdStepFunc

__all__ = ["forward_backward_no_pipelining"]


def forward_backward_no_pipelining(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: nn.Module | list[nn.Module],
    *,
    forward_only: bool,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs all microbatches of `batch`; what `loss_func` returned beside each loss.

    Gradients add up. Only the last microbatch has them reduced over replicas: until then a module in
    DistributedDataParallel is kept from it, and `custom_sync_context_handler()`, if given, is held.
    """
    chunks = listify_model(model)
    options = Options(forward_only, dtype, grad_scaler, disable_autocast)
    sync = GradientSync(chunks, custom_sync_context_handler)
    step = Step("no_pipelining", forward_step_func, batch, chunks, options, sync)
    return step.run(Action(Kind.FORWARD, step.microbatches - 1, 0))
