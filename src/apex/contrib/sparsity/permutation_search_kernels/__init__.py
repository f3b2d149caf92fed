"""The search for an order of channels of which 2:4 pruning keeps most."""

from .call_permutation_search_kernels import accelerated_search_for_good_permutation
from .channel_swap import Channel_Swap
from .exhaustive_search import Exhaustive_Search
from .permutation_utilities import (
    apply_2_to_4,
    efficacy,
    magnitude_after_pruning_rows,
    sum_after_2_to_4,
    try_swap,
    unstructured_prune,
)

__all__ = [
    "Channel_Swap",
    "Exhaustive_Search",
    "accelerated_search_for_good_permutation",
    "apply_2_to_4",
    "efficacy",
    "magnitude_after_pruning_rows",
    "sum_after_2_to_4",
    "try_swap",
    "unstructured_prune",
]
