"""Attention of some queries with some keys: blocks that ring attention merges into a whole attention.

A block returns its output [rows, H, D] and the log of each row's sum of exponentials [H, rows]. Its backward pass takes
the output and the logs of the whole attention, which give the probabilities of the whole, so gradients of blocks add
up. These functions have no derivatives and do not check their arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._device import empty_on, launch_rule
from . import config, reference
from .op_common import FAMILY
from .op_packed import cudnn_takes
from .op_varlen import VARLEN_ATTENTION, takes

kernels_merge = _library.LazyModule(f"{__package__}.kernels_merge")

# Blocks that are put together at a time. Four ranks of a ring then need one pass over memory.
MOST_PARTS = 4


class Block(NamedTuple):
    """Bounds of the sequences of queries and keys, their greatest lengths, scale, and how far a query sees.

    `sequences` is their number if all have the greatest lengths and fill all rows; 0 says that only the device knows.
    """

    bounds: Tensor
    bounds_k: Tensor
    longest: int
    longest_k: int
    scale: float
    left: int = -1
    right: int = -1
    sequences: int = 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [rows, H, D] and the logs of sums [H, rows]."""
        if self._suits_cudnn(query, key, value):
            return self._cudnn_forward(query, key, value)
        arguments = (query, key, value, self.bounds, self.bounds_k, None, *self._settings())
        run = VARLEN_ATTENTION.run if takes(*arguments) else VARLEN_ATTENTION.run_reference
        return run(*arguments)  # type: ignore[return-value]

    def backward(self, dout: Tensor, tensors: tuple[Tensor, ...], output: Tensor, lse: Tensor) -> Any:
        """Return the gradients of query, key and value, from output and logs of sums of the whole attention."""
        if self._suits_cudnn(*tensors, output, dout):
            return self._cudnn_backward(dout, tensors, output, lse)
        settings, bounds = self._settings(), (self.bounds, self.bounds_k)
        saved = (*tensors, *bounds, None, output, lse)
        if takes(*tensors, *bounds, None, *settings) and _library.runs_triton_now(FAMILY, tensors[0]):
            return VARLEN_ATTENTION.run_backward((dout,), saved, settings, [True] * 3)
        edges = (self.bounds.tolist(), self.bounds_k.tolist())
        query, key, value = tensors
        masks = (self.scale, self.left, self.right)
        return reference.varlen_attention_backward(dout, query, key, value, output, lse, edges, *masks)

    def _settings(self) -> tuple[Any, ...]:
        return self.longest, self.longest_k, self.scale, self.left, self.right, 0.0, True

    def _suits_cudnn(self, query: Tensor, key: Tensor, *others: Tensor) -> bool:
        """Return whether cuDNN computes this block; it is faster than our kernels for equal lengths.

        With a causal mask queries and keys have equal lengths, so both conventions for the mask's corner agree.
        """
        if not self.sequences or not query.is_cuda or self.left >= 0 or self.right > 0:
            return False
        (total, heads, head_dim), shortest = query.shape, config.CUDNN_SHORTEST
        shape = torch.Size((total, 3, heads, head_dim))
        if not cudnn_takes(shape, query.dtype, self.sequences, self.longest, query.device):
            return False
        if self.longest_k < shortest or not _library.runs_triton_now(FAMILY, query):
            return False
        # cuDNN's plans are cached without the strides of output and gradient, so all tensors must be contiguous.
        tensors = (query, key, *others)
        if not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors):
            return False
        causal, grouped = self.right == 0, query.shape[1] != key.shape[1]
        queries, keys = self._batch(query), self._batch(key)
        parameters = torch.backends.cuda.SDPAParams(queries, keys, keys, None, 0.0, causal, grouped)
        return torch.backends.cuda.can_use_cudnn_attention(parameters)

    def _batch(self, rows: Tensor) -> Tensor:
        """Return packed rows [Z * length, H, D] as a batch [Z, H, length, D]."""
        return rows.view(self.sequences, -1, *rows.shape[1:]).transpose(1, 2)

    def _cudnn_forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        batch = (self._batch(tensor) for tensor in tensors)
        # No bias, with logs of sums, no dropout.
        output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            *batch, None, True, 0.0, self.right == 0, scale=self.scale
        )
        rows, heads = tensors[0].shape[:2]
        logs = lse.view(self.sequences, heads, -1).transpose(0, 1)
        return output.transpose(1, 2).reshape(tensors[0].shape), logs.reshape(heads, rows)

    def _cudnn_backward(self, dout: Tensor, tensors: tuple[Tensor, ...], output: Tensor, lse: Tensor) -> list[Tensor]:
        batch = (self._batch(tensor) for tensor in (dout, *tensors, output))
        logs = lse.view(lse.shape[0], self.sequences, -1).transpose(0, 1).contiguous()
        if _logs_of_cudnn_have_columns():
            logs = logs[..., None]
        seed = torch.empty((), dtype=torch.int64, device=dout.device)  # read only with dropout
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            *batch, logs, seed, seed, None, None, None, self.longest, self.longest_k, 0.0, self.right == 0,
            scale=self.scale,
        )  # fmt: skip
        return [
            gradient.transpose(1, 2).reshape(tensor.shape) for gradient, tensor in zip(gradients, tensors, strict=True)
        ]


