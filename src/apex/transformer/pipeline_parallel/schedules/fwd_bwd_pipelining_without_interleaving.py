"""The 1F1B schedule: after a warm-up each forward pass is followed by a backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ... import parallel_state
from ...enums import ModelType
from .._execute import Options, Step
from .._gradient_sync import GradientSync
from ..utils import get_model_type, listify_model
from .common import Batch, FwdStepFunc

__all__ = ["forward_backward_pipelining_without_interleaving", "get_tensor_shapes"]


def get_tensor_shapes(
    rank: int,
    model_type: ModelType,
    *,
    tensor_shape: Sequence[int],
    decoder_sequence_length: int | None = None,
    sequence_parallel_enabled: bool = False,
) -> list[tuple[int, ...]]:
    """The shapes of the tensors that stage `rank` sends to the next, for microbatches [sequence, batch, hidden].

    Decoder stages behind an encoder send their own output and the encoder's. With sequence parallelism each rank has
    its part of the sequence.
    """
    assert len(tensor_shape) == 3, (
        f"`tensor_shape` should be [sequence_length, micro_batch_size, hidden_size] but {tuple(tensor_shape)}"
    )
    length, batch, hidden = tensor_shape
    lengths = [length]
    if model_type == ModelType.encoder_and_decoder and not parallel_state.is_pipeline_stage_before_split(rank):
        if decoder_sequence_length is None:
            raise ValueError("`decoder_sequence_length` is required for `ModelType.encoder_and_decoder`")
        lengths = [decoder_sequence_length, length]
    parts = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel_enabled else 1
    return [(each // parts, batch, hidden) for each in lengths]


def forward_backward_pipelining_without_interleaving(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: nn.Module | list[nn.Module],
    *,
    forward_only: bool,
    tensor_shape: Sequence[int] | None = None,
    decoder_sequence_length: int | None = None,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    deallocate_pipeline_outputs: bool = False,
    async_comm: bool = False,
    sequence_parallel_enabled: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    custom_grad_sync_func: Callable[[], Any] | None = None,
    sync_batch_comm: bool = True,
    num_micro_batches_with_partial_activation_checkpoints: int | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs all microbatches through the pipeline; in the last stage, what `loss_func` returned beside each loss.

    - `tensor_shape`: the shape of a microbatch between stages, checked where it is given and found out where it is not.
    - `deallocate_pipeline_outputs`: gives back the memory of outputs once they are sent.
    - `custom_sync_context_handler`: a context in which gradients are not reduced. It is left before the last backward
      pass in the first stage, after all passes in others, where `custom_grad_sync_func()` is called then.
      Modules in DistributedDataParallel need none.
    - `num_micro_batches_with_partial_activation_checkpoints`: of as many microbatches as a stage has under way, how
      many it checkpoints only in part; `forward_step_func` gets a third argument, False for these.

    Messages never wait for a whole device; `async_comm` and `sync_batch_comm` change nothing.
    """
    chunks = listify_model(model)
    if len(chunks) != 1:
        raise RuntimeError(f"`model` must be one module, got a list of {len(chunks)}: use the interleaved schedule")
    shapes = None
    if tensor_shape is not None:
        shapes = functools.partial(
            get_tensor_shapes,
            model_type=get_model_type(chunks[0]),
            tensor_shape=tensor_shape,
            decoder_sequence_length=decoder_sequence_length,
            sequence_parallel_enabled=sequence_parallel_enabled,
        )
    options = Options(forward_only, dtype, grad_scaler, disable_autocast, deallocate_pipeline_outputs, shapes)
    options.partial_checkpoints = num_micro_batches_with_partial_activation_checkpoints
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    sync = GradientSync(chunks, custom_sync_context_handler, custom_grad_sync_func, early=first)
    return Step("1f1b", forward_step_func, batch, chunks, options, sync).run()
