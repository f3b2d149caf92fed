"""The bounds of documents that are packed one after the other, in Megatron's form."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..ops._checks import values_at_hand


@dataclass
class PackedSeqParams:
    """Bounds of packed documents: document i is rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`.

    The `kv` fields belong to keys and values; None means that they equal the queries'. If documents are padded, the
    `padded` bounds are where each document begins and where its padding ends. `max_seqlen_q` and `max_seqlen_kv` are at
    least the lengths of the longest documents, padding included.
    """

    qkv_format: str = "thd"
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    def __post_init__(self) -> None:
        if self.qkv_format != "thd":
            raise ValueError(f"qkv_format={self.qkv_format!r} must be 'thd', the layout of packed rows")

    def bounds(self) -> tuple[Tensor, int]:
        """Return the bounds of documents of self-attention, with their padding, and the length of the longest."""
        bounds = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        if bounds is None or self.max_seqlen_q is None:
            raise ValueError("PackedSeqParams needs cu_seqlens_q and max_seqlen_q")
        pairs = (self.cu_seqlens_q, self.cu_seqlens_kv), (self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded)
        for queries, keys in pairs:
            if queries is None or keys is None or keys is queries:
                continue
            values = [values_at_hand(each) for each in (queries, keys)]
            if keys.shape != queries.shape or (None not in values and values[0] != values[1]):
                raise ValueError(
                    f"cu_seqlens_kv is {values[1]} of shape {list(keys.shape)}, cu_seqlens_q {values[0]} of shape "
                    f"{list(queries.shape)}: keys of self-attention have the bounds of the queries"
                )
        return bounds, int(self.max_seqlen_q)
