"""Linear layers whose three products (the output and both gradients) multiply float8 matrices."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._arguments import Index, checked
from ..fused_dense import FusedDense, FusedDenseGeluDense
from ..ops import _library, float8
from ..ops._checks import check_floats
from .gather import GatheredWeight

# "tensorwise": one scale per matrix, from its largest magnitude. "rowwise": one for each row of a product's left matrix
# and each column of its right matrix. "delayed": one per matrix, from the largest magnitudes of earlier steps.
# "blockwise": one for each 128 numbers that a product adds up, and for each 128 x 128 numbers of a weight. "mxfp8": a
# power of two for each 32 numbers that a product adds up, emulated everywhere.
SCALINGS = ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8")

# Formats of gradients, in the order of `float8.formats`: e5m2 has more range and fewer digits.
GRADIENTS = ("e4m3", "e5m2")

logger = logging.getLogger("apex.fp8")
_reported: set[tuple[str, int, int]] = set()

# Number of steps whose largest magnitudes are stored, for a layer's input, its weight and the output's gradient.
HISTORY = 16


@checked
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scaling: str = "tensorwise",
    history: Tensor | None = None,
    *,
    power_of_2: bool = False,
    gradients: str | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.linear` by float8 products.

    Tensors saved for the backward pass are float8, half the memory of a bfloat16 layer. The output has autocast's dtype
    if autocast is on, else the input's. If a size is no multiple of 16 (of 128 for "blockwise", 32 for "mxfp8"), which
    GPUs do not support, the product is computed in the usual dtype. Without a GPU the float8 products are emulated;
    "mxfp8" is emulated everywhere. `history`, for delayed scaling, is a float32 tensor of 3 x steps, initially zero,
    which both passes change, unless gradients are off. `power_of_2` rounds the scales of "blockwise" to powers of two.
    `gradients` is the format of the output's gradient, "e4m3" or "e5m2"; by default e5m2 if a matrix has one scale,
    else e4m3.
    """
    check_scaling(scaling, power_of_2, gradients)
    if (scaling == "delayed") != (history is not None):
        raise ValueError("history goes with scaling='delayed'")
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "torch.func neither differentiates nor batches float8 products; use torch.autograd, or apply it to a model "
            "before fp8.convert or after fp8.revert"
        )
    _check_shapes(input, weight, bias, history)
    dtype = _library.autocast_dtype(input) or input.dtype
    rows = input.numel() // max(1, input.shape[-1])
    divisor = size_divisor(scaling)
    compiling = torch.compiler.is_compiling()
    if rows == 0 or any(size % divisor for size in (rows, *weight.shape)) or dtype not in _library.TRITON_DTYPES:
        if rows % divisor and not compiling:
            _report_rows(scaling, rows, weight.shape)
        # The float8 products take weights of another dtype than the input's, such as float32 with bfloat16.
        return F.linear(input, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))
    if history is not None and not torch.is_grad_enabled():
        history = history.clone()  # evaluations, and first passes that are recomputed, are no steps
    flat = input.reshape(rows, -1)
    number = _gradient_format(scaling, gradients, input.device)
    if scaling == "blockwise":
        output = _BlockProduct.apply(flat, weight, power_of_2, dtype, number, compiling)
    elif scaling == "mxfp8":
        output = _MxProduct.apply(flat, weight, dtype, number)
    else:
        output = _Float8Product.apply(flat, weight, history, scaling == "rowwise", dtype, number, compiling)
    output = output.view(*input.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias.to(dtype)


def _gradient_format(scaling: str, gradients: str | None, device: torch.device) -> torch.dtype:
    """Return the float8 format of gradients."""
    if gradients is None:
        # With a scale per row or block, e4m3 has enough range, and half the error of e5m2.
        gradients = "e5m2" if scaling in ("tensorwise", "delayed") else "e4m3"
    if scaling == "mxfp8":
        return (torch.float8_e4m3fn, torch.float8_e5m2)[GRADIENTS.index(gradients)]
    return float8.formats(device)[GRADIENTS.index(gradients)]


def _report_rows(scaling: str, rows: int, shape: torch.Size) -> None:
    """Log, once for each kind of layer, that a call is not multiplied in float8."""
    key = scaling, *shape
    if key not in _reported:
        _reported.add(key)
        logger.warning(
            "a layer of %d inputs and %d outputs multiplied %d rows without float8, because %r needs a multiple of %d; "
            "it is not told again of such layers",
            shape[1], shape[0], rows, scaling, size_divisor(scaling),
        )  # fmt: skip


def _check_shapes(input: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None) -> None:
    """Raise for tensors that are no input, weight, bias and history of one linear layer."""
    check_floats(input=input, weight=weight)
    if weight.dim() != 2 or not input.dim() or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input of shape {list(input.shape)} and weight of shape {list(weight.shape)} do not fit: expected "
            "[..., inputs] and [outputs, inputs]"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, expected floats of shape {list(weight.shape[:1])}")
    if history is not None and (history.dtype != torch.float32 or history.dim() != 2 or history.shape[0] != 3):
        raise ValueError(f"history is {history.dtype} {list(history.shape)}, expected float32 of shape [3, steps]")
    if history is not None and not history.shape[1]:
        raise ValueError("history has no steps, expected at least one column")


def check_scaling(scaling: str, power_of_2: bool = False, gradients: str | None = None) -> None:
    """Raise a ValueError unless `scaling` is one of SCALINGS, and the other options go with it."""
    if scaling not in SCALINGS:
        raise ValueError(f"scaling={scaling!r} is not known; use one of {', '.join(SCALINGS)}")
    if power_of_2 and scaling != "blockwise":
        raise ValueError(f"power_of_2=True goes with scaling='blockwise', not {scaling!r}")
    if gradients is not None and gradients not in GRADIENTS:
        raise ValueError(f"gradients={gradients!r} is not known; use one of {', '.join(GRADIENTS)}, or None")


def size_divisor(scaling: str) -> int:
    """Return the number that all sizes of a float8 product must be multiples of."""
    return {"blockwise": float8.BLOCK, "mxfp8": float8.MX_BLOCK}.get(scaling, 16)


# torch.compile must not trace into this class: PyTorch 2.11 would then pass zeros for a gradient to the backward pass.
# The operations of forward and backward pass are still compiled.
@torch.compiler.allow_in_graph
class _Float8Product(torch.autograd.Function):
    """The autograd node of input @ weight.T; it saves transposed float8 copies of both."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        history: Tensor | None,
        by_row: bool,
        dtype: torch.dtype,
        gradients: torch.dtype,
        compiling: bool,
    ) -> Tensor:
        ctx.dtypes, ctx.history, ctx.options = (input.dtype, weight.dtype), history, (by_row, gradients, compiling)
        number, _ = float8.formats(input.device)
        copy, transposed, inverse, transposed_inverse = _cast(input, 0, history, number, by_row, compiling)
        weight_copy, weight_transposed, weight_inverse, weight_transposed_inverse = _cast(
            weight, 1, history, number, by_row, compiling
        )
        ctx.save_for_backward(
            transposed if ctx.needs_input_grad[1] else None,
            transposed_inverse,
            weight_transposed if ctx.needs_input_grad[0] else None,
            weight_transposed_inverse,
        )
        return float8.product(copy, weight_copy, inverse, weight_inverse, dtype, quick=True)

    @staticmethod
    @_library.once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[no-untyped-def, override]
        transposed, transposed_inverse, weight_transposed, weight_transposed_inverse = ctx.saved_tensors
        input_dtype, weight_dtype = ctx.dtypes
        by_row, dtype, compiling = ctx.options
        copy, dy_transposed, inverse, dy_transposed_inverse = _cast(dy, 2, ctx.history, dtype, by_row, compiling)
        dinput = dweight = None
        if weight_transposed is not None:
            dinput = float8.product(copy, weight_transposed, inverse, weight_transposed_inverse, input_dtype)
        if transposed is not None:
            dweight = float8.product(dy_transposed, transposed, dy_transposed_inverse, transposed_inverse, weight_dtype)
        return dinput, dweight, None, None, None, None, None


@torch.compiler.allow_in_graph  # as for _Float8Product
class _BlockProduct(torch.autograd.Function):
    """The autograd node of input @ weight.T with a scale for each block; it saves transposed float8 copies of both.

    The products of both gradients add up other dimensions than the output's product. The weight's square blocks serve
    both dimensions. Input and gradient are cast twice from the same numbers: along rows and along columns.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        power_of_2: bool,
        dtype: torch.dtype,
        gradients: torch.dtype,
        compiling: bool,
    ) -> Tensor:
        ctx.dtypes, ctx.options = (input.dtype, weight.dtype), (power_of_2, gradients, compiling)
        number, _ = float8.formats(input.device)
        weight_transposed: Tensor
        weight_transposed_inverse: Tensor | None
        copy, transposed, inverse, transposed_inverse = float8.cast_blocks(
            input.contiguous(), False, power_of_2, number, compiling
        )
        if isinstance(weight, GatheredWeight):
            weight_copy, weight_inverse = weight.copy_and_scales()
            # FSDP2 frees the weight and gathers it again for the backward pass, which transposes it then.
            weight_transposed, weight_transposed_inverse = weight, None
        else:
            weight_copy, weight_transposed, weight_inverse, weight_transposed_inverse = float8.cast_blocks(
                weight.contiguous(), True, power_of_2, number, compiling
            )
        saves_input, saves_weight = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        ctx.save_for_backward(
            transposed if saves_input else None,
            transposed_inverse if saves_input else None,
            weight_transposed if saves_weight else None,
            weight_transposed_inverse if saves_weight else None,
        )
        return float8.block_product(copy, weight_copy, inverse, weight_inverse, dtype, compiling)

    @staticmethod
    @_library.once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[no-untyped-def, override]
        transposed, transposed_inverse, weight_transposed, weight_transposed_inverse = ctx.saved_tensors
        input_dtype, weight_dtype = ctx.dtypes
        power_of_2, number, compiling = ctx.options
        copy, dy_transposed, inverse, dy_inverse = float8.cast_blocks(
            dy.contiguous(), False, power_of_2, number, compiling
        )
        dinput = dweight = None
        if isinstance(weight_transposed, GatheredWeight):
            weight_transposed, weight_transposed_inverse = weight_transposed.transposed_and_scales()
        if weight_transposed is not None:
            scales = (inverse, weight_transposed_inverse)
            dinput = float8.block_product(copy, weight_transposed, *scales, input_dtype, compiling)
        if transposed is not None:
            scales = (dy_inverse, transposed_inverse)
            dweight = float8.block_product(dy_transposed, transposed, *scales, weight_dtype, compiling)
        return dinput, dweight, None, None, None, None


