"""MoeHybridParallelPlugin: HybridParallelPlugin for models whose experts are split over processes."""

from __future__ import annotations

from typing import Any

from ..._distributed.experts import is_expert
from ...transformer import parallel_state
from ...transformer._resharding.gathered import gather_from_stages
from ._arguments import warn
from .hybrid_parallel_plugin import HybridParallelPlugin

__all__ = ["MoeHybridParallelPlugin"]


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """HybridParallelPlugin that splits the experts of a layer over `ep_size` processes.

    For `ep_size` > 1 build the model from layers of `apex.transformer.moe`, or mark the parameters of each process's
    experts by `allreduce = False`. ZeRO divides the state of experts among the processes that hold the same ones.
    Processes that hold the experts of one layer are neighbours, so `moe_dp_outside=False` warns.
    """

    def __init__(
        self,
        tp_size: int,
        pp_size: int,
        ep_size: int,
        sp_size: int | None = None,
        *args: Any,
        moe_dp_outside: bool = True,
        **kwargs: Any,
    ) -> None:
        self.ep_size = ep_size
        super().__init__(tp_size, pp_size, sp_size, *args, **kwargs)
        if not moe_dp_outside:
            warn("no effect of moe_dp_outside=False: the processes that hold the experts of a layer are neighbours")

    def _join_groups(self, dp_outside: bool, sequences: bool) -> None:
        super()._join_groups(dp_outside, sequences)
        found = parallel_state.get_expert_model_parallel_world_size()
        if found != self.ep_size:
            raise ValueError(f"apex.transformer is initialised with {found} expert-parallel ranks, not {self.ep_size}")

    def _check_layers(self, model: Any) -> None:
        super()._check_layers(model)
        if self.ep_size > 1 and not any(gather_from_stages(any(map(is_expert, model.parameters())))):
            raise ValueError(
                f"ep_size={self.ep_size}, but no parameter of the model is an expert; build it from "
                "apex.transformer.moe, or use ep_size=1"
            )
