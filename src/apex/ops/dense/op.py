"""The parts of dense layers, without autograd: which implementation runs, given tensors that were found fit.

Matrix products are PyTorch's, whose epilogues add the bias and apply relu (and, where no gradient is wanted, gelu).
What they leave undone, gelu that keeps its input and the gradients of an activation and of a bias, takes one pass each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._checks import check_optional_tensors, check_tensors
from .launches import (
    ActivationPlan,
    activation_plan,
    triton_accumulate,
    triton_activation_backward,
    triton_gelu,
)
from .reference import ACTIVATIONS
from .self_check import self_check

_HALF = (torch.float16, torch.bfloat16)

# Elements of a layer below which PyTorch's operators with their own autograd are left to it, because the host is the
# limit. In microseconds on an H200, forward and backward: the perceptron 64x[256]*4 took 15 and 301 in our node, 22 and
# 354 as operators, 4096x[1024]*4 50 and 135 against 66 and 155, and smaller ones were not measured. dense_gelu_dense
# 4096x1024x4096 (2^24 elements) took 172 and 289 in our node, 128 and 294 as operators, 8192x1024x4096 (2^25) 227 and
# 452 against 233 and 476, 8192x4096x16384 (2^27) 3390 and 6780 against 3470 and 6870.
SMALL = 1 << 14
SMALL_BETWEEN_LAYERS = 1 << 25  # of dense_gelu_dense

FAMILY = _library.register_family(
    _library.OpFamily(
        "dense",
        "dense layers, gelu, MLP: gradients of activation and bias in one pass",
        self_check,
        small_inputs=f"PyTorch's operators below {SMALL:,} elements per layer of a perceptron, "
        f"{SMALL_BETWEEN_LAYERS:,} between dense layers",
    )
)


def is_large(elements: int, between_layers: bool = False) -> bool:
    """Whether a layer with so many elements is for our kernels, as one of a perceptron or of dense_gelu_dense."""
    limit = SMALL_BETWEEN_LAYERS if between_layers else SMALL
    return elements >= limit or (elements > 0 and _library.requested() == "triton")


def as_rows(tensor: Tensor) -> Tensor:
    """A tensor [..., features] with two dimensions."""
    if tensor.dim() == 2:
        return tensor
    return tensor[None] if tensor.dim() == 1 else tensor.flatten(0, -2)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`input` [..., in] times `weight` [out, in], transposed, plus `bias`: one call of the BLAS library."""
    return functional.linear(input, weight, bias)


def gelu(input: Tensor) -> Tensor:
    """The tanh form, as the BLAS libraries have it, without autograd."""
    if (
        is_large(input.numel(), between_layers=True)
        and not torch.compiler.is_compiling()
        and _library.runs_triton(FAMILY, input)
    ):
        return triton_gelu(input)
    return functional.gelu(input, approximate="tanh")