@torch.compiler.allow_in_graph  # as for _Float8Product
class _MxProduct(torch.autograd.Function):
    """The autograd node of input @ weight.T with matrices rounded to MXFP8 along the dimension that is added up."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor, dtype: torch.dtype, gradients: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.gradients = gradients
        return float8.mx_product(input, weight, torch.float8_e4m3fn, dtype)

    @staticmethod
    @_library.once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[no-untyped-def, override]
        (input, weight), number = ctx.saved_tensors, ctx.gradients
        dinput = dweight = None
        if ctx.needs_input_grad[0]:
            dinput = float8.mx_product(dy, weight.t(), number, input.dtype)
        if ctx.needs_input_grad[1]:
            dweight = float8.mx_product(dy.t(), input.t(), number, weight.dtype)
        return dinput, dweight, None, None


def _cast(
    matrix: Tensor, role: int, history: Tensor | None, dtype: torch.dtype, by_row: bool, compiling: bool
) -> tuple[Tensor, ...]:
    """Return both float8 copies of a matrix; store its largest magnitude in row `role` of the history."""
    matrix = matrix.contiguous()
    amax = float8.amax(matrix, by_row, compiling)
    if history is not None:
        current, earlier = amax.amax(), history[role].amax()
        # An overflow must reach the product, and must not be stored.
        uses_earlier = current.isfinite() & (earlier > 0)
        stored = torch.where(current.isfinite(), current, earlier)
        amax = torch.where(uses_earlier, earlier, current).reshape(1)
        history[role].copy_(torch.cat((stored.reshape(1), history[role, :-1])))
    return float8.cast_both(matrix, amax, by_row, dtype, compiling)


class _Float8Layer(nn.Module):
    """Base of layers with float8 products: their scaling, and the history of delayed scaling."""

    usual: type[nn.Module]  # the layer that computes the same function without float8
    weights: tuple[str, ...] = ("weight",)
    scaling: str
    power_of_2: bool
    gradients: str | None
    history: Tensor | None

    def set_scaling(self, scaling: str, power_of_2: bool = False, gradients: str | None = None) -> None:
        """Set the scaling of the layer's products, and start a new history if it is "delayed"."""
        check_scaling(scaling, power_of_2, gradients)
        self.scaling, self.power_of_2, self.gradients = scaling, power_of_2, gradients
        self._buffers.pop("history", None)
        self.register_buffer(
            "history", make_history(getattr(self, self.weights[0]), scaling, len(self.weights)), persistent=False
        )

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None, index: int = 0) -> Tensor:
        """Compute the product with the weight at `index` of `weights`."""
        history = None if self.history is None else self.history.view(torch.float32)[3 * index : 3 * index + 3]
        options: Any = {"power_of_2": self.power_of_2, "gradients": self.gradients}
        return linear(input, weight, bias, self.scaling, history, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scaling={self.scaling}"


class Float8Linear(_Float8Layer, nn.Linear):
    """`torch.nn.Linear` by float8 products, with the same parameters and state dict."""

    usual = nn.Linear

    @checked
    def __init__(
        self,
        in_features: Index,
        out_features: Index,
        bias: bool = True,
        *,
        scaling: str = "tensorwise",
        power_of_2: bool = False,
        gradients: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.set_scaling(scaling, power_of_2, gradients)

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias)


class _Float8FusedDense(_Float8Layer, FusedDense):
    """`FusedDense` by float8 products."""

    usual = FusedDense

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias)


class _Float8FusedDenseGeluDense(_Float8Layer, FusedDenseGeluDense):
    """`FusedDenseGeluDense` by float8 products."""

    usual = FusedDenseGeluDense
    weights = ("weight1", "weight2")

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.product(input, self.weight1, self.bias1)
        return self.product(F.gelu(hidden, approximate="tanh"), self.weight2, self.bias2, 1)


LAYERS: dict[type[nn.Module], type[_Float8Layer]] = {
    layer.usual: layer for layer in (Float8Linear, _Float8FusedDense, _Float8FusedDenseGeluDense)
}


def make_history(weight: Tensor, scaling: str, products: int = 1) -> Tensor | None:
    """Return an empty history: the bits of float32 numbers as integers, because `module.half()` does not cast these."""
    if scaling != "delayed":
        return None
    return torch.zeros(3 * products, HISTORY, dtype=torch.int32, device=weight.device)
