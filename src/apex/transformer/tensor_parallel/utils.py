"""Splitting of tensors and vocabularies into equal parts."""

from __future__ import annotations

from torch import Tensor

from ..._arguments import Count, Index, checked
from ..utils import divide


@checked
def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: Count, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor into equal parts along its last dimension; parts are views, or copies if contiguous."""
    if not tensor.dim():
        raise ValueError("tensor has no dimension to split: it is a scalar")
    size = divide(tensor.shape[-1], num_partitions, "the last dimension over num_partitions")
    parts = tensor.split(size, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """The range [first, end) of vocabulary indices that a rank holds."""

    @staticmethod
    @checked
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: Count, rank: Index, world_size: Count
    ) -> tuple[int, int]:
        """Return the range if each rank holds `per_partition_vocab_size` words."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    @checked
    def vocab_range_from_global_vocab_size(global_vocab_size: Count, rank: Index, world_size: Count) -> tuple[int, int]:
        """Return the range if all ranks together hold `global_vocab_size` words."""
        words_per_rank = divide(global_vocab_size, world_size, "words of the vocabulary over the tensor-parallel ranks")
        return VocabUtility.vocab_range_from_per_partition_vocab_size(words_per_rank, rank, world_size)
