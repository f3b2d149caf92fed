"""Search for the order of channels that keeps the largest magnitude after 2:4 pruning."""

from .call_permutation_search_kernels import accelerated_search_for_good_permutation
from .permutation_utilities import sum_after_2_to_4

__all__ = ["accelerated_search_for_good_permutation", "sum_after_2_to_4"]
