"""float8 copies of matrices for products of float8 numbers, made in one pass with their transposed copies.

No `Op` declares the operators: an `Op` has a derivative, and rounding has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._device import launch_rule, next_power_of_2
from . import config, reference

kernels = _library.LazyModule(f"{__package__}.kernels")

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def amax(input: Tensor, by_row: bool, compiling: bool = False) -> Tensor:
    """Return largest magnitudes: `by_row` of each row, then of each column; else of parts that cover the matrix.

    A NaN in the matrix makes its largest magnitude NaN. While `compiling`, PyTorch's operators compute the maximum of a
    whole matrix: Inductor fuses it with the code that computes the matrix.
    """
    if not compiling:
        return _amax(input, by_row)
    return torch.ops.apex.float8_amax(input) if by_row else reference.amax(input, False)


def cast_both(
    input: Tensor, amax: Tensor, by_row: bool, dtype: torch.dtype, compiling: bool = False
) -> tuple[Tensor, ...]:
    """Return a float8 copy of a contiguous matrix, the transposed copy, and the inverse scales of both, float32.

    There is one scale for the matrix, or `by_row` one for each row of the copy and one for each row of the transposed
    copy, as a column. `amax` is the result of `amax(input, by_row)`, or any one magnitude: larger numbers become the
    format's largest. While `compiling`, this is one operator.
    """
    return (torch.ops.apex.float8_cast if compiling else _cast)(input, amax, by_row, dtype)


def formats(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Return the device's float8 formats of numbers and of gradients; MI300 has formats without infinity."""
    if device.type == "cuda" and torch.version.hip and "gfx94" in _architecture(device):
        return torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    return torch.float8_e4m3fn, torch.float8_e5m2


def obstacle(device: torch.device) -> str | None:
    """Return why the device cannot multiply float8 matrices; None if it can."""
    if device.type != "cuda":
        return f"a device of type {device.type!r} does not multiply float8 matrices"
    if torch.version.hip:
        name = _architecture(device)
        return None if name.startswith(("gfx94", "gfx95", "gfx12")) else f"{name} does not multiply float8 matrices"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"compute capability {capability[0]}.{capability[1]} has no float8; 8.9 is the first that does"
    return None


def _architecture(device: torch.device) -> str:
    return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]


def product(
    left: Tensor, right: Tensor, left_inverse: Tensor, right_inverse: Tensor, dtype: torch.dtype, quick: bool = False
) -> Tensor:
    """Return `left` @ `right`.T of float8 matrices with these inverse scales, in `dtype`; emulated off a GPU.

    `quick` lets the GPU add up products with fewer bits, as is usual for activations and not for gradients.
    """
    if not left.is_cuda:
        return reference.product(left, right, left_inverse, right_inverse, dtype)
    by_row = left_inverse.dim() > 0
    inverse = right_inverse.reshape(1, -1) if by_row else right_inverse
    # PyTorch has products with one scale per row only in bfloat16.
    product_dtype = torch.bfloat16 if by_row else dtype
    return torch._scaled_mm(left, right.t(), left_inverse, inverse, out_dtype=product_dtype, use_fast_accum=quick).to(
        dtype
    )


