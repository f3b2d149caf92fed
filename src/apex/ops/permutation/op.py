"""The best ways to divide columns among stripes of 4, which a search for a good order of channels needs many times.

`reference.py` defines stripes, windows and splits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from .._device import next_power_of_2
from .._host import HOST
from .._tolerance import excess
from . import reference

kernels = _library.LazyModule(f"{__package__}.kernels")


def best_splits(columns: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each window of columns how much more its best split keeps than split 0, and that split's number.

    `columns` is float32 [C, R], not negative; `windows` is integer [N, 8]. Equal inputs give equal bits.
    """
    check_tensors(columns=columns, windows=windows)
    if columns.dim() != 2 or columns.dtype != torch.float32:
        raise ValueError(f"columns must be a float32 matrix, got {list(columns.shape)} {columns.dtype}")
    if windows.dim() != 2 or windows.shape[1] != 8:
        raise ValueError(f"windows must have 8 columns each, got {list(windows.shape)}")
    if not len(windows):
        return columns.new_empty(0), windows.new_empty(0, dtype=torch.int64)
    if not columns.numel() or not _library.runs_triton(FAMILY, columns):
        return reference.best_splits(columns, windows.to(columns.device, torch.int64))
    return launch(columns.contiguous(), windows.to(columns.device, torch.int32).contiguous())


def launch(columns: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    count, rows = len(windows), columns.shape[1]
    gains = torch.empty(count, dtype=torch.float32, device=columns.device)
    best = torch.empty(count, dtype=torch.int32, device=columns.device)
    block = min(256, max(32, next_power_of_2(rows)))  # 8 elements a thread, whose 35 splits stay in registers
    kernels.best_splits((count,), (columns, windows, gains, best), (rows,), BLOCK=block, num_warps=1)
    return gains, best.long()


def self_check(device: torch.device) -> float:
    """Return the largest error of the gains of some windows, as a multiple of its tolerance."""
    columns = torch.arange(24 * 300, dtype=torch.float32, device=HOST).mul(0.7).sin().abs().view(24, 300)
    windows = torch.arange(24, dtype=torch.int64, device=HOST).view(3, 8)
    gains, _ = best_splits(columns.to(device), windows.to(device))
    expected, _ = reference.best_splits(columns.double(), windows)
    # Both are shifted, because a gain is the difference of two sums of 600 numbers each.
    return float(excess(gains.to(HOST) + 300, expected + 300, torch.float32))


SUMMARY = "the best ways to share columns among stripes of four, for 2:4 sparsity"
FLOAT32 = frozenset({torch.float32})
FAMILY = _library.register_family(_library.OpFamily("permutation", SUMMARY, self_check, triton_dtypes=FLOAT32))
