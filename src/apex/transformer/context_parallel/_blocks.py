"""Attention of some queries with some keys: blocks that are merged into a whole attention.

A block returns its output and the logarithm of each row's sum of exponentials. Its backward pass takes the output and
the logarithms of the whole attention, which give the probabilities of the whole. So gradients of blocks add up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.attention.op_varlen import block_backward, block_forward


class Block(NamedTuple):
    """Settings of a block: bounds and greatest lengths of queries and keys, scale, and the window of a query."""

    bounds: Tensor
    bounds_k: Tensor
    longest: int
    longest_k: int
    scale: float
    left: int = -1
    right: int = -1

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [rows, H, D] and the logs of sums [H, rows]."""
        return block_forward(query, key, value, *self)

    def backward(self, dout: Tensor, tensors: tuple[Tensor, ...], output: Tensor, lse: Tensor) -> Any:
        """Return the gradients of query, key and value, from output and logs of sums of the whole attention."""
        query, key, value = tensors
        return block_backward(dout, query, key, value, output, lse, *self)


class Merged:
    """The merged blocks, in float32 or wider: a sum of outputs, weighted by each block's share of exponentials."""

    def __init__(self, output: Tensor, lse: Tensor) -> None:
        self.dtype = output.dtype
        self.output = output.to(lse.dtype, copy=True)
        self.lse = lse.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # [rows, H]

    def add(self, output: Tensor, lse: Tensor, rows: Tensor | None = None) -> None:
        """Add a block of all rows, or of the rows with the indices `rows`."""
        added = lse.transpose(0, 1)
        logs = self.lse if rows is None else self.lse.index_select(0, rows)
        merged = self.output if rows is None else self.output.index_select(0, rows)
        empty = added == -torch.inf
        share = torch.sigmoid(added - logs).masked_fill_(empty, 0.0)[..., None]
        # In place, and without a wider copy of the block's output: these passes are all that a ring adds to attention.
        merged.mul_(1 - share).addcmul_(output, share)
        logs.copy_(torch.where(empty, logs, logs - torch.nn.functional.logsigmoid(logs - added)))
        if rows is not None:
            self.output.index_copy_(0, rows, merged)
            self.lse.index_copy_(0, rows, logs)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return the output in the blocks' dtype and the logs of sums [H, rows], contiguous."""
        return self.output.to(self.dtype), self.lse.transpose(0, 1).contiguous()
