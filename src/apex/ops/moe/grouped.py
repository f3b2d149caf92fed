"""Products of sorted rows by PyTorch's `grouped_mm`, if it is quicker than our kernels.

`grouped_mm` takes rows in the order of experts, so tokens are gathered first. Rows without an expert come after the
last offset: their results are garbage, which no later kernel reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import _device, _library
from .._device import DeviceFacts, facts, launch_rule
from . import config

# Public since PyTorch 2.10, private from 2.8 on; absent before.
_grouped_mm: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class Route(NamedTuple):
    """A choice of the products that `grouped_mm` computes: gradients of the matrices, and products by matrices."""

    gradients: bool
    products: bool


OURS = Route(False, False)


def route(x: Tensor, matrices: tuple[Tensor, ...], rows: int, sizes: tuple[int, int, int], plain: bool) -> Route:
    """Return which products `grouped_mm` computes for a number of sorted rows; `sizes` are E, H and F.

    `plain` means that there is no bias, and that the unit is one of `ops.glu`: other calls need our products.
    """
    if _library.requested != "auto" or _grouped_mm is None:
        return OURS
    quick = _is_quick(*sizes, x.dtype, facts(x.device))
    if not _device.pretends():  # tensors of a call that is only planned have no addresses
        quick = quick and all(tensor.data_ptr() % 16 == 0 for tensor in (x, *matrices))
    return Route(quick, quick and plain and rows * sizes[1] * sizes[2] >= config.LARGE_PRODUCTS)


@launch_rule
def _is_quick(experts: int, hidden: int, width: int, dtype: torch.dtype, device: DeviceFacts) -> bool:
    """Return whether `grouped_mm` is a single kernel on a GPU: elsewhere it is a loop that waits for the device.

    It needs strides that are multiples of 16 bytes, and less than 1024 experts.
    """
    return (
        dtype == torch.bfloat16
        and device.backend == "cuda"
        and device.capability == (9, 0)
        and hidden % 8 == 0
        and width % 8 == 0
        and experts < 1024
    )


def multiply(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Return sorted rows [N, inner] times each expert's matrix [E, inner, columns]."""
    return _grouped_mm(rows, matrices, offs=offsets[1:])


def matrix_gradient(left: Tensor, right: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """Return left^T right over each expert's sorted rows, [E, columns of left, columns of right], or the reverse."""
    if transposed:
        left, right = right, left
    return _grouped_mm(left.t(), right, offs=offsets[1:])
