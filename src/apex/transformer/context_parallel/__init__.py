"""Context parallelism: each rank of a group holds a part of every sequence, and attention exchanges keys or heads.

A sequence is cut into 2 * cp chunks, and rank r of cp holds chunks r and 2 * cp - 1 - r, one after the other. With a
causal mask all ranks then have the same amount of work.
"""

from .attention import context_attention
from .batch import get_batch_on_this_cp_rank, get_pos_emb_on_this_cp_rank, get_thd_batch_on_this_cp_rank

__all__ = [
    "context_attention",
    "get_batch_on_this_cp_rank",
    "get_pos_emb_on_this_cp_rank",
    "get_thd_batch_on_this_cp_rank",
]
