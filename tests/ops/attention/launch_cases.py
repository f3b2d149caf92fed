"""Launches of the attention kernels that no example reaches, to compile for every GPU."""

from __future__ import annotations

import torch

from apex.ops._device import facts
from apex.ops.attention import op_biased, op_blocks, op_packed, op_varlen
from apex.ops.attention.op_common import Problem, output_launch

_META = torch.device("meta")


def _biased(
    shape: tuple[int, ...],
    keys: int,
    dtype: torch.dtype,
    mask: tuple[int, ...],
    bias: tuple[int, ...] | None,
    bias_grads: tuple[bool, ...],
) -> None:
    """Forward, and backward with or without a gradient of the bias."""
    query = torch.empty(shape, dtype=dtype, device=_META)
    key = torch.empty(*shape[:2], keys, shape[3], dtype=dtype, device=_META)
    added = [None if size is None else torch.empty(size, dtype=dtype, device=_META) for size in (mask, bias)]
    output, statistics = op_biased.launch_forward(query, key, key, *added, 1e9)
    for bias_grad in bias_grads:
        wanted = (True, True, True, bias_grad)
        op_biased.launch_backward(query, query, key, key, *added, output, statistics, 1e9, wanted)


def _packed(
    shape: tuple[int, ...], sequences: int, length: int, dtype: torch.dtype, dropout_p: float, zero_tail: bool
) -> None:
    """Forward and backward."""
    qkv = torch.empty(shape, dtype=dtype, device=_META)
    cu_seqlens = torch.empty(sequences + 1, dtype=torch.int32, device=_META)
    seed = torch.empty(1, dtype=torch.int64, device=_META) if dropout_p else None
    given, settings = (qkv, cu_seqlens, seed), (length, dropout_p, zero_tail, False)
    output, statistics = op_packed.launch_forward(*given, *settings)
    op_packed.launch_backward(output, *given, output, statistics, *settings, [True])


def _varlen(heads: int, size: int, dtype: torch.dtype, window: tuple[int, int], dropout_p: float = 0.0) -> None:
    """Forward and backward of 16 sequences with heads in groups of four."""
    query = torch.empty(65536, heads, size, dtype=dtype, device=_META)
    key = torch.empty(65536, heads // 4, size, dtype=dtype, device=_META)
    bounds = torch.empty(17, dtype=torch.int32, device=_META)
    seed = torch.empty(1, dtype=torch.int64, device=_META) if dropout_p else None
    given, settings = (query, key, key, bounds, bounds, seed), (4096, 4096, 0.1, *window, dropout_p, False)
    output, statistics = op_varlen.launch_forward(*given, *settings)
    op_varlen.launch_backward(output, *given, output, statistics, *settings, [True] * 3)


def _merge(partial: tuple[bool, ...], weighted: bool, dtype: torch.dtype) -> None:
    """Put blocks of 8192 rows, or of half of them, together."""
    parts = []
    for some in partial:
        rows = 4096 if some else 8192
        lse = torch.empty(32, rows, device=_META) if weighted else None
        parts.append(op_blocks.Part(torch.empty(rows, 32, 128, dtype=torch.bfloat16, device=_META), lse, some))
    op_blocks.launch_merge(parts, torch.empty(8192, dtype=torch.int64, device=_META), dtype)


def _behind_cudnn() -> None:
    """The launch that checks cuDNN's attention, with the tensors that cuDNN would have left."""
    problem = Problem(16, 16, 512, 512, 128, torch.bfloat16, _META, total=8192, cudnn_first=True)
    tensor = torch.empty(1, dtype=torch.bfloat16, device=_META)
    number = torch.empty(1, dtype=torch.float32, device=_META)
    cu_seqlens = torch.empty(17, dtype=torch.int32, device=_META)
    of_rows, of_output = (0, 128, 3 * 16 * 128), (0, 128, 16 * 128)
    tensors = (tensor, tensor, tensor, None, None, cu_seqlens, None, None, tensor, number)
    launch = output_launch(problem, (*of_rows * 3, *of_output), True, facts(_META))
    launch(tensors, (problem.scale, 0.0, 1.0))


def record() -> None:
    """Plan biases without a gradient and long ones, a mask alone, dropout, one row, windows, merges, cuDNN's check."""
    _biased((256, 4, 256, 32), 256, torch.bfloat16, (256, 1, 1, 256), (1, 4, 256, 256), (False,))
    _biased((64, 8, 131, 24), 67, torch.float32, (1, 1, 1, 67), None, (False,))
    _biased((3, 2, 536, 64), 536, torch.float16, (3, 1, 1, 536), (1, 2, 536, 536), (True,))
    _packed((9000, 3, 16, 64), 32, 512, torch.float16, 0.1, True)
    _packed((1, 3, 1, 1), 1, 1, torch.float16, 0.0, True)  # Triton makes constants of all sizes and strides that are 1
    _varlen(32, 128, torch.bfloat16, (-1, 0))
    _varlen(32, 128, torch.bfloat16, (4096, 0))
    _varlen(8, 64, torch.float32, (128, 64), 0.1)
    _merge((False, False, True, True), True, torch.bfloat16)
    _merge((False, True), False, torch.float32)
    _behind_cudnn()
