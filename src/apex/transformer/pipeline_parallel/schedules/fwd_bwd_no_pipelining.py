"""A step without pipelining: microbatches one after the other through the whole model."""

from __future__ import annotations

from typing import Any

from typing_extensions import Unpack

from ...._arguments import checked
from .._execute import Options, Step, StepOptions
from .._gradient_sync import GradientSync
from .._schedule import Action, Kind
from ..utils import listify_model
from .common import Batch, FwdStepFunc, Model


@checked
def forward_backward_no_pipelining(
    forward_step_func: FwdStepFunc, batch: Batch, model: Model, *, forward_only: bool, **options: Unpack[StepOptions]
) -> list[Any]:
    """Runs all microbatches of `batch`; what `loss_func` returned beside each loss.

    Gradients add up. Only the last microbatch has them reduced over replicas: until then a module in
    DistributedDataParallel is kept from it, and `custom_sync_context_handler()`, if given, is held. Other options that
    count here are `dtype`, `disable_autocast` and `grad_scaler` (see `StepOptions`).
    """
    chunks = listify_model(model)
    sync = GradientSync(chunks, options.get("custom_sync_context_handler"))
    step = Step("no_pipelining", forward_step_func, batch, chunks, Options(forward_only, options), sync)
    return step.run(Action(Kind.FORWARD, step.microbatches - 1, 0))
