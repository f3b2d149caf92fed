"""The interleaved 1F1B schedule: each rank holds several chunks of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import Unpack

from ...._arguments import checked
from ... import parallel_state
from .._execute import PassSettings, Step, StepOptions
from .._gradient_sync import PipelineGradientSync
from ..utils import listify_model
from .common import Batch, FwdStepFunc, Model

__all__ = ["_forward_backward_pipelining_with_interleaving"]


@checked
def _forward_backward_pipelining_with_interleaving(
    forward_step_func: FwdStepFunc, batch: Batch, model: Model, *, forward_only: bool, **options: Unpack[StepOptions]
) -> list[Any]:
    """Run all microbatches with the interleaved schedule; the last stage returns `loss_func`'s second results.

    `model` is the list of this rank's chunks. The number of microbatches must be a multiple of the number of pipeline
    ranks. `custom_sync_context_handler()` is a context that suppresses gradient reduction. It is left for the last
    backward pass of each chunk. With `custom_grad_sync_func` it is left after that pass, and the function is called
    with the chunk's parameters. `custom_param_sync_func` is called with the parameters of each chunk before the
    preceding chunk first runs. `num_micro_batches_with_partial_activation_checkpoints` counts a microbatch once for
    each chunk. `StepOptions` describes the other options.
    """
    chunks = listify_model(model)
    sync = PipelineGradientSync(
        chunks, options.get("custom_sync_context_handler"), options.get("custom_grad_sync_func"), per_chunk=True
    )
    settings = PassSettings(forward_only, options, shapes_of_stages(options))
    settings.partial_checkpoints = options.get("num_micro_batches_with_partial_activation_checkpoints")
    settings.param_sync = options.get("custom_param_sync_func")
    return Step("interleaved", forward_step_func, batch, chunks, settings, sync).run()


def shapes_of_stages(options: StepOptions) -> Callable[[int], list[tuple[int, ...]]] | None:
    """Return a function that gives every stage the same shapes to send; None if `tensor_shape` is not given."""
    tensor_shape = options.get("tensor_shape")
    if tensor_shape is None:
        return None
    length, *others = tensor_shape
    splits = options.get("sequence_parallel_enabled", False)
    parts = parallel_state.get_tensor_model_parallel_world_size() if splits else 1
    return lambda stage: [(length // parts, *others)]
