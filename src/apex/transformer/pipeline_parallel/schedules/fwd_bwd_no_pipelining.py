"""A step without pipelining: microbatches run one after the other through the whole model."""

from __future__ import annotations

from typing import Any

from typing_extensions import Unpack

from ...._arguments import checked
from .._execute import PassSettings, Step, StepOptions
from .._gradient_sync import PipelineGradientSync
from .._schedule import Action, ActionKind
from ..utils import listify_model
from .common import Batch, FwdStepFunc, Model


@checked
def forward_backward_no_pipelining(
    forward_step_func: FwdStepFunc, batch: Batch, model: Model, *, forward_only: bool, **options: Unpack[StepOptions]
) -> list[Any]:
    """Run all microbatches of `batch` and return the second result of `loss_func` for each.

    Gradients accumulate. They are reduced over replicas only in the last microbatch: before it, modules in
    DistributedDataParallel do not reduce, and `custom_sync_context_handler()`, if given, is held. The other options
    that are used are `dtype`, `disable_autocast` and `grad_scaler` (see `StepOptions`).
    """
    chunks = listify_model(model)
    sync = PipelineGradientSync(chunks, options.get("custom_sync_context_handler"))
    step = Step("no_pipelining", forward_step_func, batch, chunks, PassSettings(forward_only, options), sync)
    return step.run(Action(ActionKind.FORWARD, step.microbatches - 1, 0))
