"""The chunks of a dimension that a context-parallel rank has, and the check that a document can be cut into chunks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import parallel_state


def size_and_rank(group: Any) -> tuple[int, int]:
    """Return the size of a context-parallel group and this process's rank in it; None means the model's group."""
    if group is None:
        if parallel_state.is_unitialized():
            return 1, 0
        group = parallel_state.get_context_parallel_group()
    return dist.get_world_size(group), dist.get_rank(group)


def own_chunks(tensor: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    """Return chunks `rank` and 2 * `ranks` - 1 - `rank` of a dimension that is cut into 2 * `ranks`."""
    if tensor.shape[dim] % (2 * ranks):
        raise ValueError(
            f"a sequence of {tensor.shape[dim]} cannot be cut into {2 * ranks} equal chunks, two for each of the "
            f"{ranks} context-parallel ranks: pad it to a multiple of {2 * ranks}"
        )
    chunks = tensor.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim)


def check_documents(edges: list[int] | None, rows: int, ranks: int) -> None:
    """Raise ValueError for bounds of documents that `ranks` cannot cut into two chunks each, or that leave rows over.

    `edges` are None if the host cannot read them.
    """
    if ranks == 1 or edges is None:
        return
    if any(edge % (2 * ranks) for edge in edges):
        raise ValueError(
            f"cu_seqlens={edges} has documents that cannot be cut into {2 * ranks} equal chunks, two for each of the "
            f"{ranks} context-parallel ranks: pad each to a multiple of {2 * ranks}"
        )
    if edges[-1] != rows:
        raise ValueError(
            f"cu_seqlens={edges} must end with the {rows} rows of all {ranks} context-parallel ranks: give rows behind "
            "the last document to a document of padding"
        )
