"""Launches of the attention kernels to compile for every GPU: each kernel and flag, at sizes that real models use."""

from __future__ import annotations

import torch

from apex.ops import _device
from apex.ops.attention import launches
from apex.ops.attention.launches import Problem

_META = torch.device("meta")


def record_problem(problem: Problem, added_dtype: torch.dtype) -> None:
    """Forward and backward of one problem, with tensors that have dtypes only."""
    strides = (3 * problem.rows * problem.head_dim, problem.rows * problem.head_dim, problem.head_dim)
    where = _META, _device.facts(_META)
    tensor = torch.empty(1, dtype=problem.dtype, device=_META)
    number = torch.empty(1, dtype=torch.float32, device=_META)
    mask = torch.empty(1, dtype=added_dtype, device=_META) if problem.mask_group else None
    bias = torch.empty(1, dtype=added_dtype, device=_META) if problem.bias_group else None
    cu = torch.empty(1, dtype=torch.int32, device=_META) if problem.is_packed else None
    seed = torch.empty(1, dtype=torch.int64, device=_META) if problem.dropout_p else None
    given = tensor, tensor, tensor, mask, bias, cu, seed
    launches.forward(problem, *(strides,) * 4, True, *where)(*given, tensor, number)
    launches.backward_queries(problem, *(strides,) * 6, *where)(*given, tensor, tensor, number, number, tensor)
    stores = (0, problem.batch) if problem.bias_group else None
    delta, dlogits = (number, None) if stores is None else (None, tensor)
    launches.backward_keys(problem, *(strides,) * 7, stores, *where)(
        *given, tensor, tensor, number, delta, dlogits, tensor, tensor
    )
    if stores is not None:
        launches.backward_stored(problem, strides, strides, stores, *where)(tensor, tensor, tensor)


def record() -> None:
    """Plans and (under `recording`) collects attentions: with all parts, an odd one, packed ones."""
    record_problem(Problem(256, 4, 256, 256, 32, torch.bfloat16, inf=1e9, mask_group=1, bias_group=256), torch.bfloat16)
    record_problem(Problem(64, 8, 131, 67, 24, torch.float32, inf=1e9, mask_group=64), torch.float32)
    record_problem(Problem(32, 16, 512, 512, 64, torch.float16, total=9000, tail=True, dropout_p=0.1), torch.float16)
    filled = Problem(16, 16, 512, 512, 128, torch.bfloat16, total=8192, filled=True)
    record_problem(filled, torch.bfloat16)
