"""Functions of routers and dispatchers, with Megatron-Core's names and arguments."""

from ._losses import MoEAuxLossAutoScaler, switch_load_balancing_loss_func, z_loss_func
from ._permutation import permute, sort_chunks_by_idxs, unpermute
from ._routing import (
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_capacity,
    get_updated_expert_bias,
    group_limited_topk,
    topk_routing_with_score_function,
)

__all__ = [
    "MoEAuxLossAutoScaler",
    "apply_router_token_dropping",
    "compute_routing_scores_for_aux_loss",
    "get_capacity",
    "get_updated_expert_bias",
    "group_limited_topk",
    "permute",
    "sort_chunks_by_idxs",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "unpermute",
    "z_loss_func",
]
