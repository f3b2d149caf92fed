"""Parts of tensors and of vocabularies."""

from __future__ import annotations

from torch import Tensor

from ..._arguments import Count, Index, checked
from ..utils import divide


@checked
def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: Count, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """The tensor in equal parts along its last dimension: views, or copies if they are to be contiguous."""
    if not tensor.dim():
        raise ValueError("tensor has no dimension to split: it is a scalar")
    size = divide(tensor.shape[-1], num_partitions, "the last dimension over num_partitions")
    parts = tensor.split(size, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """Which words of a vocabulary a rank has: from the first to before the last."""

    @staticmethod
    @checked
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: Count, rank: Index, world_size: Count
    ) -> tuple[int, int]:
        """The range where each rank has `per_partition_vocab_size` words."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    @checked
    def vocab_range_from_global_vocab_size(global_vocab_size: Count, rank: Index, world_size: Count) -> tuple[int, int]:
        """The range where all ranks together have `global_vocab_size` words."""
        each = divide(global_vocab_size, world_size, "words of the vocabulary over the tensor-parallel ranks")
        return VocabUtility.vocab_range_from_per_partition_vocab_size(each, rank, world_size)
