"""float8 matrices with a scale per block of 128 numbers of a row, or per block of 128 x 128, and their products.

Inverse scales of blocks of a row are float32 [rows, columns / 128] with strides (1, rows). Inverse scales of square
blocks are [rows / 128, columns / 128], and their rows in memory are padded to a multiple of 4 elements. cuBLASLt reads
both as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _library
from .._device import launch_rule
from . import config, reference
from .op import FAMILY
from .reference import BLOCK

kernels = _library.LazyModule(f"{__package__}.kernels_blocks")


def cast_blocks(
    input: Tensor, square: bool, power_of_2: bool, dtype: torch.dtype, compiling: bool = False
) -> tuple[Tensor, ...]:
    """Return a float8 copy of a contiguous matrix, the transposed copy, and the inverse scales of both.

    A scale belongs to 128 numbers of a row of a copy or, if `square`, to 128 x 128 numbers. Sizes are
    multiples of 128. `power_of_2` rounds inverse scales up to powers of two. While `compiling`, this is one operator.
    """
    return (torch.ops.apex.float8_cast_blocks if compiling else _cast)(input, square, power_of_2, dtype)


def block_product(
    left: Tensor,
    right: Tensor,
    left_inverse: Tensor,
    right_inverse: Tensor,
    dtype: torch.dtype,
    compiling: bool = False,
) -> Tensor:
    """Return `left` @ `right`.T of float8 matrices with inverse scales of their blocks, in `dtype`.

    `left` has a scale for each block of a row, `right` too or one for each square block. Runs in cuBLASLt if it has
    products by blocks (Hopper, CUDA 12.9 or newer) and both matrices are e4m3, else in a Triton kernel, and is emulated
    off a GPU.
    """
    call = torch.ops.apex.float8_block_product if compiling else _product
    return call(left, right, left_inverse, right_inverse, dtype)


@functools.lru_cache
def _cublas_multiplies(device: torch.device) -> bool:
    """Return whether PyTorch's scaled_mm takes a scale per block on a device."""
    if device.type != "cuda" or torch.version.hip or not hasattr(F, "scaled_mm"):
        return False
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)


def _product(left: Tensor, right: Tensor, left_inverse: Tensor, right_inverse: Tensor, dtype: torch.dtype) -> Tensor:
    square = right_inverse.shape[0] != right.shape[0]
    is_e4m3 = left.dtype == right.dtype == torch.float8_e4m3fn  # cuBLASLt was not tried with e5m2
    if is_e4m3 and _library.requested == "auto" and _cublas_multiplies(left.device):
        kinds: Any = F.ScalingType  # type: ignore[attr-defined]
        if square:
            padded = right_inverse.stride(0)
            scales, kind = (
                right_inverse.as_strided((padded, right_inverse.shape[0]), (1, padded)),
                kinds.BlockWise128x128,
            )
        else:
            scales, kind = right_inverse, kinds.BlockWise1x128
        return F.scaled_mm(left, right.t(), left_inverse, kinds.BlockWise1x128, scales, kind, output_dtype=dtype)
    if not _library.runs_triton(FAMILY, left_inverse):
        return reference.block_product(left, right, left_inverse, right_inverse, dtype)
    rows, columns = left.shape[0], right.shape[0]
    output = torch.empty(rows, columns, dtype=dtype, device=left.device)
    launch = _product_launch(rows, columns, left.shape[1], right_inverse.stride(0), square)
    launch((left, right, left_inverse, right_inverse, output))
    return output


@launch_rule
def _product_launch(rows: int, columns: int, inner: int, padded: int, square: bool) -> Any:
    tile = config.PRODUCT_TILE
    return kernels.float8_block_product.prepare(
        (-(-rows // tile.rows) * -(-columns // tile.columns),),
        (rows, columns, inner, padded if square else 1),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        GROUP=config.PRODUCT_GROUP,
        SQUARE=square,
        num_warps=tile.num_warps,
        num_stages=config.PRODUCT_STAGES,
    )


def _cast(input: Tensor, square: bool, power_of_2: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    if not input.numel() or not _library.runs_triton(FAMILY, input):
        return reference.cast_blocks(input, square, power_of_2, dtype)
    results = _empty(input, square, power_of_2, dtype)
    _cast_launch(*input.shape, results[2].stride(0), results[3].stride(0), square, power_of_2, dtype)((input, *results))
    return results


@launch_rule
def _cast_launch(
    rows: int, columns: int, padded: int, turned_padded: int, square: bool, power_of_2: bool, dtype: torch.dtype
) -> Any:
    return kernels.float8_cast_blocks.prepare(
        (rows // BLOCK, columns // BLOCK),
        (rows, columns, padded, turned_padded),
        LIMIT=torch.finfo(dtype).max,
        SQUARE=square,
        POWER_OF_2=power_of_2,
        num_warps=config.SQUARE_WARPS if square else config.BLOCK_WARPS,
    )


def _empty(input: Tensor, square: bool, power_of_2: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return memory for the results of `_cast`."""
    rows, columns = input.shape
    return (
        torch.empty(rows, columns, dtype=dtype, device=input.device),
        torch.empty(columns, rows, dtype=dtype, device=input.device),
        reference.empty_scales(rows, columns, square, input.device),
        reference.empty_scales(columns, rows, square, input.device),
    )


_library.register_op(
    "float8_cast_blocks(Tensor input, bool square, bool power_of_2, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _cast,
    _empty,
)
_library.register_op(
    "float8_block_product(Tensor left, Tensor right, Tensor left_inverse, Tensor right_inverse, ScalarType dtype)"
    " -> Tensor",
    _product,
    lambda left, right, left_inverse, right_inverse, dtype: left.new_empty(left.shape[0], right.shape[0], dtype=dtype),
)
