"""Microbatch sizes, model unwrapping, timers, printing and attention masks for training scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..._arguments import HasGroups, Index, checked
from ..._distributed import collectives
from ..._distributed.experts import is_expert
from ...ops._library import compute_dtype
from ...parallel import DistributedDataParallel as ApexDistributedDataParallel
from .. import parallel_state
from .._groups.device import parameter_device
from ..enums import ModelType
from ..microbatches import NumMicroBatchesCalculator, build_num_microbatches_calculator
from ..tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from ._timers import _Timers

# Wrappers that reduce gradients over replicas themselves.
REPLICATED = (DistributedDataParallel, ApexDistributedDataParallel)

# Clients import this name again after `setup_microbatch_calculator` and read the calculator from it.
_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None
_timers: _Timers | None = None
_autoresume: Any = None


def setup_microbatch_calculator(*args: Any, **kwargs: Any) -> None:
    """Set the global batch size and the microbatch size, once.

    Takes the arguments of `apex.transformer.microbatches.build_num_microbatches_calculator`: rank, rampup_batch_size,
    global_batch_size, micro_batch_size and data_parallel_size.
    """
    assert _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None, "num microbatches calculator is already initialized."
    _reconfigure_microbatch_calculator(*args, **kwargs)


def _reconfigure_microbatch_calculator(*args: Any, **kwargs: Any) -> None:
    """Set or replace the global batch size and the microbatch size."""
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = build_num_microbatches_calculator(*args, **kwargs)


def _calculator() -> Any:
    calculator = _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    assert calculator is not None, "num microbatches calculator is not set: call setup_microbatch_calculator first"
    return calculator


def get_micro_batch_size() -> int:
    """Return the number of samples of a microbatch."""
    return _calculator().micro_batch_size


def get_num_microbatches() -> int:
    """Return the number of microbatches of a step."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Return the number of samples that all ranks together process in a step."""
    return _calculator().get_current_global_batch_size()


@checked
def update_num_microbatches(consumed_samples: Index, consistency_check: bool = True) -> None:
    """Update the number of microbatches of a growing batch before a step, given the number of samples seen so far."""
    _calculator().update(consumed_samples, consistency_check)


@checked
def get_kth_microbatch(batch: Any, k: Index) -> Any:
    """Return the k-th microbatch of every tensor of a list or tuple, as a list; return other batches unchanged."""
    if not isinstance(batch, (list, tuple)):
        return batch
    size = get_micro_batch_size()
    slices = []
    for tensor in batch:
        if not getattr(tensor, "shape", ()):
            raise TypeError(f"batch must hold tensors [samples, ...], got {tensor!r:.80}")
        assert tensor.shape[0] >= (k + 1) * size, (
            f"microbatch {k} of {size} samples needs a batch of {(k + 1) * size}, got {tensor.shape[0]}"
        )
        slices.append(tensor[k * size : (k + 1) * size])
    return slices


def _split_batch_into_microbatch(
    batch: list[Tensor], *, _micro_batch_size: int | None = None, _global_batch_size: int | None = None
) -> Any:
    """Yield the microbatches of a list of tensors in order."""
    size = get_micro_batch_size() if _micro_batch_size is None else _micro_batch_size
    samples = get_current_global_batch_size() if _global_batch_size is None else _global_batch_size
    for first in range(0, samples, size):
        yield [tensor[first : first + size] for tensor in batch]


@checked
def listify_model(model: nn.Module | list[nn.Module]) -> list[nn.Module]:
    """Return a list of model chunks; a single module becomes a list of one."""
    return model if isinstance(model, list) else list(model) if isinstance(model, tuple) else [model]


@checked
def unwrap_model(model: Any, module_instances: type | tuple[type, ...] | None = None) -> Any:
    """Remove wrappers from a module or a list of modules.

    These are torch's and apex's DistributedDataParallel and the Booster's wrappers, or the given ones.
    """
    if isinstance(model, list):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    instances: Any = REPLICATED if module_instances is None else module_instances
    while isinstance(model, instances) or (module_instances is None and getattr(type(model), "_is_boosted", False)):
        model = model.module
    return model


@checked
def get_model_type(model: nn.Module) -> ModelType:
    """Return the `model_type` that `build_model` set on the module; by default an encoder or decoder."""
    return getattr(unwrap_model(model, REPLICATED), "model_type", ModelType.encoder_or_decoder)


@checked
def param_is_not_shared(param: Tensor) -> bool:
    """Return True if only one pipeline stage holds the parameter; copies are marked `shared` or `shared_embedding`."""
    return not getattr(param, "shared", False) and not getattr(param, "shared_embedding", False)


