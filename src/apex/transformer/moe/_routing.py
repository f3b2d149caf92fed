"""The choice of experts from a router's logits. Letters: T tokens, E experts, K experts of a token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..._distributed import exchange
from ...ops._checks import check_floats
from ...ops._library import compute_dtype
from .. import parallel_state

_SMALL = 1e-20  # keeps sums of sigmoids that round to zero from dividing by zero


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Return the number of rows that an expert takes: ceil(num_tokens / num_experts * factor), or `min_capacity`."""
    return max(math.ceil(num_tokens / num_experts * capacity_factor), min_capacity or 0)


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """Return values and indices of the best `topk` experts among the best `group_topk` groups of experts.

    A group's score is the sum of its best topk / group_topk scores.
    """
    if (
        num_groups < 1
        or num_experts % num_groups
        or not 1 <= group_topk <= num_groups
        or topk % group_topk  # a group's score would leave out some of the experts, or be zero
        or topk > group_topk * (num_experts // num_groups)
    ):
        raise ValueError(
            f"num_groups={num_groups} must divide {num_experts} experts, and group_topk={group_topk} groups must "
            f"divide topk={topk} and hold as many experts"
        )
    grouped = scores.view(num_tokens, num_groups, num_experts // num_groups)
    group_scores = grouped.topk(topk // group_topk, -1).values.sum(-1)
    used = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, group_scores.topk(group_topk, -1).indices, True)
    return grouped.masked_fill(~used[:, :, None], -torch.inf).view_as(scores).topk(topk, -1)


def choose(
    logits: Tensor,
    topk: int,
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weights, in float32 or float64, and indices [T, K] of the experts of logits [T, E]."""
    _check_score_function(score_function)
    if expert_bias is not None and score_function != "sigmoid":
        raise ValueError('expert_bias needs score_function="sigmoid"')
    if expert_bias is not None and expert_bias.shape != logits.shape[1:]:
        raise ValueError(f"expert_bias has shape {list(expert_bias.shape)}, expected {list(logits.shape[1:])}")
    wide = logits.to(compute_dtype(logits))

    def best(scores: Tensor) -> tuple[Tensor, Tensor]:
        if group_topk is None:
            return scores.topk(topk, -1)
        if num_groups is None:
            raise ValueError("group_topk needs num_groups")
        return group_limited_topk(scores, topk, scores.shape[0], scores.shape[1], num_groups, group_topk)

    if score_function == "sigmoid":
        scores = wide.sigmoid()
        with torch.no_grad():
            _, index = best(scores if expert_bias is None else scores + expert_bias)
        weight = scores.gather(1, index)
        weight = weight / (weight.sum(-1, keepdim=True) + _SMALL) if topk > 1 else weight
    elif pre_softmax:
        weight, index = best(wide.softmax(-1))
    else:
        top, index = best(wide)
        weight = top.softmax(-1)
    return weight if scaling_factor is None else weight * scaling_factor, index


def dense(index: Tensor, weight: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return weights [T, E] and the map of chosen experts, a bool [T, E]; the index E means no expert."""
    shape = (index.shape[0], num_experts + 1)
    probs = torch.zeros(shape, dtype=weight.dtype, device=weight.device).scatter(1, index, weight)
    chosen = torch.zeros(shape, dtype=torch.bool, device=weight.device).scatter(1, index, True)
    return probs[:, :num_experts], chosen[:, :num_experts]


def sparse(routing_map: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return indices and weights [T, K] from a map and weights [T, E]; the index E means no expert.

    A map that is padded to capacity may give a token more than K experts; experts of weight zero are left out then.
    """
    experts = routing_map.shape[1]
    numbers = torch.arange(experts, dtype=torch.int64, device=routing_map.device)
    weighted_first = numbers + experts * (probs == 0)
    order = weighted_first.where(routing_map, 2 * experts).sort(-1).values[:, :topk]
    index = (order % experts).where(order < 2 * experts, experts)
    return index, torch.nn.functional.pad(probs, (0, 1)).gather(1, index)


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return weights [T, E], zero for experts that are not chosen, and the map of chosen experts, a bool [T, E].

    With "softmax" the best K logits are chosen, and their softmax is the weight; with `use_pre_softmax` the softmax
    over all experts. With "sigmoid" experts are chosen by sigmoid + `expert_bias` and weighted by sigmoids that are
    divided by their sum. There is one implementation, for either value of `fused`.
    """
    _check_logits(logits, topk)
    settings = (use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias)
    weight, index = choose(logits, topk, *settings)
    probs, routing_map = dense(index, weight, logits.shape[1])
    return probs.to(logits.dtype), routing_map


def _check_logits(logits: Tensor, topk: int) -> None:
    check_floats(logits=logits)
    if logits.dim() != 2 or not 1 <= topk <= logits.shape[1]:
        raise ValueError(
            f"logits must be [tokens, experts] with at least topk={topk} experts, got {list(logits.shape)}"
        )


def _check_score_function(score_function: str) -> None:
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(f'score_function must be "softmax" or "sigmoid", got {score_function!r}')


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, fused: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the map of the best `topk` experts and the scores [T, E] that balance losses use; each token's sum is 1.

    There is one implementation, for either value of `fused`.
    """
    _check_logits(logits, topk)
    _check_score_function(score_function)
    wide = logits.to(compute_dtype(logits))
    if score_function == "sigmoid":
        scores = wide.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + _SMALL)
    else:
        scores = wide.softmax(-1)
    index = scores.detach().topk(topk, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True), scores


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return weights and map [T, E] that give each expert at most its capacity of tokens.

    Each expert keeps its most probable tokens ("probs") or its first ones ("position"). With `pad_to_capacity` the map
    gives each expert exactly its capacity, if there are as many tokens, with tokens of weight zero.
    """
    if not 0 < capacity_factor < math.inf:
        raise ValueError(f"capacity_factor must be positive and finite, got {capacity_factor}")
    tokens, experts = routing_map.shape
    capacity = min(get_capacity(tokens * router_topk, experts, capacity_factor), tokens)
    if drop_policy == "probs":
        order = routing_probs.detach().masked_fill(~routing_map, -1.0)
    elif drop_policy == "position":
        order = routing_map.int()
    else:
        raise ValueError(f'drop_policy must be "probs" or "position", got {drop_policy!r}')
    first = order.sort(dim=0, descending=True, stable=True).indices[:capacity]
    kept = torch.zeros_like(routing_map).scatter(0, first, True)
    if not pad_to_capacity:
        kept = kept & routing_map
    return routing_probs * (kept & routing_map), kept


@torch.no_grad()
def get_updated_expert_bias(tokens_per_expert: Tensor, expert_bias: Tensor, expert_bias_update_rate: float) -> Tensor:
    """Return biases [..., E] moved by the rate towards experts with fewer tokens than the mean.

    `tokens_per_expert` are this rank's; they are summed over all ranks of a pipeline stage.
    """
    if not parallel_state.is_unitialized():
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        if torch.distributed.get_world_size(group) > 1:
            tokens_per_expert = exchange.sum_over(tokens_per_expert, group, "the number of tokens of each expert")
    mean = tokens_per_expert.mean(-1, keepdim=True, dtype=expert_bias.dtype)
    return expert_bias + (mean - tokens_per_expert).sign() * expert_bias_update_rate
