"""Mixtures of experts: routers, experts split over ranks, and the exchange of tokens, with Megatron-Core's names."""

from .experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from .moe_layer import MoELayer, MoESubmodules
from .moe_utils import MoEAuxLossAutoScaler
from .options import MoEOptions
from .router import TopKRouter
from .shared_experts import SharedExpertMLP
from .token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)

__all__ = [
    "GroupedMLP",
    "MoEAllGatherTokenDispatcher",
    "MoEAlltoAllTokenDispatcher",
    "MoEAuxLossAutoScaler",
    "MoEFlexTokenDispatcher",
    "MoELayer",
    "MoEOptions",
    "MoESubmodules",
    "MoETokenDispatcher",
    "SequentialMLP",
    "SharedExpertMLP",
    "TEGroupedMLP",
    "TopKRouter",
]
