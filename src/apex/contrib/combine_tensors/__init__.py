"""Combining a list of tensors into one flat buffer that shares memory with them."""

from .combine_tensors import (
    check_combined_tensor,
    combine_npu,
    get_aligned_storage_size,
    get_part_combined_tensor,
    is_combined_tensor_valid,
)

__all__ = [
    "check_combined_tensor",
    "combine_npu",
    "get_aligned_storage_size",
    "get_part_combined_tensor",
    "is_combined_tensor_valid",
]