@checked
def calc_params_l2_norm(model: nn.Module | list[nn.Module], bf16: bool) -> float:
    """Return the L2 norm of all parameters of the model, over all processes that hold parts of it.

    Each parameter's norm is computed in float32, or in float64 for float64, for either value of `bf16`. A parameter
    that several stages hold counts once, in the first stage, and each expert (`allreduce = False`) counts once.
    """
    params = [
        param
        for chunk in listify_model(model)
        for param in chunk.parameters()
        if param_is_not_tensor_parallel_duplicate(param)
        and (param_is_not_shared(param) or parallel_state.is_pipeline_first_stage(ignore_virtual=True))
    ]
    device = params[0].device if params else parameter_device()
    total = 0.0
    for experts, group in (
        (False, parallel_state.get_model_parallel_group()),
        (True, parallel_state.get_expert_tensor_model_pipeline_parallel_group()),
    ):
        square = torch.zeros(1, dtype=torch.float64, device=device)  # on all ranks, whatever their parameters are
        for param in params:
            if is_expert(param) == experts:
                square += torch.linalg.vector_norm(param.detach(), dtype=compute_dtype(param)).square()
        collectives.all_reduce(square, group, "the norm of all parameters").wait()
        total += square.item()
    return total**0.5


@checked
def average_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Return the means of the given losses over data-parallel and context-parallel ranks as one vector."""
    if not losses or any(loss.numel() != 1 for loss in losses):
        raise ValueError(f"losses must be tensors of one element each, got {[list(loss.shape) for loss in losses]}")
    averaged = torch.cat([loss.detach().clone().view(1) for loss in losses])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if dist.get_world_size(group) > 1:
        collectives.all_reduce(averaged, group, "the mean of losses over data-parallel ranks", True).wait()
    return averaged


def get_timers() -> _Timers:
    """Return the timers that `_set_timers` made."""
    assert _timers is not None, "timers is not initialized."
    return _timers


def _set_timers() -> None:
    """Make the timers."""
    global _timers
    assert _timers is None, "timers is already initialized."
    _timers = _Timers()


def get_autoresume() -> Any:
    """Return None: auto-resume (a cluster's scheduler ends a job early) is not supported."""
    return _autoresume


def is_last_rank() -> bool:
    """Return True in the last process."""
    return dist.get_rank() == dist.get_world_size() - 1


def print_rank_0(message: Any) -> None:
    """Print in the first process, or if there is only one."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


def print_rank_last(message: Any) -> None:
    """Print in the last process, or if there is only one."""
    if not dist.is_initialized() or is_last_rank():
        print(message, flush=True)


def report_memory(name: Any) -> None:
    """Print the device memory in use, on data-parallel rank 0 of each group."""
    words = f"{name} memory (MB)"
    if torch.cuda.is_available():
        for key in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
            words += f" | {key.replace('memory_', '').replace('_', ' ')}: {getattr(torch.cuda, key)() / 2**20:.1f}"
    if parallel_state.is_unitialized() or parallel_state.get_data_parallel_rank() == 0:
        print(f"[rank {dist.get_rank() if dist.is_initialized() else 0}] {words}", flush=True)


@checked
def print_params_min_max_norm(optimizer: HasGroups, iteration: int) -> None:
    """Print minimum, maximum and L2 norm of every parameter of an optimizer, as one message per process."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    lines = ["iteration, rank, index, tensor-model-parallel, min, max, norm"]
    index = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            index += 1
            data, split = param.detach(), int(getattr(param, "tensor_model_parallel", False))
            lowest, highest, norm = data.min().item(), data.max().item(), data.float().norm().item()
            lines.append(f"{iteration:7d}, {rank:4d}, {index:4d}, {split:2d}, {lowest:.6E}, {highest:.6E}, {norm:.6E}")
    print("\n".join(lines), flush=True)


@checked
def get_ltor_masks_and_position_ids(
    data: Tensor, eod_token: int, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention mask, loss mask and position ids of a left-to-right model for token ids [batch, sequence].

    The attention mask, bool [1 or batch, 1, sequence, sequence], is True for hidden tokens: later ones and, with
    `reset_attention_mask`, tokens of earlier documents, which end with `eod_token`. The loss mask, float32, is 0 at
    `eod_token` if `eod_mask_loss`. With `reset_position_ids` positions restart after each `eod_token`.
    """
    if data.dim() != 2:
        raise ValueError(f"data must be [batch, sequence], got shape {list(data.shape)}")
    batch, length = data.shape
    indices = torch.arange(length, dtype=torch.long, device=data.device)
    ends = data == eod_token
    # A token's document is the number of `eod_token`s before it; an `eod_token` belongs to the document that it ends.
    documents = ends.cumsum(1) - ends.long()
    hidden = (indices[None, :] > indices[:, None])[None]
    if reset_attention_mask:
        hidden = hidden | (documents[:, None, :] != documents[:, :, None])
    loss_mask = torch.ones(data.shape, dtype=torch.float, device=data.device)
    if eod_mask_loss:
        loss_mask[ends] = 0.0
    positions = indices[None].expand(batch, length)
    if reset_position_ids:
        starts = torch.where(torch.roll(ends, 1, 1) & (indices > 0), indices, 0)
        positions = indices - starts.cummax(1).values
    return hidden[:, None], loss_mask, positions.contiguous()
