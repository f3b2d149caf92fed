"""Zero-bubble schedules, which compute weight gradients while a rank would otherwise be idle."""

from __future__ import annotations

from typing import Any

from typing_extensions import Unpack

from ...._arguments import checked
from ...enums import ModelType
from .._execute import PassSettings, Step, StepOptions
from .._gradient_sync import PipelineGradientSync
from ..utils import get_model_type, listify_model
from .common import Batch, FwdStepFunc, Model
from .fwd_bwd_pipelining_with_interleaving import shapes_of_stages


@checked
def forward_backward_zero_bubble(
    forward_step_func: FwdStepFunc, batch: Batch, model: Model, *, forward_only: bool, **options: Unpack[StepOptions]
) -> list[Any]:
    """Run all microbatches with ZB-H1 if `model` is one chunk, or with ZB-V if it is two.

    Takes the interleaved schedule's options. ZB-V's chunks come from `build_model(...,
    virtual_pipeline_model_parallel_size=2, placement="v")`. Reentrant checkpoints, `tensor_parallel.checkpoint` among
    them, are not supported, because their backward passes cannot be split; nor is
    `num_micro_batches_with_partial_activation_checkpoints`.
    """
    chunks = listify_model(model)
    if get_model_type(chunks[0]) == ModelType.encoder_and_decoder:
        raise ValueError("zero-bubble schedules are for models of one encoder or decoder: use the 1F1B schedule")
    if options.get("num_micro_batches_with_partial_activation_checkpoints") is not None:
        raise ValueError(
            "num_micro_batches_with_partial_activation_checkpoints does not go with zero-bubble schedules: use 1F1B"
        )
    sync = PipelineGradientSync(
        chunks, options.get("custom_sync_context_handler"), options.get("custom_grad_sync_func"), per_chunk=True
    )
    settings = PassSettings(forward_only, options, shapes_of_stages(options))
    settings.param_sync = options.get("custom_param_sync_func")
    name = "zb_h1" if len(chunks) == 1 else "zb_v"
    return Step(name, forward_step_func, batch, chunks, settings, sync).run()
