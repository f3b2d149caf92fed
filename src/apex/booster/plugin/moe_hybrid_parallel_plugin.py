"""MoeHybridParallelPlugin: HybridParallelPlugin for models with experts that every process holds."""

from __future__ import annotations

from typing import Any

from ._arguments import warn
from .hybrid_parallel_plugin import HybridParallelPlugin

__all__ = ["MoeHybridParallelPlugin"]


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """HybridParallelPlugin with `ep_size`, which must be 1; `moe_dp_outside=False` then warns."""

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
        if ep_size != 1:
            raise NotImplementedError(f"ep_size={ep_size} is not supported; use 1: every process holds all experts")
        super().__init__(tp_size, pp_size, sp_size, *args, **kwargs)
        if not moe_dp_outside:
            warn("no effect of moe_dp_outside=False: no experts are divided with ep_size=1")
