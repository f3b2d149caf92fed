"""The 1F1B schedule: after a warm-up each forward pass is followed by a backward pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from typing_extensions import Unpack

from ...._arguments import Count, Index, checked
from ... import parallel_state
from ...enums import ModelType
from .._execute import PassSettings, Step, StepOptions
from .._gradient_sync import PipelineGradientSync
from ..utils import get_model_type, listify_model
from .common import Batch, FwdStepFunc, Model


@checked
def get_tensor_shapes(
    rank: Index,
    model_type: ModelType,
    *,
    tensor_shape: Sequence[int],
    decoder_sequence_length: Count | None = None,
    sequence_parallel_enabled: bool = False,
) -> list[tuple[int, ...]]:
    """Return the shapes that stage `rank` sends to the next, for microbatches [sequence, batch, hidden].

    Decoder stages behind an encoder send their own output and the encoder's. With sequence parallelism each rank holds
    a part of the sequence.
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
    return [(size // parts, batch, hidden) for size in lengths]


@checked
def forward_backward_pipelining_without_interleaving(
    forward_step_func: FwdStepFunc, batch: Batch, model: Model, *, forward_only: bool, **options: Unpack[StepOptions]
) -> list[Any]:
    """Run all microbatches with the 1F1B schedule; the last stage returns the second results of `loss_func`.

    In the first stage `custom_sync_context_handler` is left before the last backward pass. In other stages it is left
    after all passes, and `custom_grad_sync_func()` is called then. `StepOptions` describes the other options, which are
    all used except `custom_param_sync_func`.
    """
    chunks = listify_model(model)
    if len(chunks) != 1:
        raise RuntimeError(f"`model` must be one module, got a list of {len(chunks)}: use the interleaved schedule")
    tensor_shape, shapes = options.get("tensor_shape"), None
    if tensor_shape is not None:
        shapes = functools.partial(
            get_tensor_shapes,
            model_type=get_model_type(chunks[0]),
            tensor_shape=tensor_shape,
            decoder_sequence_length=options.get("decoder_sequence_length"),
            sequence_parallel_enabled=options.get("sequence_parallel_enabled", False),
        )
    settings = PassSettings(forward_only, options, shapes)
    settings.partial_checkpoints = options.get("num_micro_batches_with_partial_activation_checkpoints")
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    sync = PipelineGradientSync(
        chunks, options.get("custom_sync_context_handler"), options.get("custom_grad_sync_func"), early=first
    )
    return Step("1f1b", forward_step_func, batch, chunks, settings, sync).run()
