"""The gradient reductions that remain after the last backward pass of a step, in one call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._arguments import checked
from .._distributed import collectives, exchange
from .._distributed.experts import is_expert
from . import parallel_state
from .moe._routing import get_updated_expert_bias
from .moe.router import TopKRouter
from .pipeline_parallel.utils import REPLICATED


@checked
def finalize_model_grads(model: nn.Module | Sequence[nn.Module], *, data_parallel: bool | None = None) -> None:
    """Make the gradients of a split model equal to the whole model's: call it before the optimizer's step.

    - Parameters that see a part of the sequence (`sequence_parallel_enabled`) get the sum over tensor-parallel ranks.
    - Embeddings that several pipeline stages hold (`shared_embedding`, `shared_position_embedding`) get the sum over
      these stages. If two chunks of one process are first and last stage, `shared_embedding` is summed within the
      process.
    - All dense parameters get the mean over data-parallel and context-parallel ranks.
    - Experts (`allreduce = False`) get the sum over the ranks that hold the same experts, divided by the number of
      data-parallel times context-parallel ranks. An expert's gradient is already a sum over the tokens of all ranks
      that send it tokens.

    Routers with an expert bias (`apex.transformer.moe.TopKRouter`) move it by the tokens of all ranks since the last
    call.

    `model` may be a list of a stage's chunks. `main_grad` is used if a parameter has one, otherwise `grad`. If layers
    without gradient_accumulation_fusion left a `grad`, it is added to `main_grad`. Afterwards `grad` is `main_grad` if
    that has the parameter's dtype, for optimizers that only read `grad`. Modules in torch's or apex's
    DistributedDataParallel have already averaged `grad` over replicas, so it is not averaged again. With
    `data_parallel=False` nothing is averaged, for optimizers that do it themselves (ZeRO). DDP and ZeRO leave
    experts out, so experts are always reduced here. Every process must call this function.
    """
    chunks: list[nn.Module] = [model] if isinstance(model, nn.Module) else list(model)
    for chunk in chunks:
        _check_experts(chunk)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    _merge_gradients(parameters)
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    _sum_over(tensor_group, [p for p in parameters if getattr(p, "sequence_parallel_enabled", False)])
    of_chunks = (
        [p for p in chunk.parameters() if p.requires_grad and getattr(p, "shared_embedding", False)] for chunk in chunks
    )
    shared = [embeddings for embeddings in of_chunks if embeddings]
    if len(shared) == 2:
        _sum_within(*shared)
    elif parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
        _sum_over(parallel_state.get_embedding_group(), (p for embeddings in shared for p in embeddings))
    if parallel_state.is_rank_in_position_embedding_group():
        positions = [parameter for parameter in parameters if getattr(parameter, "shared_position_embedding", False)]
        _sum_over(parallel_state.get_position_embedding_group(), positions)
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = [parameter for parameter in parameters if is_expert(parameter)]
    _sum_over(parallel_state.get_expert_data_parallel_group(), experts, dist.get_world_size(replicas))
    _update_routers([module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)])
    if data_parallel is False:
        return
    reduced = {id(p) for chunk in chunks if isinstance(chunk, REPLICATED) for p in chunk.parameters()}
    unreduced = [
        p for p in parameters if data_parallel or id(p) not in reduced or getattr(p, "main_grad", None) is not None
    ]
    dense = [parameter for parameter in unreduced if not is_expert(parameter)]
    _sum_over(replicas, dense, dist.get_world_size(replicas))


def _update_routers(routers: Sequence[TopKRouter]) -> None:
    """Update the biases of routers by the tokens that their experts got, in one exchange for all."""
    biased = [router for router in routers if router.expert_bias is not None]
    kinds = [(router.num_experts, router.config.moe_router_bias_update_rate) for router in biased]
    for kind in dict.fromkeys(kinds):
        alike = [router for router, other in zip(biased, kinds, strict=True) if other == kind]
        bias = torch.stack([router.expert_bias for router in alike if router.expert_bias is not None])
        # A router without a backward pass has counted nothing, and has no tensor.
        counts = torch.stack([torch.zeros_like(bias[0]) + router.local_tokens_per_expert for router in alike])
        updated = get_updated_expert_bias(counts, bias, kind[1])
        for router, row in zip(alike, updated, strict=True):
            router.expert_bias.copy_(row)  # type: ignore[union-attr]
    for router in routers:
        router.finish_step()


def _check_experts(chunk: nn.Module) -> None:
    """Raise a ValueError if torch's DistributedDataParallel treats experts of a chunk as replicas."""
    if not isinstance(chunk, nn.parallel.DistributedDataParallel):
        return
    for name, parameter in chunk.module.named_parameters():
        if is_expert(parameter) and name not in chunk.parameters_to_ignore:
            raise ValueError(
                f"{name} is an expert (allreduce=False), and torch's DistributedDataParallel has given it rank 0's "
                "values: use apex.parallel.DistributedDataParallel, build_model of apex.transformer.pipeline_parallel, "
                "or before wrapping DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)"
            )


@torch.no_grad()
def _merge_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add `grad` to `main_grad` if a parameter has both, because a fused and an unfused layer share it."""
    for parameter in parameters:
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is None:
            continue
        if parameter.grad is not None and parameter.grad is not main_grad:
            main_grad.add_(parameter.grad)
        parameter.grad = main_grad if main_grad.dtype == parameter.dtype else None


@torch.no_grad()
def _sum_within(first: Sequence[nn.Parameter], last: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of parameters that the first and the last stage hold, if both stages are in this process."""
    for first_copy, last_copy in zip(first, last, strict=True):
        if first_copy is last_copy:
            continue
        gradients = [_gradient(parameter) for parameter in (first_copy, last_copy)]
        gradients[0].add_(gradients[1])
        gradients[1].copy_(gradients[0])


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return the tensor with a parameter's gradient: `main_grad` if it exists, otherwise `grad`, zeros if missing."""
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        return main_grad
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


@torch.no_grad()
def _sum_over(group: Any, parameters: Iterable[nn.Parameter], divisor: int = 1) -> None:
    """Sum gradients over a group and divide by `divisor`; gradients of one dtype and device are sent as one tensor.

    A missing gradient counts as zero, because other processes may have it.
    """
    if dist.get_world_size(group) == 1:
        if divisor > 1:
            parameters = (p for p in parameters if p.grad is not None or getattr(p, "main_grad", None) is not None)
            for parameter in parameters:
                _gradient(parameter).div_(divisor)
        return
    average = divisor == dist.get_world_size(group)
    by_kind: dict[tuple, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = _gradient(parameter)
        by_kind[gradient.dtype, gradient.device].append(gradient)
    for gradients in by_kind.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        description = "the sum of gradients after a step's last backward pass"
        exchange.check_alike(flat, group, description)
        if not average and divisor > 1:
            flat.div_(divisor)  # before the sum, which could overflow in half precision
        collectives.all_reduce(flat, group, description, average).wait()
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
