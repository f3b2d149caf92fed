"""Functions that all schedules share: construction of a rank's model chunks, and the passes of one microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ...._arguments import Count, checked
from ...._distributed.experts import hide_experts_from_ddp
from ...._distributed.groups import own_group
from ....contrib.layer_norm import FastLayerNorm
from ....normalization import FusedLayerNorm
from ... import parallel_state
from ..._groups.device import parameter_device
from ...context_parallel._parts import size_and_rank
from ...enums import ModelType
from ...log_util import get_transformer_logger
from ...tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from .._schedule import Placement
from .._steps import (
    Batch,
    FwdStepFunc,
    LossFunc,
    Model,
    backward_step,
    custom_backward,
    forward_step,
    free_output_tensor,
)
from ..utils import listify_model

logger = get_transformer_logger(__name__)

__all__ = [
    "Batch",
    "FwdStepFunc",
    "LossFunc",
    "Model",
    "backward_step",
    "build_model",
    "custom_backward",
    "forward_step",
    "free_output_tensor",
]


@checked
def build_model(
    model_provider_func: Callable[..., nn.Module],
    wrap_with_ddp: bool = True,
    virtual_pipeline_model_parallel_size: Count | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
    *args: Any,
    placement: str = "loop",
    **kwargs: Any,
) -> list[nn.Module]:
    """Return this rank's part of a model as a list of `virtual_pipeline_model_parallel_size` chunks, by default one.

    `model_provider_func(*args, **kwargs, pre_process=..., post_process=...)` makes a chunk. `pre_process` is True for
    the first stage, which has the embeddings; `post_process` is True for the last, which has the head. For an
    encoder-decoder the function also gets `add_encoder` and `add_decoder`. Chunks are moved to the device and, with
    `wrap_with_ddp`, wrapped in torch's DistributedDataParallel over data-parallel and context-parallel ranks.
    `placement="v"` is for the zero-bubble schedule ZB-V: it takes two chunks and puts the last stage on the first rank.
    """
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = virtual_pipeline_model_parallel_size or 1
    if placement not in ("loop", "v") or (placement == "v" and chunks != 2):
        raise ValueError(
            'placement must be "loop", or "v" with virtual_pipeline_model_parallel_size=2, got '
            f"{placement!r} with {virtual_pipeline_model_parallel_size}"
        )
    has_both = model_type == ModelType.encoder_and_decoder
    if has_both and virtual_pipeline_model_parallel_size is not None and ranks > 1:
        raise ValueError(f"an encoder-decoder cannot be interleaved, got {virtual_pipeline_model_parallel_size} chunks")
    contexts, _ = size_and_rank(None)
    if has_both and contexts > 1:
        raise ValueError(f"an encoder-decoder cannot be split over {contexts} context-parallel ranks")
    stages = Placement(ranks, chunks, placement == "v")
    previous_chunk = parallel_state.get_virtual_pipeline_model_parallel_rank()
    model = []
    try:
        for chunk in range(chunks):
            if virtual_pipeline_model_parallel_size is not None:
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            stage = stages.stage(rank, chunk)
            parts: dict[str, bool] = {"pre_process": stage == 0, "post_process": stage == stages.stages - 1}
            if has_both:
                parts = _parts_of_both(rank, ranks)
            module = model_provider_func(*args, **kwargs, **parts)
            if not isinstance(module, nn.Module):
                raise TypeError(f"model_provider_func must return a torch.nn.Module, not {module!r:.80}")
            module.model_type = model_type  # type: ignore[assignment]
            model.append(module)
    finally:
        if virtual_pipeline_model_parallel_size is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(previous_chunk)
    for module in model:
        for param in module.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(param)
        module.to(parameter_device())
    _report_parameters(model, rank)
    if not wrap_with_ddp:
        return model
    group = own_group(parallel_state.get_data_parallel_group(with_context_parallel=True))
    for module in model:
        hide_experts_from_ddp(module)
    return [nn.parallel.DistributedDataParallel(module, process_group=group) for module in model]


def _parts_of_both(rank: int, ranks: int) -> dict[str, bool]:
    """Return the parts of an encoder-decoder that a stage has; each half has its own first and last stage."""
    if ranks == 1:
        return {"pre_process": True, "post_process": True, "add_encoder": True, "add_decoder": True}
    split = parallel_state.get_pipeline_model_parallel_split_rank()
    if split is None:
        raise RuntimeError("Split rank needs to be specified for model with both encoder and decoder.")
    return {
        "pre_process": rank in (0, split),
        "post_process": rank in (split - 1, ranks - 1),
        "add_encoder": parallel_state.is_pipeline_stage_before_split(),
        "add_decoder": parallel_state.is_pipeline_stage_after_split(),
    }


def _report_parameters(model: list[nn.Module], pipeline: int) -> None:
    if parallel_state.model_parallel_is_initialized() and parallel_state.get_data_parallel_rank() == 0:
        count = sum(param.numel() for module in model for param in module.parameters())
        tensor = parallel_state.get_tensor_model_parallel_rank()
        logger.info(f"{count} parameters on (tensor, pipeline) model parallel rank ({tensor}, {pipeline})")


def _get_params_for_weight_decay_optimization(
    model: Model, *, no_weight_decay_modules: Sequence[type] | None = None
) -> list[dict[str, Any]]:
    """Return two optimizer groups: parameters with weight decay, and biases and layer norms without it.

    A parameter that several modules share is in the group of the first.
    """
    layer_norms = (FusedLayerNorm, FastLayerNorm, nn.LayerNorm)
    without = layer_norms if no_weight_decay_modules is None else tuple(no_weight_decay_modules)
    seen: set[nn.Parameter] = set()
    decaying: dict[str, Any] = {"params": []}
    others: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for chunk in listify_model(model):
        for module in chunk.modules():
            for name, param in module._parameters.items():
                if param is not None and param not in seen:
                    seen.add(param)
                    group = others if isinstance(module, without) or name == "bias" else decaying
                    group["params"].append(param)
    return [decaying, others]
