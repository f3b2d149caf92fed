"""The bounds of documents that are packed one after the other, in Megatron's form."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
        keys = self.cu_seqlens_kv if self.cu_seqlens_kv_padded is None else self.cu_seqlens_kv_padded
        if keys is not None and keys is not bounds and keys.shape != bounds.shape:
            raise ValueError(
                f"cu_seqlens_kv has shape {list(keys.shape)}, cu_seqlens_q {list(bounds.shape)}: keys of "
                "self-attention have the bounds of the queries"
            )
        return bounds, int(self.max_seqlen_q)
