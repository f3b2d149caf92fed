"""Max pooling of [N, H, W, C] in PyTorch's operators: any device and dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._library import compute_dtype


def forward(input: Tensor, window: int, stride: int, padding: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the largest value of each window, and its position in the window, counted row by row."""
    images = input.permute(0, 3, 1, 2)
    output, places = functional.max_pool2d(images, window, stride, padding, return_indices=True)
    first_row, first_column = _firsts(output.shape[2], output.shape[3], stride, padding, input.device)
    index = (places // width - first_row) * window + places % width - first_column
    return output.permute(0, 2, 3, 1), index.to(torch.int8).permute(0, 2, 3, 1)


def backward(
    dy: Tensor, index: Tensor, window: int, stride: int, padding: int, height: int, width: int, *_: Any
) -> Tensor:
    """Return the gradient of the input, summed in float32 for half precision."""
    wide = dy.to(compute_dtype(dy))
    first_row, first_column = _firsts(dy.shape[1], dy.shape[2], stride, padding, dy.device)
    row, column = first_row[..., None] + index // window, first_column[..., None] + index % window
    empty = wide.new_zeros(dy.shape[0], height * width, dy.shape[3])
    dx = empty.scatter_add(1, (row * width + column).flatten(1, 2), wide.flatten(1, 2))
    return dx.view(dy.shape[0], height, width, dy.shape[3]).to(dy.dtype)


def _firsts(rows: int, columns: int, stride: int, padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first row, [rows, 1], and the first column, [columns], of every window; they may be in the padding."""
    row = torch.arange(rows, dtype=torch.int64, device=device) * stride - padding
    column = torch.arange(columns, dtype=torch.int64, device=device) * stride - padding
    return row[:, None], column
