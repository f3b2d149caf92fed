"""The router of a mixture of experts: which experts each token uses, with which weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._arguments import checked
from ..._distributed import exchange
from ...ops._host import HOST
from ...ops._library import autocast_off
from .._marks import MarkedModule
from ..tensor_parallel.random import own_random_numbers
from ._groups import ExpertGroups, size_of
from ._losses import MoEAuxLossAutoScaler, switch_load_balancing_loss_func, z_loss_func
from ._permutation import count_rows
from ._routing import apply_router_token_dropping, choose, compute_routing_scores_for_aux_loss, dense
from .options import ROUTER, seeded

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class _CountInBackward(torch.autograd.Function):
    """An autograd function that returns weights unchanged; its backward pass adds `counts` to the router's counts.

    Counting in the forward pass would be wrong: it may run twice (recomputation), or without training.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, counts: Tensor, router: TopKRouter) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(counts)
        ctx.router = router
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.router.local_tokens_per_expert += ctx.saved_tensors[0]
        return gradient, None, None


class TopKRouter(MarkedModule):
    """A linear layer whose largest outputs choose `moe_router_topk` experts for each token.

    Options of `config`, all named moe_router_... unless said:
    - `score_function`: "softmax" weighs the chosen experts by the softmax of their logits, or with `pre_softmax` by
      the softmax over all experts; "sigmoid" by their sigmoids, divided by their sum. `topk_scaling_factor` multiplies
      the weights.
    - `num_groups`, `group_topk`: experts are chosen from the best `group_topk` of `num_groups` groups of experts.
    - `dtype`: "fp32" or "fp64" for the logits, by default the input's dtype. Scores are at least float32.
    - `enable_expert_bias`: experts are chosen by sigmoid + `expert_bias`, a float32 buffer that
      `finalize_model_grads` moves by `bias_update_rate` towards experts with fewer tokens than the mean.
    - `load_balancing_type`: the loss times moe_aux_loss_coeff is computed over a batch ("aux_loss"), over each sequence
      ("seq_aux_loss"), or over the replicas' batches and the microbatches since the last step ("global_aux_loss").
    - moe_z_loss_coeff: factor of the mean of logsumexp(logits)^2. Losses enter the backward pass of the weights.
    - moe_input_jitter_eps: in training, inputs are multiplied by random numbers from 1 - eps to 1 + eps, which differ
      between ranks with different parts of a sequence.
    - moe_expert_capacity_factor, moe_token_drop_policy: the most tokens of an expert, and which ones are dropped.
    """

    float32_buffers = ("expert_bias",)  # for apex.amp
    expert_bias: Tensor | None

    @checked
    def __init__(self, config: Any, pg_collection: Any = None, *, layer_number: int | None = None) -> None:
        super().__init__()
        self.config, self.groups = config, ExpertGroups.of(pg_collection)
        self.num_experts, self.topk = config.num_moe_experts, config.moe_router_topk
        weight = torch.empty(self.num_experts, config.hidden_size, dtype=torch.float32, device=HOST)
        generator = seeded(config.seed, layer_number or 0, ROUTER)
        nn.init.normal_(weight, std=config.init_method_std, generator=generator)
        self.weight = nn.Parameter(weight.to(config.params_dtype))
        splits_sequence = config.sequence_parallel and size_of(self.groups.tp) > 1
        self.weight.sequence_parallel_enabled = splits_sequence  # type: ignore[attr-defined]
        zeros = torch.zeros(self.num_experts, dtype=torch.float32, device=HOST)
        self.register_buffer("expert_bias", zeros if config.moe_router_enable_expert_bias else None)
        # Not buffers, which DistributedDataParallel copies from the first rank.
        self.local_tokens_per_expert: Any = 0.0
        self._global_tokens: Any = 0.0

    def _apply(self, fn: Any, recurse: bool = True) -> TopKRouter:
        """Convert the weight; the bias only changes its device, because half precision would lose its steps."""
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias is not None and self.expert_bias.dtype != before.dtype:
            self.expert_bias = before.to(self.expert_bias.device)
        return self

    @checked
    def forward(self, x: Tensor, *, sparse: bool = False) -> tuple[Tensor, Tensor]:
        """Return weights [tokens, experts] and the map of chosen experts, a bool of this shape, of x [..., hidden].

        With `sparse`, return the results of `route`. MoE layers use it so that hooks and FSDP see a call of the module.
        """
        if sparse:
            return self.route(x)
        weight, index, logits = self._choose(x)
        probs, routing_map = dense(index, weight, self.num_experts)
        if self.config.moe_expert_capacity_factor is not None:
            padded = self.config.moe_pad_expert_input_to_capacity
            probs, routing_map = apply_router_token_dropping(probs, routing_map, *self._capacity(), padded)
        return probs.to(logits.dtype), routing_map

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts and their weights [tokens, topk] of x [..., hidden]; the index E means no expert."""
        weight, index, _ = self._choose(x)
        if self.config.moe_expert_capacity_factor is not None:
            probs, routing_map = dense(index, weight.detach(), self.num_experts)
            _, kept = apply_router_token_dropping(probs, routing_map, *self._capacity())
            is_kept = kept.gather(1, index)
            index, weight = index.where(is_kept, self.num_experts), weight * is_kept
        return index, weight

    def _capacity(self) -> tuple[int, float, str]:
        return self.topk, self.config.moe_expert_capacity_factor, self.config.moe_token_drop_policy

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and indices [tokens, topk], before any token is dropped, and the logits [tokens, experts]."""
        config = self.config
        rows, batch = x.reshape(-1, x.shape[-1]), max(x.shape[-2], 1) if x.dim() > 2 else 1
        logits = self._logits(self._jittered(rows))
        trains = self.training and torch.is_grad_enabled()
        if trains and config.moe_z_loss_coeff:
            loss = z_loss_func(logits, config.moe_z_loss_coeff / size_of(self.groups.tp_cp))
            logits = MoEAuxLossAutoScaler.apply(logits, loss)
        weight, index = choose(
            logits,
            self.topk,
            config.moe_router_pre_softmax,
            config.moe_router_num_groups,
            config.moe_router_group_topk,
            config.moe_router_topk_scaling_factor,
            config.moe_router_score_function,
            self.expert_bias,
        )
        if trains and config.moe_aux_loss_coeff and config.moe_router_load_balancing_type != "none":
            weight = MoEAuxLossAutoScaler.apply(weight, self._balance_loss(logits, batch))
        if trains and self.expert_bias is not None:
            counts = count_rows(index, self.num_experts).to(torch.float32)
            # The compiler traces no changes in a backward pass, and without a gradient there is none here.
            if torch.compiler.is_compiling() or not weight.requires_grad:
                self.local_tokens_per_expert = self.local_tokens_per_expert + counts
            else:
                weight = _CountInBackward.apply(weight, counts, self)
        return weight, index, logits

    def _jittered(self, rows: Tensor) -> Tensor:
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return rows
        splits_sequence = self.config.sequence_parallel and size_of(self.groups.tp) > 1
        with own_random_numbers(splits_sequence):
            return rows * torch.empty_like(rows).uniform_(1.0 - eps, 1.0 + eps)

    def _logits(self, rows: Tensor) -> Tensor:
        if self.config.moe_router_dtype is None:
            return F.linear(rows, self.weight)
        dtype = _DTYPES[self.config.moe_router_dtype]
        with autocast_off(rows):
            return F.linear(rows.to(dtype), self.weight.to(dtype))

    def _balance_loss(self, logits: Tensor, batch: int) -> Tensor:
        """Return this rank's part of the balance loss; parts of ranks that share sequences add up to the whole loss."""
        config, experts = self.config, self.num_experts
        kind, coefficient = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        chosen, scores = compute_routing_scores_for_aux_loss(logits, self.topk, config.moe_router_score_function)
        parts, tokens = size_of(self.groups.tp_cp), scores.shape[0]
        if kind == "seq_aux_loss":  # tokens are [sequence, batch]
            scores, chosen = scores.view(-1, batch * experts), chosen.view(-1, batch * experts)
            tokens, coefficient = tokens // batch, coefficient / batch
        counts = chosen.sum(0).to(scores.dtype)
        if kind == "global_aux_loss":
            ranks = size_of(self.groups.tp_dp_cp)
            counts = _summed(counts, self.groups.tp_dp_cp)
            self._global_tokens = self._global_tokens + counts
            # The mean over the microbatches of a step so far.
            counts = self._global_tokens * (counts.sum() / self._global_tokens.sum().clamp(min=1))
            # Gradients become means over replicas; with this factor they are the gradients of the whole loss.
            coefficient, parts = coefficient * (ranks // parts), ranks
        else:
            counts = _summed(counts, self.groups.tp_cp)
        return switch_load_balancing_loss_func(scores, counts, tokens * parts, self.topk, experts, coefficient)

    def finish_step(self) -> None:
        """Reset the counts of tokens per expert; `finalize_model_grads` calls it after it has updated the bias."""
        self.local_tokens_per_expert = self._global_tokens = 0.0


def _summed(counts: Tensor, group: Any) -> Tensor:
    return counts if size_of(group) == 1 else exchange.sum_over(counts, group, "the number of tokens of each expert")