def _amax(input: Tensor, by_row: bool) -> Tensor:
    if not input.numel() or not _library.runs_triton(FAMILY, input):
        return reference.amax(input, by_row)
    if by_row:
        rows, columns = input.shape
        largest = torch.zeros(rows + columns, dtype=torch.float32, device=input.device)
        tile = config.AMAX_TILE
        column_blocks = -(-columns // tile.columns)
        kernels.float8_amax_both(
            (-(-rows // tile.rows) * column_blocks,),
            (input, largest.view(torch.int32)),
            (rows, columns, column_blocks),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            num_warps=tile.num_warps,
        )
        return largest
    programs = max(1, min(config.MOST_PARTIALS, -(-input.numel() // config.AMAX_BLOCK)))
    largest = torch.empty(programs, dtype=torch.float32, device=input.device)
    _amax_launch(input.numel(), programs)((input, largest.view(torch.int32)))
    return largest


@launch_rule
def _amax_launch(elements: int, programs: int) -> Any:
    return kernels.float8_amax.prepare(
        (programs,), (elements, programs), BLOCK=config.AMAX_BLOCK, num_warps=config.AMAX_WARPS
    )


def amax_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """Return the dtypes of tensors on a device that `write_amax` takes; none if kernels do not run there."""
    dtypes = FAMILY.triton_dtypes
    return frozenset(dtype for dtype in dtypes if _library.explain(FAMILY, device, dtype).implementation == "triton")


def fills_memory(input: Tensor) -> bool:
    """Return whether `write_amax` can read a tensor: a plain one whose elements fill its memory, in any order."""
    if type(input) not in _library.PLAIN:
        return False
    # The debug function returns 0 exactly for tensors that PyTorch calls non-overlapping and dense.
    return input.is_contiguous() or not torch._debug_has_internal_overlap(input)


def write_amax(input: Tensor, partials: Tensor) -> Any:
    """Fill `partials`, contiguous int32, with the largest magnitudes of parts that together cover a tensor.

    Magnitudes are the bits of float32 numbers, as in `kernels`. Reads `input` once, in one launch, which is quickest
    with `WRITE_PARTIALS` parts. Return the direct launch for other tensors of this size, dtype and device, if there is
    one: it takes a stream and the addresses of a tensor and of partials.
    """
    launch = _write_launch(input.numel(), partials.numel())
    launch((input, partials))
    return launch.direct((input, partials))


@launch_rule
def _write_launch(elements: int, programs: int) -> Any:
    return kernels.float8_amax_from_end.prepare(
        (programs,), (elements, programs), BLOCK=config.WRITE_BLOCK, num_warps=config.WRITE_WARPS
    )


def _cast(input: Tensor, amax: Tensor, by_row: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    if not input.numel() or not _library.runs_triton(FAMILY, input):
        return reference.cast_both(input, amax, by_row, dtype)
    results = _empty(input, by_row, dtype)
    launch = _cast_launch(*input.shape, len(amax), by_row, dtype)
    launch((input, amax.view(torch.int32), *results))
    return results


def _empty(input: Tensor, by_row: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = input.shape
    return (
        torch.empty(rows, columns, dtype=dtype, device=input.device),
        torch.empty(columns, rows, dtype=dtype, device=input.device),
        torch.empty((rows, 1) if by_row else (), dtype=torch.float32, device=input.device),
        torch.empty((columns, 1) if by_row else (), dtype=torch.float32, device=input.device),
    )


@launch_rule
def _cast_launch(rows: int, columns: int, partials: int, by_row: bool, dtype: torch.dtype) -> Any:
    tile = config.CAST_TILE
    column_blocks = -(-columns // tile.columns)
    return kernels.float8_cast.prepare(
        (-(-rows // tile.rows) * column_blocks,),
        (rows, columns, column_blocks, partials),
        LIMIT=torch.finfo(dtype).max,
        BY_ROW=by_row,
        PARTIALS=1 if by_row else next_power_of_2(partials),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        FULL=rows % tile.rows == 0 and columns % tile.columns == 0,
        num_warps=tile.num_warps,
    )


FAMILY = _library.register_family(
    _library.OpFamily("float8", "float8 copies of matrices with their scales and transposed copies")
)

_library.register_op(
    "float8_amax(Tensor input) -> Tensor",
    lambda input: _amax(input, True),
    lambda input: input.new_empty(input.shape[0] + input.shape[1], dtype=torch.float32),
)
_library.register_op(
    "float8_cast(Tensor input, Tensor amax, bool by_row, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    _cast,
    lambda input, amax, by_row, dtype: _empty(input, by_row, dtype),
)
