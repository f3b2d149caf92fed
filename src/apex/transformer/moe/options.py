"""Options of a mixture of experts, with Megatron-Core's names and defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._arguments import Count, check_fields
from ...ops._host import HOST

# Distance between the seeds of a layer's modules: router, shared expert, experts. Layers have consecutive seeds.
_SEED_STRIDE = 1 << 16
ROUTER, SHARED, FIRST_EXPERT = 1, 2, 3

_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "moe_router_dtype": (None, "fp32", "fp64"),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    "moe_token_drop_policy": ("probs", "position"),
}
_NOT_NEGATIVE = (
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"),
    *("moe_router_bias_update_rate", "moe_router_topk_scaling_factor"),
)


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """Options of layers with experts; a model has none if `num_moe_experts` is None.

    - `moe_ffn_hidden_size`: width of an expert, by default `ffn_hidden_size`. Experts are gated (SwiGLU).
    - `moe_layer_freq`: n if every n-th layer has experts, or a list with 1 for layers with experts and 0 for others.
    - `moe_shared_expert_intermediate_size`: width of an expert that all tokens use; `moe_shared_expert_gate` multiplies
      its output by a sigmoid of the token.
    - `moe_token_dispatcher_type`: "allgather" or "alltoall"; see `apex.transformer.moe.token_dispatcher`.
    - `moe_router_*`: the choice of experts; see `apex.transformer.moe.TopKRouter`.
    - `moe_aux_loss_coeff`, `moe_z_loss_coeff`: factors of the losses that balance experts and keep logits small.
    - `moe_expert_capacity_factor`: an expert takes at most ceil(tokens * topk / experts * factor) tokens of a rank, and
      the others are dropped: the least probable or the last ones, by `moe_token_drop_policy`. By default none is
      dropped. `moe_pad_expert_input_to_capacity` exchanges as many rows for each expert, so that the host needs no
      counts.
    """

    num_moe_experts: int | None = None
    moe_ffn_hidden_size: Count | None = None
    moe_layer_freq: int | Sequence[int] = 1
    moe_shared_expert_intermediate_size: Count | None = None
    moe_shared_expert_gate: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_router_topk: int = 2
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: Count | None = None
    moe_router_group_topk: Count | None = None
    moe_router_dtype: str | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_load_balancing_type: str = "aux_loss"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float | None = None
    moe_input_jitter_eps: float | None = None
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: str = "probs"
    moe_pad_expert_input_to_capacity: bool = False

    def check_experts(self, activation: str, num_layers: int) -> None:
        """Raise an error for options of the wrong type, or that do not fit each other or the rest of a model."""
        check_fields(self, MoEOptions)
        for name, accepted in _ACCEPTED.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {accepted}, got {getattr(self, name)!r}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        if self.num_moe_experts is None:
            return
        experts, chosen = self.num_moe_experts, self.moe_router_topk
        if experts < 1:
            raise ValueError(f"num_moe_experts must be a positive integer or None, got {experts}")
        if not 1 <= chosen <= experts:
            raise ValueError(f"moe_router_topk={chosen} must be from 1 to num_moe_experts={experts}")
        if activation != "swiglu":
            raise ValueError(f'activation={activation!r} has no gate, and experts have one: use "swiglu"')
        softmax = self.moe_router_score_function == "softmax"
        if softmax and chosen == 1 and not self.moe_router_pre_softmax:
            raise ValueError(
                "moe_router_topk=1 gives every token the weight 1, which trains no router: set moe_router_pre_softmax"
            )
        if softmax and self.moe_router_enable_expert_bias:
            raise ValueError('moe_router_enable_expert_bias needs moe_router_score_function="sigmoid"')
        if self.moe_pad_expert_input_to_capacity and self.moe_expert_capacity_factor is None:
            raise ValueError("moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor")
        factor = self.moe_expert_capacity_factor
        if factor is not None and not 0 < factor < math.inf:
            raise ValueError(f"moe_expert_capacity_factor must be positive and finite, got {factor}")
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError("moe_shared_expert_gate needs moe_shared_expert_intermediate_size")
        self._check_groups(experts, chosen)
        freq = self.moe_layer_freq
        if isinstance(freq, int):
            if freq < 1:
                raise ValueError(f"moe_layer_freq must be positive, got {freq}")
        elif len(freq) != num_layers or set(freq) - {0, 1}:
            raise ValueError(f"moe_layer_freq must have a 0 or 1 for each of {num_layers} layers, got {list(freq)}")

    def _check_groups(self, experts: int, chosen: int) -> None:
        groups, best = self.moe_router_num_groups, self.moe_router_group_topk
        if groups is None and best is None:
            return
        if groups is None or best is None:
            raise ValueError("moe_router_num_groups and moe_router_group_topk need each other")
        if experts % groups or not 1 <= best <= groups or chosen % best or chosen > best * (experts // groups):
            raise ValueError(
                f"{groups} groups (moe_router_num_groups), of which {best} (moe_router_group_topk) are used, do not "
                f"fit num_moe_experts={experts} and moe_router_topk={chosen}: groups must divide experts, and "
                "used groups the experts of a token, which they must hold"
            )

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer, counted from 0, has experts."""
        if self.num_moe_experts is None:
            return False
        freq = self.moe_layer_freq
        return layer % freq == 0 if isinstance(freq, int) else freq[layer] == 1


def seeded(seed: int, layer: int, module: int) -> torch.Generator:
    """Return the random number generator of a module's weights: `ROUTER`, `SHARED`, or `FIRST_EXPERT` + an expert."""
    return torch.Generator(HOST).manual_seed(seed + 1 + layer + _SEED_STRIDE * module)
