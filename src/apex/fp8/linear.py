"""Linear layers whose three products, of the output and of both gradients, are of float8 matrices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import _library, float8

# One scale for a matrix, or one for each row of the left and each column of the right matrix of a product.
SCALINGS = ("tensorwise", "rowwise")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, scaling: str = "tensorwise") -> Tensor:
    """`torch.nn.functional.linear` by float8 products.

    Matrices are cast with scales from their own largest magnitudes; what is kept for the backward pass is float8, half
    of what a bfloat16 layer keeps. The output has the dtype of autocast where that is on, else the input's. Sizes that
    are no multiples of 16, which GPUs do not take, are multiplied as usual. Off a GPU the products are emulated.
    """
    if scaling not in SCALINGS:
        raise ValueError(f"scaling={scaling!r} is not known; use one of {', '.join(SCALINGS)}")
    dtype = _library.autocast_dtype(input) or input.dtype
    rows = input.numel() // max(1, input.shape[-1])
    if rows % 16 or rows == 0 or weight.shape[0] % 16 or weight.shape[1] % 16 or dtype not in _library.TRITON_DTYPES:
        return F.linear(input, weight, bias)
    output = _Float8Product.apply(input.reshape(rows, -1), weight, scaling == "rowwise", dtype)
    output = output.view(*input.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias.to(dtype)


class _Float8Product(torch.autograd.Function):
    """input @ weight.T; keeps transposed float8 copies of both."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, by_row: bool, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        ctx.dtypes, ctx.by_row = (input.dtype, weight.dtype), by_row
        number, _ = float8.formats(input.device)
        copy, turned, inverse, turned_inverse = float8.cast_both(input.contiguous(), number, by_row)
        weight_copy, weight_turned, weight_inverse, weight_turned_inverse = float8.cast_both(
            weight.contiguous(), number, by_row
        )
        ctx.save_for_backward(
            turned if ctx.needs_input_grad[1] else None,
            turned_inverse,
            weight_turned if ctx.needs_input_grad[0] else None,
            weight_turned_inverse,
        )
        return float8.product(copy, weight_copy, inverse, weight_inverse, dtype, quick=True)

    @staticmethod
    @_library.once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[no-untyped-def, override]
        turned, turned_inverse, weight_turned, weight_turned_inverse = ctx.saved_tensors
        input_dtype, weight_dtype = ctx.dtypes
        _, gradient = float8.formats(dy.device)
        copy, dy_turned, inverse, dy_turned_inverse = float8.cast_both(dy.contiguous(), gradient, ctx.by_row)
        dinput = dweight = None
        if weight_turned is not None:
            dinput = float8.product(copy, weight_turned, inverse, weight_turned_inverse, input_dtype)
        if turned is not None:
            dweight = float8.product(dy_turned, turned, dy_turned_inverse, turned_inverse, weight_dtype)
        return dinput, dweight, None, None


class Float8Linear(nn.Linear):
    """`torch.nn.Linear` by float8 products, with the same parameters and state dict."""

    scaling = "tensorwise"

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self.scaling)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scaling={self.scaling}"