@functools.cache
def _logs_of_cudnn_have_columns() -> bool:
    """Return whether cuDNN's logs of sums are [Z, H, length, 1], as since PyTorch 2.9, and not [Z, H, length]."""
    query = torch.empty((1, 1, 128, 64), dtype=torch.float16, device="meta")
    results = torch.ops.aten._scaled_dot_product_cudnn_attention.default(query, query, query, None, True)
    return results[1].dim() == 4


class Part(NamedTuple):
    """A block's outputs [rows, H, D] with logs of sums, or its gradients; `partial` if it has some rows only."""

    result: Tensor
    lse: Tensor | None
    partial: bool


def merge_parts(parts: Sequence[Part], places: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return outputs weighted by each part's share of the sum of exponentials, and the logs of the whole sums.

    Parts without logs of sums are added. `places[i]` is the index of row i in the results of partial parts, -1 if they
    lack it. There are at most `MOST_PARTS` parts. The result has `dtype`; sums are in float32 or wider.
    """
    if not _library.runs_triton_now(FAMILY, parts[0].result) or not parts[0].result.numel():
        return reference.merged(parts, places, dtype)
    return launch_merge(parts, places, dtype)


def launch_merge(parts: Sequence[Part], places: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return `merge_parts` by the kernel; at least one part has all rows."""
    weighted = parts[0].lse is not None
    whole = next(part for part in parts if not part.partial)
    partial_rows = next((part.result.shape[0] for part in parts if part.partial), 0)
    (rows, heads, head_dim), empty = whole.result.shape, empty_on(whole.result.device)
    result = empty((rows, heads, head_dim), (heads * head_dim, head_dim, 1), dtype)
    lse = empty((heads, rows), (rows, 1), torch.float32) if weighted else None
    absent = [None] * (MOST_PARTS - len(parts))
    launch = _merge_launch(rows, partial_rows, heads, head_dim, tuple(part.partial for part in parts), weighted)
    results, logs = [part.result.contiguous() for part in parts], [part.lse for part in parts]
    launch((*results, *absent, *logs, *absent, places if partial_rows else None, result, lse))
    return result, lse


@launch_rule
def _merge_launch(
    rows: int, partial_rows: int, heads: int, head_dim: int, partial: tuple[bool, ...], weighted: bool
) -> Any:
    """Return the prepared kernel: a program takes some rows of one head."""
    block = config.head_block(head_dim)
    block_rows = config.MERGED_ELEMENTS // block
    flags = {f"PARTIAL_{index}": index < len(partial) and partial[index] for index in range(MOST_PARTS)}
    return kernels_merge.attention_merge.prepare(
        (-(-rows // block_rows) * heads,),
        (rows, partial_rows, heads, head_dim),
        BLOCKS=len(partial),
        **flags,
        WEIGHTED=weighted,
        BR=block_rows,
        BD=block,
        num_warps=4,
    )
