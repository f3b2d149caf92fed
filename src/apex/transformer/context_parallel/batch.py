"""This rank's part of a batch, of position embeddings and of packed documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..._arguments import Count, Index, checked
from ...ops.attention.op_varlen import check_bounds
from ..packed_seq_params import PackedSeqParams
from ._parts import check_documents, own_chunks, size_and_rank
from ._rows import rows_of_rank


@checked
def get_batch_on_this_cp_rank(
    batch: Mapping[str, Any], is_hybrid_cp: bool = False, cp_group: Any = None
) -> dict[str, Any]:
    """Return this rank's part of each tensor of a batch: a part of dimension 1, or 2 for "attention_mask".

    A mask [batch, sequence], of words that are no padding, is cut in dimension 1. Values other than tensors, and
    tensors with a single dimension, are returned as they are. Broadcast the batch over tensor-parallel ranks before.
    `is_hybrid_cp` must be False.
    """
    if is_hybrid_cp:
        raise NotImplementedError("is_hybrid_cp=True, sequences that are cut for some ranks only, is not supported")
    ranks, rank = size_and_rank(cp_group)
    if ranks == 1:
        return dict(batch)
    return {
        name: own_chunks(value, 2 if name == "attention_mask" and value.dim() > 2 else 1, ranks, rank)
        if _is_split(value)
        else value
        for name, value in batch.items()
    }


@checked
def get_pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: Any = None) -> Tensor:
    """Return this rank's part of position embeddings whose sequence is dimension `seq_dim`."""
    ranks, rank = size_and_rank(cp_group)
    return pos_emb if ranks == 1 else own_chunks(pos_emb, seq_dim, ranks, rank)


@checked
def get_thd_batch_on_this_cp_rank(
    batch: Mapping[str, Any],
    cu_seqlens: Tensor,
    cu_seqlens_padded: Tensor | None,
    max_seqlen: Any,
    cp_size: Count | None = None,
    cp_rank: Index | None = None,
) -> tuple[dict[str, Any], PackedSeqParams]:
    """Return this rank's part of packed documents [1, rows], and their bounds for the model.

    Each document is cut into 2 * cp chunks by itself; with padding its length must be a multiple of 2 * cp.
    `cu_seqlens_padded` are the bounds with padding, None if there is none. The returned bounds belong to the whole
    rows, because every rank needs them.
    """
    ranks, rank = size_and_rank(None)
    ranks = ranks if cp_size is None else cp_size
    rank = rank if cp_rank is None else cp_rank
    if rank >= ranks:
        raise ValueError(f"cp_rank={rank} must be less than cp_size={ranks}")
    cu_seqlens, longest = cu_seqlens.flatten(), int(max_seqlen)
    padded = None if cu_seqlens_padded is None else cu_seqlens_padded.flatten()
    if padded is not None and padded.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_padded has {len(padded)} bounds, cu_seqlens {len(cu_seqlens)}: both are of the same documents"
        )
    bounds = cu_seqlens if padded is None else padded
    whole = {value.shape[1] for value in batch.values() if _is_split(value)}
    edges = check_bounds("" if padded is None else "_padded", bounds, longest, min(whole, default=2**62), bounds.device)
    for total in whole or {edges[-1] if edges else 0}:
        check_documents(edges, total, ranks)
    params = PackedSeqParams(
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    if ranks == 1:
        return dict(batch), params
    rows: dict[int, Tensor] = {}

    def own(value: Any) -> Any:
        if not _is_split(value):
            return value
        total = value.shape[1]
        if total not in rows:
            rows[total] = rows_of_rank(bounds.long(), total, ranks, rank)
        return value.index_select(1, rows[total].to(value.device))

    return {name: own(value) for name, value in batch.items()}, params


def _is_split(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1
