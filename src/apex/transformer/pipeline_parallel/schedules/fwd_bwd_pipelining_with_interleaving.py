"""The interleaved 1F1B schedule: each rank holds several chunks of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import parallel_state
from .._execute import Options, execute
from .._gradient_sync import GradientSync
from .._schedule import schedule
from ..utils import get_num_microbatches, listify_model
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
    return run_chunks(
        "interleaved",
        forward_step_func,
        batch,
        listify_model(model),
        tensor_shape,
        sequence_parallel_enabled,
        Options(
            forward_only,
            dtype,
            grad_scaler,
            disable_autocast,
            deallocate_pipeline_outputs,
            param_sync=custom_param_sync_func,
        ),
        (custom_sync_context_handler, custom_grad_sync_func),
        num_micro_batches_with_partial_activation_checkpoints,
    )


def run_chunks(
    name: str,
    forward_step_func: FwdStepFunc,
    batch: Batch,
    chunks: list[nn.Module],
    tensor_shape: Sequence[int] | None,
    sequence_parallel_enabled: bool,
    options: Options,
    handlers: tuple[Any, Any],
    partial: int | None = None,
) -> list[Any]:
    """A step of any schedule in which chunks are synchronised one by one."""
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    microbatches = get_num_microbatches()
    actions = schedule(name, ranks, len(chunks), microbatches, options.forward_only)
    if tensor_shape is not None:
        length, *others = tensor_shape
        parts = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel_enabled else 1
        shape = (length // parts, *others)
        options.shapes = lambda stage: [shape]
    if partial is not None:
        ahead = 2 * (ranks - rank - 1) + (len(chunks) - 1) * ranks
        options.checkpoint_window = (partial, min(ahead, microbatches * len(chunks)) + 1)
    sync = GradientSync(chunks, *handlers, per_chunk=True)
    return execute(actions, rank, forward_step_func, batch, chunks, microbatches, options, sync)
