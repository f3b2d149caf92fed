"""`bias_glu`: checks, dispatch and autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from . import reference
from .launches import triton_backward, triton_forward
from .self_check import self_check

FAMILY = _library.register_family(
    _library.OpFamily("glu", "gated linear units with bias: SwiGLU, GeGLU and ReGLU, forward and backward", self_check)
)

# Positions within a row are 32-bit in the kernels.
LONGEST_ROW = 2**31 - 2**17


def bias_glu(input: Tensor, bias: Tensor | None = None, activation: str = "silu") -> Tensor:
    """activation(gate) * value, where gate and value are the halves of the last dimension of `input` + `bias`.

    `activation` is one of "silu" (SwiGLU), "gelu", "gelu_tanh" (GeGLU) and "relu" (ReGLU). Computed in float32 (float64
    for float64 tensors); the output has the input's dtype, whatever the bias's.
    """
    check(input, bias, activation)
    if not _takes_kernels(input, bias):
        # PyTorch's autograd keeps what the backward pass would have to compute again, at a CPU's pace.
        return reference.forward(input, bias, activation)
    if torch.compiler.is_compiling():
        return torch.ops.apex.glu_forward(input, bias, activation)
    if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
        return _apply_node(input, bias, activation)
    return glu_forward(input, bias, activation)


def glu_forward(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The output for arguments that were checked, without autograd."""
    if _takes_kernels(input, bias) and input.numel():
        return triton_forward(input, bias, activation)
    with torch.no_grad():
        return reference.forward(input, bias, activation)


def glu_backward(
    dy: Tensor, input: Tensor, bias: Tensor | None, activation: str, bias_grad: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Gradients of input and bias for arguments that were checked, without autograd."""
    expected = (*input.shape[:-1], input.shape[-1] // 2)
    if dy.shape != expected or dy.device != input.device:
        raise ValueError(
            f"the gradient has shape {list(dy.shape)} on {dy.device}, expected {list(expected)} on {input.device}"
        )
    if _takes_kernels(input, bias) and input.numel():
        return triton_backward(dy, input, bias, activation, bias_grad)
    with torch.no_grad():
        return reference.backward(dy, input, bias, activation, bias_grad)


def _takes_kernels(input: Tensor, bias: Tensor | None) -> bool:
    return _library.runs_triton(FAMILY, input) and (bias is None or bias.dtype in _library.TRITON_DTYPES)


class GluFunction(torch.autograd.Function):
    """The autograd node behind `bias_glu`; its arguments were checked. Keeps the input and the bias."""

    @staticmethod
    def forward(ctx, input, bias, activation):  # type: ignore[override]
        ctx.save_for_backward(input, bias)
        ctx.activation = activation
        return glu_forward(input, bias, activation)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        input, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
            return *_differentiable_gradients(dy, input, bias, ctx.activation, ctx.needs_input_grad), None
        return *glu_backward(dy, input, bias, ctx.activation, ctx.needs_input_grad[1]), None


_apply_node = _library.quick_apply(GluFunction)


def _differentiable_gradients(dy, input, bias, activation, wanted):
    with torch.enable_grad():
        output = reference.forward(input, bias, activation)
        inputs = [tensor for tensor, needed in zip((input, bias), wanted, strict=False) if needed]
        gradients = iter(torch.autograd.grad(output, inputs, dy, create_graph=True))
    return tuple(next(gradients) if needed else None for needed in wanted[:2])


def check(input: Tensor, bias: Tensor | None, activation: str) -> None:
    """Refuses arguments that do not fit, in clear words."""
    shape = input.shape
    if not (
        activation in reference.ACTIVATIONS
        and shape
        and shape[-1] % 2 == 0
        and shape[-1] <= LONGEST_ROW
        and input.is_floating_point()
        and (bias is None or _fits(bias, input))
    ):
        _explain(input, bias, activation)


def _fits(bias: Tensor, input: Tensor) -> bool:
    return bias.shape == input.shape[-1:] and bias.device == input.device and bias.is_floating_point()


def _explain(input: Tensor, bias: Tensor | None, activation: str) -> None:
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not known; use one of {', '.join(reference.ACTIVATIONS)}")
    if not input.is_floating_point():
        raise TypeError(f"a gated linear unit needs a floating-point input, got {input.dtype}")
    if not input.shape or input.shape[-1] % 2 or input.shape[-1] > LONGEST_ROW:
        raise ValueError(
            f"the last dimension of the input holds gate and value, so it must be even and at most {LONGEST_ROW}; its "
            f"shape is {list(input.shape)}"
        )
    assert bias is not None
    if bias.shape != input.shape[-1:]:
        raise ValueError(f"bias has shape {list(bias.shape)}, expected {list(input.shape[-1:])} as the input's rows")
    if bias.device != input.device:
        raise ValueError(f"bias is on {bias.device}, the input on {input.device}")
    raise TypeError(f"bias must be floating-point, got {bias.dtype}")
