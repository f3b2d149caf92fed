"""Step functions that run the microbatches of a batch through a pipeline of stages, or through a whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...._arguments import Count, checked
from ...parallel_state import ExperimentalWarning as ExperimentalWarning
from ..utils import get_num_microbatches
from .fwd_bwd_no_pipelining import forward_backward_no_pipelining
from .fwd_bwd_pipelining_with_interleaving import _forward_backward_pipelining_with_interleaving
from .fwd_bwd_pipelining_without_interleaving import forward_backward_pipelining_without_interleaving
from .fwd_bwd_zero_bubble import forward_backward_zero_bubble

__all__ = [
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_zero_bubble",
    "get_forward_backward_func",
]


@checked
def get_forward_backward_func(
    virtual_pipeline_model_parallel_size: Count | None, pipeline_model_parallel_size: Count
) -> Callable[..., list[Any]]:
    """Return the step function for the given number of pipeline ranks and of model chunks per rank.

    For one rank it runs without pipelining.
    """
    if pipeline_model_parallel_size <= 1:
        return forward_backward_no_pipelining
    if virtual_pipeline_model_parallel_size is None:
        return forward_backward_pipelining_without_interleaving
    if get_num_microbatches() % pipeline_model_parallel_size != 0:
        raise RuntimeError(
            f"number of microbatches ({get_num_microbatches()}) is not divisible by pipeline-parallel size "
            f"({pipeline_model_parallel_size}) when using interleaved schedule"
        )
    return _forward_backward_pipelining_with_interleaving
