"""The interleaved 1F1B schedule: each rank holds several chunks of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import parallel_state
from .._execute import Options, Step
from .._gradient_sync import GradientSync
from ..utils import listify_model
from .common import Batch, FwdStepFunc

__all__ = ["_forward_backward_pipelining_with_interleaving"]


def _forward_backward_pipelining_with_interleaving(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: list[nn.Module],
    *,
    forward_only: bool,
    tensor_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    deallocate_pipeline_outputs: bool = False,
    async_comm: bool = False,
    sequence_parallel_enabled: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    custom_grad_sync_func: Callable[[list[Tensor]], Any] | None = None,
    custom_param_sync_func: Callable[[list[Tensor]], Any] | None = None,
    sync_batch_comm: bool = True,
    num_micro_batches_with_partial_activation_checkpoints: int | None = None,
    overlap_p2p_comm: bool = False,
    batch_p2p_comm: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Runs all microbatches through the pipeline; in the last stage, what `loss_func` returned beside each loss.

    `model` is the list of this rank's chunks. The number of microbatches must be a multiple of that of pipeline ranks.
    `custom_sync_context_handler()` is a context in which gradients are not reduced. It is left for the last backward
    pass of each chunk; with `custom_grad_sync_func` after it, to call that with the chunk's parameters.
    `custom_param_sync_func` is called with the parameters of each chunk before the chunk before it is first used.
    Everything else is as in the schedule without interleaving.
    """
    chunks = listify_model(model)
    shapes = same_shapes(tensor_shape, sequence_parallel_enabled)
    options = Options(forward_only, dtype, grad_scaler, disable_autocast, deallocate_pipeline_outputs, shapes)
    options.partial_checkpoints = num_micro_batches_with_partial_activation_checkpoints
    options.param_sync = custom_param_sync_func
    sync = GradientSync(chunks, custom_sync_context_handler, custom_grad_sync_func, per_chunk=True)
    return Step("interleaved", forward_step_func, batch, chunks, options, sync).run()


def same_shapes(
    tensor_shape: Sequence[int] | None, sequence_parallel_enabled: bool
) -> Callable[[int], list[tuple[int, ...]]] | None:
    """The shape that every stage sends, where the caller has said it."""
    if tensor_shape is None:
        return None
    length, *others = tensor_shape
    parts = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel_enabled else 1
    return lambda stage: [(length // parts, *others)]