def activated_linear(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """A layer without autograd, for an `input` of two dimensions."""
    if activation == "none":
        return functional.linear(input, weight, bias)
    if bias is not None and input.is_cuda:  # elsewhere the product is followed by another operator anyway
        if activation == "relu":
            return torch._addmm_activation(bias, input, weight.t())
        if activation == "gelu":
            return torch._addmm_activation(bias, input, weight.t(), use_gelu=True)
    output = functional.linear(input, weight, bias)
    if activation == "relu":
        return output.relu_()
    return output.sigmoid_() if activation == "sigmoid" else gelu(output)


def plan_activation_backward(
    output: Tensor, activation: str, bias_grad: bool, shape: tuple[int, int] | None = None
) -> ActivationPlan | None:
    """How `activation_backward` will run for gradients like `output`, where that is by a kernel.

    With `shape` for those that are such a matrix in memory, whatever their dimensions.
    """
    if activation == "none" or not output.numel() or torch.compiler.is_compiling():
        return None
    return activation_plan(output, activation, bias_grad, shape) if _library.runs_triton(FAMILY, output) else None


def activation_backward(
    dy: Tensor,
    saved: Tensor | None,
    activation: str,
    bias_grad: bool,
    in_place: bool = False,
    plan: ActivationPlan | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients before an activation, and of the bias before that, without autograd; all of two dimensions.

    `saved` is the activation's output, for gelu its input, None without activation. With `in_place`, `dy` may be
    overwritten. `plan` is what `plan_activation_backward` gave for the same arguments.
    """
    if activation == "none" or saved is None:
        return dy, dy.sum(0) if bias_grad else None
    if torch.compiler.is_compiling():
        dz, dbias = torch.ops.apex.activation_backward(dy, saved, activation, bias_grad)
        return dz, dbias if bias_grad else None
    if plan is not None:
        return triton_activation_backward(dy, saved, activation, bias_grad, in_place, plan)
    return activation_backward_now(dy, saved, activation, bias_grad, in_place)


def activation_backward_now(
    dy: Tensor, saved: Tensor, activation: str, bias_grad: bool, in_place: bool
) -> tuple[Tensor, Tensor | None]:
    if dy.numel() and dy.dtype == saved.dtype and _library.runs_triton(FAMILY, dy):
        return triton_activation_backward(dy, saved, activation, bias_grad, in_place)
    if dy.dtype in _HALF and (activation == "sigmoid" or not dy.is_cuda):  # PyTorch would round every step of it
        dz, dbias = activation_backward_now(dy.float(), saved.float(), activation, bias_grad, in_place)
        return dz.to(dy.dtype), None if dbias is None else dbias.to(dy.dtype)
    if activation == "relu":
        dz = torch.ops.aten.threshold_backward(dy, saved, 0)
    elif activation == "sigmoid":
        dz = torch.ops.aten.sigmoid_backward(dy, saved)
    else:
        dz = torch.ops.aten.gelu_backward(dy, saved, approximate="tanh")
    return dz, dz.sum(0) if bias_grad else None


def wgrad_gemm_accum(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """d_weight [out, in] += d_output [..., out]^T input [..., in], in place, accumulated and added in float32.

    `d_weight` has the dtype of the others, or is float32 where they are in half precision.
    """
    input, d_output = as_rows(input), as_rows(d_output)
    _check_accumulation(input, d_output, d_weight)
    if torch.compiler.is_compiling():
        torch.ops.apex.wgrad_gemm_accum(input, d_output, d_weight)
        return
    with torch.no_grad():
        accumulate_now(input, d_output, d_weight)


def accumulate_now(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    if d_weight.dtype == input.dtype:
        d_weight.addmm_(d_output.t(), input)
    elif _library.runs_triton(FAMILY, input) and d_weight.numel() and input.shape[0]:
        if _library.requested() == "auto" and _torch_accumulates(input.device, input.dtype):
            torch.addmm(d_weight, d_output.t(), input, out_dtype=torch.float32, out=d_weight)
        elif d_weight.is_contiguous():
            triton_accumulate(input.contiguous(), d_output.contiguous(), d_weight)
        else:
            product = torch.zeros_like(d_weight, memory_format=torch.contiguous_format)
            triton_accumulate(input.contiguous(), d_output.contiguous(), product)
            d_weight += product
    else:
        d_weight.addmm_(d_output.t().to(d_weight.dtype), input.to(d_weight.dtype))


@functools.cache
def _torch_accumulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch adds a half-precision product to a float32 matrix in one call, as CUDA's does since 2.9."""
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def check_input(input: Tensor) -> int:
    """The number of values per row."""
    check_tensors(input=input)
    if input.dim() < 1 or not input.is_floating_point():
        raise ValueError(
            f"input must have at least one dimension and a floating dtype, got shape {list(input.shape)} and "
            f"{input.dtype}"
        )
    return input.shape[-1]


def fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a layer surely is in order: the quick question before those of `check_input` and `check_layer`."""
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))):
        return False
    shape, dtype = weight.shape, weight.dtype
    return (
        len(shape) == 2
        and input.dim() > 0
        and input.shape[-1] == shape[1]
        and input.dtype == dtype
        and dtype.is_floating_point
        and (bias is None or (bias.shape == (shape[0],) and bias.dtype == dtype))
    )


def check_layer(
    input: Tensor,
    width: int,
    weight: Tensor,
    bias: Tensor | None,
    names: tuple[str, str] = ("weight", "bias"),
    *,
    same_dtype: bool,
) -> int:
    """The number of outputs of a layer that gets `width` values, after its parameters were found fit."""
    check_tensors(**{names[0]: weight})
    check_optional_tensors(**{names[1]: bias})
    shape = weight.shape
    if len(shape) != 2 or shape[1] != width:
        raise ValueError(f"{names[0]} has shape {list(shape)}, expected [out, {width}] for rows of {width} values")
    if bias is not None and bias.shape != shape[:1]:
        raise ValueError(f"{names[1]} has shape {list(bias.shape)}, expected [{shape[0]}] beside {names[0]}")
    if same_dtype and (weight.dtype != input.dtype or (bias is not None and bias.dtype != input.dtype)):
        raise TypeError(
            f"{names[0]} is {weight.dtype}, {names[1]} {bias if bias is None else bias.dtype} and the input "
            f"{input.dtype}; they must be the same outside of autocast"
        )
    return shape[0]


def check_dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, *, same_dtype: bool
) -> None:
    width = check_layer(input, check_input(input), weight1, bias1, ("weight1", "bias1"), same_dtype=same_dtype)
    check_layer(input, width, weight2, bias2, ("weight2", "bias2"), same_dtype=same_dtype)


def check_mlp(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str, *, same_dtype: bool
) -> None:
    if activation not in ACTIVATIONS[:3]:
        raise ValueError(f"activation {activation!r} is not known; use none, relu or sigmoid")
    if not weights or (biases and len(biases) != len(weights)):
        raise ValueError(
            f"got {len(weights)} weights and {len(biases)} biases; use one weight or more, and as many biases or none"
        )
    width, dtype = check_input(input), input.dtype
    for layer, weight in enumerate(weights):
        bias = biases[layer] if biases else None
        if not isinstance(weight, Tensor) or (biases and not isinstance(bias, Tensor)):
            check_tensors(**{f"weight {layer}": weight, f"bias {layer}": bias})
        shape = weight.shape
        if not (  # the quick questions first
            len(shape) == 2
            and shape[1] == width
            and (bias is None or bias.shape == shape[:1])
            and (not same_dtype or (weight.dtype == dtype and (bias is None or bias.dtype == dtype)))
        ):
            check_layer(input, width, weight, bias, (f"weight {layer}", f"bias {layer}"), same_dtype=same_dtype)
        width = shape[0]


def _check_accumulation(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    if input.shape[0] != d_output.shape[0] or d_weight.shape != (d_output.shape[1], input.shape[1]):
        raise ValueError(
            f"d_weight has shape {list(d_weight.shape)}, expected [out, in] for input {list(input.shape)} and d_output "
            f"{list(d_output.shape)}, which must have as many rows"
        )
    half = input.dtype in _HALF
    if input.dtype != d_output.dtype or not (d_weight.dtype == input.dtype or (half and d_weight.dtype == torch.float)):
        raise TypeError(
            f"input is {input.dtype}, d_output {d_output.dtype} and d_weight {d_weight.dtype}; the first two must be "
            "the same, and d_weight that too, or float32 beside half precision"
        )
