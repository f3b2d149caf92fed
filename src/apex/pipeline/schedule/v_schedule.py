"""PipelineGraph: the costs of a zero-bubble schedule, which HybridParallelPlugin makes by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PipelineGraph"]


@dataclass
class PipelineGraph:
    """Costs of forward, backward, weight-gradient and communication steps; they have no effect here."""

    n_stage: int
    n_micro: int
    f_cost: float
    b_cost: float
    w_cost: float
    c_cost: float
    f_mem: float
    b_mem: float
    w_mem: float
    max_mem: float | None = None

    def get_v_schedule(self, only_run_time: bool = False) -> list[Any]:
        """Return an empty list for `scheduler_nodes`: the plugin makes the schedule."""
        return []
