"""The interleaved 1F1B schedule: each rank holds several chunks of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import Unpack

from ...._arguments import checked
from ... import parallel_state
from .._execute import Options, Step, StepOptions
from .._gradient_sync import GradientSync
from ..utils import listify_model
from .common import Batch, FwdStepFunc, Model

__all__ = ["_forward_backward_pipelining_with_interleaving"]


@checked
def _forward_backward_pipelining_with_interleaving(
    forward_step_func: FwdStepFunc, batch: Batch, model: Model, *, forward_only: bool, **options: Unpack[StepOptions]
) -> list[Any]:
    """Runs all microbatches through the pipeline; in the last stage, what `loss_func` returned beside each loss.

    `model` is the list of this rank's chunks. The number of microbatches must be a multiple of that of pipeline ranks.
    `custom_sync_context_handler()` is a context in which gradients are not reduced. It is left for the last backward
    pass of each chunk; with `custom_grad_sync_func` after it, to call that with the chunk's parameters.
    `custom_param_sync_func` is called with the parameters of each chunk before the chunk before it is first used.
    `num_micro_batches_with_partial_activation_checkpoints` counts a microbatch once for each chunk. Everything else
    is as `StepOptions` says.
    """
    chunks = listify_model(model)
    sync = GradientSync(
        chunks, options.get("custom_sync_context_handler"), options.get("custom_grad_sync_func"), per_chunk=True
    )
    chosen = Options(forward_only, options, same_shapes(options))
    chosen.partial_checkpoints = options.get("num_micro_batches_with_partial_activation_checkpoints")
    chosen.param_sync = options.get("custom_param_sync_func")
    return Step("interleaved", forward_step_func, batch, chunks, chosen, sync).run()


def same_shapes(options: StepOptions) -> Callable[[int], list[tuple[int, ...]]] | None:
    """The shape that every stage sends, where the caller has said it."""
    tensor_shape = options.get("tensor_shape")
    if tensor_shape is None:
        return None
    length, *others = tensor_shape
    splits = options.get("sequence_parallel_enabled", False)
    parts = parallel_state.get_tensor_model_parallel_world_size() if splits else 1
    return lambda stage: [(length // parts, *others)]
