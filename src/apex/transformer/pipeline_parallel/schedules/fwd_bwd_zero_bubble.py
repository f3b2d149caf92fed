"""Zero-bubble schedules: gradients of parameters are computed when a rank would otherwise wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...enums import ModelType
from .._execute import Options, Step
from .._gradient_sync import GradientSync
from ..utils import get_model_type, listify_model
from .common import Batch, FwdStepFunc
from .fwd_bwd_pipelining_with_interleaving import same_shapes

__all__ = ["forward_backward_zero_bubble"]


def forward_backward_zero_bubble(
    forward_step_func: FwdStepFunc,
    batch: Batch,
    model: nn.Module | list[nn.Module],
    *,
    forward_only: bool,
    tensor_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    grad_scaler: Any = None,
    disable_autocast: bool = False,
    deallocate_pipeline_outputs: bool = False,
    sequence_parallel_enabled: bool = False,
    custom_sync_context_handler: Callable[[], Any] | None = None,
    custom_grad_sync_func: Callable[[list[Tensor]], Any] | None = None,
    custom_param_sync_func: Callable[[list[Tensor]], Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """As the interleaved schedule, with ZB-H1 where the model is one chunk per rank and ZB-V where it is two.

    Chunks of ZB-V are made with `build_model(..., virtual_pipeline_model_parallel_size=2, placement="v")`. Reentrant
    checkpoints, `tensor_parallel.checkpoint` among them, cannot be used: their backward passes cannot be divided.
    """
    chunks = listify_model(model)
    if get_model_type(chunks[0]) == ModelType.encoder_and_decoder:
        raise ValueError("zero-bubble schedules are for models of one encoder or decoder: use the 1F1B schedule")
    shapes = same_shapes(tensor_shape, sequence_parallel_enabled)
    options = Options(forward_only, dtype, grad_scaler, disable_autocast, deallocate_pipeline_outputs, shapes)
    options.param_sync = custom_param_sync_func
    sync = GradientSync(chunks, custom_sync_context_handler, custom_grad_sync_func, per_chunk=True)
    name = "zb_h1" if len(chunks) == 1 else "zb_v"
    return Step(name, forward_step_func, batch, chunks, options, sync).run()
