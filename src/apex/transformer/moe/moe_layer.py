"""A layer of experts in place of an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..._arguments import checked
from ..._distributed import exchange
from ...ops._library import autocast_dtype
from ._groups import ExpertGroups, rank_in, size_of
from .experts import GroupedMLP
from .router import TopKRouter
from .shared_experts import SharedExpertMLP
from .token_dispatcher import DISPATCHERS, MoEAllGatherTokenDispatcher


@dataclass
class MoESubmodules:
    """Classes of a layer's parts, for `MoELayer`."""

    experts: type[nn.Module] = GroupedMLP
    shared_experts: type[nn.Module] = SharedExpertMLP


class MoELayer(nn.Module):
    """A mixture of experts: a router, this rank's experts, and a shared expert if the configuration has one.

    `config` is a `TransformerConfig`; `apex.transformer.moe.MoEOptions` describes its options. `layer_number`,
    counted from 0, decides the initial weights. `pg_collection` has the process groups `tp`, `ep`, `expt_tp`, `tp_ep`,
    `tp_cp` and `tp_dp_cp` as attributes; by default `parallel_state` has them.
    """

    @checked
    def __init__(
        self,
        config: Any,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        groups = ExpertGroups.of(pg_collection)
        submodules = MoESubmodules() if submodules is None else submodules
        experts, ranks = config.num_moe_experts, size_of(groups.ep)
        if experts is None:
            raise ValueError("num_moe_experts is None: a layer of experts needs their number")
        if size_of(groups.tp) > 1 and not config.sequence_parallel:
            raise ValueError(
                "experts with tensor parallelism need sequence_parallel=True: otherwise all tensor-parallel "
                "ranks would send the same tokens"
            )
        if experts % ranks:
            raise ValueError(f"num_moe_experts={experts} is not divisible by {ranks} expert-parallel ranks")
        self.config, local = config, experts // ranks
        first = local * rank_in(groups.ep)
        kind = config.moe_token_dispatcher_type
        if kind == "alltoall" and size_of(groups.tp_ep) == 1:
            kind = "allgather"  # nothing is sent, and the host need not know how many rows there are
        dispatcher = DISPATCHERS[kind]
        self.token_dispatcher = dispatcher(local, range(first, first + local), config, groups)
        self.router = TopKRouter(config, groups, layer_number=layer_number)
        self.experts = submodules.experts(local, config, groups, layer_number=layer_number)
        self.shared_experts: nn.Module | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = submodules.shared_experts(config, groups, layer_number=layer_number)

    @checked
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        """Map [sequence, batch, hidden] to the same shape; the second result is None, for a bias."""
        self._check(hidden_states)
        dispatcher, x = self.token_dispatcher, hidden_states
        if size_of(group := self.router.groups.tp_ep) > 1:
            (x,) = exchange.taking_part([x], group, "experts' tokens", self.parameters())
        tokens, probs = dispatcher.token_dispatch(*dispatcher.prepare(x, *self.router(x, sparse=True)))
        if isinstance(dispatcher, MoEAllGatherTokenDispatcher) and _sorts_rows(self.experts):
            # The experts take tokens and indices, and sort rows themselves.
            results = self.experts(tokens, None, probs, index=dispatcher.local_index)[0]
        else:
            rows, counts, probs = dispatcher.dispatch_postprocess(tokens, probs)
            results = dispatcher.combine_preprocess(self.experts(rows, counts, probs)[0])
        output = dispatcher.combine_postprocess(dispatcher.token_combine(results))
        return output if self.shared_experts is None else output + self.shared_experts(hidden_states), None

    def _check(self, hidden_states: Tensor) -> None:
        """Raise a ValueError if the input has another size or dtype than the weights."""
        if hidden_states.shape[-1:] != (self.config.hidden_size,):
            raise ValueError(
                f"hidden_states has shape {list(hidden_states.shape)}, expected [..., {self.config.hidden_size}]"
            )
        if autocast_dtype(hidden_states) is not None:
            return
        weights = {"router": self.router.weight} if self.config.moe_router_dtype is None else {}
        if isinstance(self.experts, GroupedMLP):
            weights["experts"] = self.experts.weight1
        for name, weight in weights.items():
            # FSDP's shards are no plain parameters, and may be gathered in another dtype.
            if type(weight) is nn.Parameter and weight.dtype != hidden_states.dtype:
                raise ValueError(
                    f"hidden_states is {hidden_states.dtype} and the weight of the {name} {weight.dtype}: convert one, "
                    "or use autocast"
                )


def _sorts_rows(experts: nn.Module) -> bool:
    """Return whether experts take indices of tokens: not if a subclass has a forward of its own."""
    return isinstance(experts, GroupedMLP) and type(experts).forward is GroupedMLP.forward
