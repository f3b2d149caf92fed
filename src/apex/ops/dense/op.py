"""Dense layers with autograd: one layer, two with gelu between them, and the multi-layer perceptron.

The Functions have upstream's names and arguments, since clients call them by name. They take inputs of any number of
dimensions, compute only the wanted gradients, and run in the dtype of their tensors even under autocast. No `Op`
declares them, because torch.compile must see their matrix products: only the steps between these are operators
(`parts.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._checks import check_optional_tensors, check_tensors
from . import reference
from .config import is_large, takes_node
from .parts import (
    FAMILY,
    activated_linear,
    activation_backward,
    as_rows,
    gelu,
    gelu_backward,
    launch_activation_backward,
    takes_kernel,
)
from .reference import ACTIVATIONS


def dense(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input` [..., in] through one dense layer, by PyTorch's operator, whose product includes the bias."""
    width = _check_input(input)
    _check_layer(width, weight, bias, input.dtype if _library.autocast_dtype(input) is None else None)
    return functional.linear(input, weight, bias)


def dense_gelu_dense(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str = "gelu",
) -> Tensor:
    """Return `input` [..., in] through two dense layers with gelu (the tanh form) between them.

    `activation` may also be "gelu_erf" (the exact form), "gelu_quick", "silu" or "relu_squared". Under autocast it
    runs in autocast's dtype.
    """
    if activation not in ACTIVATIONS[3:]:
        raise ValueError(f"activation {activation!r} is not known; use one of {', '.join(ACTIVATIONS[3:])}")
    features = _check_input(input)
    dtype = _library.autocast_dtype(input)
    required_dtype = input.dtype if dtype is None else None
    width = _check_layer(features, weight1, bias1, required_dtype, "1")
    _check_layer(width, weight2, bias2, required_dtype, "2")
    needs_graph = torch.is_grad_enabled()
    rows = input.numel() // max(1, features)
    # Without gradients kernels always run: there is no node, and fewer operators. Inductor fuses activations itself.
    takes_operators = needs_graph and not takes_node(rows, features, width)
    if takes_operators or not _library.runs_triton(FAMILY, input):
        return reference.dense_gelu_dense(input, weight1, bias1, weight2, bias2, activation)
    arguments: Any = (*_library.cast_for_autocast(input, weight1, bias1, weight2, bias2), activation)
    return FusedDenseGeluDenseFunc.apply(*arguments) if needs_graph else _infer_dense_gelu_dense(*arguments)


def mlp(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), activation: str = "relu") -> Tensor:
    """Return `input` [..., in] through dense layers, each followed by `activation`: "none", "relu" or "sigmoid".

    Under autocast it runs in autocast's dtype.
    """
    if activation not in ACTIVATIONS[:3]:
        raise ValueError(f"activation {activation!r} is not known; use none, relu or sigmoid")
    layers = len(weights)
    if not layers or (biases and len(biases) != layers):
        raise ValueError(
            f"got {layers} weights and {len(biases)} biases; use one weight or more, and as many biases or none"
        )
    width = _check_input(input)
    dtype = input.dtype if _library.autocast_dtype(input) is None else None
    rows, widest = input.numel() // max(1, width), 0
    for layer, weight in enumerate(weights):
        bias = biases[layer] if biases else None
        if bias is None and biases:
            check_tensors(**{f"bias {layer}": bias})
        width = _check_layer(width, weight, bias, dtype, f" {layer}")
        widest = max(widest, width)
    needs_graph = torch.is_grad_enabled()
    # Without gradients kernels always run: there is no node, and fewer operators.
    if (needs_graph and not is_large(rows * widest)) or not _library.runs_triton(FAMILY, input):
        return reference.mlp(input, weights, biases, activation)
    tensors = (input, *weights, *biases)
    if dtype is None:
        tensors = _library.cast_for_autocast(*tensors)
    if needs_graph:
        return MlpFunction.apply(len(biases) > 0, ACTIVATIONS.index(activation), *tensors)
    rest = tensors[1:]
    return _shaped(mlp_forward(as_rows(tensors[0]), rest[:layers], rest[layers:], activation)[-1], input)


def _check_input(input: Tensor) -> int:
    """Return the number of values per row; raise if `input` is not a floating-point tensor."""
    if type(input) not in _library.PLAIN:
        check_tensors(input=input)
    shape = input.shape
    if not shape or not input.is_floating_point():
        raise ValueError(
            f"input must have at least one dimension and a floating dtype, got shape {list(shape)} and {input.dtype}"
        )
    return shape[-1]


def _check_layer(width: int, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, which: str = "") -> int:
    """Return the number of outputs of a layer for rows of `width` values; raise if its parameters do not fit.

    `dtype` is the required dtype, None under autocast. `which` follows the parameters' names in errors.
    """
    if type(weight) not in _library.PLAIN or not (bias is None or type(bias) in _library.PLAIN):
        check_tensors(**{f"weight{which}": weight})
        check_optional_tensors(**{f"bias{which}": bias})
    shape = weight.shape
    if len(shape) != 2 or shape[1] != width:
        raise ValueError(f"weight{which} has shape {list(shape)}, expected [out, {width}] for rows of {width} values")
    if bias is not None and (bias.dim() != 1 or bias.numel() != shape[0]):
        raise ValueError(f"bias{which} has shape {list(bias.shape)}, expected [{shape[0]}] beside weight{which}")
    if dtype is not None and (weight.dtype != dtype or (bias is not None and bias.dtype != dtype)):
        raise TypeError(
            f"weight{which} is {weight.dtype}, bias{which} {bias if bias is None else bias.dtype} and the input "
            f"{dtype}; they must be the same outside of autocast"
        )
    return shape[0]


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows as a tensor with the leading dimensions of `like`."""
    if like.dim() == 2:
        return rows
    # Not a view of another tensor: autograd would not let a Function's caller change a view in place.
    return torch.ops.aten._unsafe_view.default(rows, (*like.shape[:-1], rows.shape[-1]))


def _as_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a Function's forward or backward in the dtype of its tensors, also under autocast."""

    @functools.wraps(function)
    def wrapper(ctx: Any, *args: Any) -> Any:
        if torch._C._is_any_autocast_enabled():  # the quick test first: most calls end here
            tensor = next(value for value in args if isinstance(value, Tensor))
            if _library.autocast_dtype(tensor) not in (None, tensor.dtype):
                with torch.autocast(tensor.device.type, enabled=False):
                    return function(ctx, *args)
        return function(ctx, *args)

    return wrapper


class FusedDenseFunc(torch.autograd.Function):
    """Autograd node of a dense layer."""

    @staticmethod
    @_as_given
    def forward(ctx, input, weight, bias):  # type: ignore[override]
        ctx.save_for_backward(input, weight)
        return _shaped(functional.linear(as_rows(input), weight, bias), input)

    @staticmethod
    @_as_given
    def backward(ctx, grad_output):  # type: ignore[override]
        input, weight = ctx.saved_tensors
        dy = as_rows(grad_output)
        return (
            _shaped(dy.mm(weight), input) if ctx.needs_input_grad[0] else None,
            dy.t().mm(as_rows(input)) if ctx.needs_input_grad[1] else None,
            dy.sum(0) if True in ctx.needs_input_grad[2:] else None,
        )


class DenseNoBiasFunc(torch.autograd.Function):
    """Autograd node of a dense layer without bias."""

    @staticmethod
    def forward(ctx, input, weight):  # type: ignore[override]
        return FusedDenseFunc.forward(ctx, input, weight, None)

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        return FusedDenseFunc.backward(ctx, grad_output)[:2]


class FusedDenseGeluDenseFunc(torch.autograd.Function):
    """Autograd node of two dense layers with gelu (the tanh form) between them; biases may be None.

    Of the wide tensors in between only gelu's input is saved; the backward pass computes gelu's output again. Another
    activation may be given after upstream's arguments.
    """

    @staticmethod
    @_as_given
    def forward(ctx, input, weight1, bias1, weight2, bias2, activation="gelu"):  # type: ignore[override]
        if True not in ctx.needs_input_grad:
            return _infer_dense_gelu_dense(input, weight1, bias1, weight2, bias2, activation)
        output, hidden, _ = dense_gelu_dense_forward(as_rows(input), weight1, bias1, weight2, bias2, activation)
        ctx.save_for_backward(input, weight1, bias1, weight2, bias2, hidden)
        ctx.activation = activation
        return _shaped(output, input)

    @staticmethod
    @_as_given
    def backward(ctx, grad_output):  # type: ignore[override]
        *inputs, hidden = ctx.saved_tensors
        wanted, rest = ctx.needs_input_grad[:5], (None,) * (len(ctx.needs_input_grad) - 5)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            again = functools.partial(reference.dense_gelu_dense, activation=ctx.activation)
            return *_library.differentiable_gradients(again, inputs, grad_output, wanted), *rest
        input, weight1, _, weight2, _ = inputs
        dx, *gradients = dense_gelu_dense_backward(
            as_rows(grad_output), as_rows(input), hidden, None, weight1, weight2, wanted, ctx.activation
        )
        return None if dx is None else _shaped(dx, input), *gradients, *rest


def _infer_dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, activation: str
) -> Tensor:
    active = activated_linear(as_rows(input), weight1, bias1, activation)
    return _shaped(functional.linear(active, weight2, bias2), input)


def dense_gelu_dense_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str = "gelu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the first layer's output and its gelu, for a 2-D input, without autograd."""
    hidden = functional.linear(input, weight1, bias1)
    active = gelu(hidden, activation)
    return functional.linear(active, weight2, bias2), hidden, active


def dense_gelu_dense_backward(
    dy: Tensor,
    input: Tensor,
    hidden: Tensor,
    active: Tensor | None,
    weight1: Tensor,
    weight2: Tensor,
    wanted: Sequence[bool] = (True,) * 5,
    activation: str = "gelu",
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the wanted gradients of input, weight1, bias1, weight2 and bias2; `active` is the gelu of `hidden`."""
    dx = dweight1 = dbias1 = None
    if wanted[0] or wanted[1] or wanted[2]:
        dactive = dy.mm(weight2)
        if active is None and wanted[3]:
            dhidden, dbias1, active = gelu_backward(dactive, hidden, wanted[2], activation)
        else:
            dhidden, dbias1 = activation_backward(dactive, hidden, activation, wanted[2], in_place=True)
        dweight1 = dhidden.t().mm(input) if wanted[1] else None
        dx = dhidden.mm(weight1) if wanted[0] else None
    dbias2 = dy.sum(0) if wanted[4] else None
    dweight2 = dy.t().mm(gelu(hidden, activation) if active is None else active) if wanted[3] else None
    return dx, dweight1, dbias1, dweight2, dbias2


class MlpFunction(torch.autograd.Function):
    """Autograd node of dense layers, each followed by an activation: 0 none, 1 relu, 2 sigmoid.

    `args` are the input, the weights and, with `bias`, as many biases.
    """

    @staticmethod
    @_as_given
    def forward(ctx, bias, activation, *args):  # type: ignore[override]
        input, weights, biases = split_mlp(bias, args)
        ctx.layers, ctx.activation = len(weights), ACTIVATIONS[activation]
        *hidden, output = mlp_forward(as_rows(input), weights, biases, ctx.activation)
        output = _shaped(output, input)
        ctx.save_for_backward(*args, *hidden, None if ctx.activation == "none" else output)
        return output

    @staticmethod
    @_as_given
    def backward(ctx, grad_o):  # type: ignore[override]
        layers, activation = ctx.layers, ctx.activation
        saved = ctx.saved_tensors  # read once: checkpointing allows no more
        args, hidden, output = saved[:-layers], saved[-layers:-1], saved[-1]
        input, weights = args[0], args[1 : 1 + layers]
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():

            def again(input: Tensor, *rest: Tensor) -> Tensor:
                return reference.mlp(input, rest[:layers], rest[layers:], activation)

            return None, None, *_library.differentiable_gradients(again, args, grad_o, wanted)
        outputs = *hidden, output if output is None else as_rows(output)
        dx, *gradients = mlp_backward(as_rows(grad_o), as_rows(input), weights, outputs, activation, wanted)
        return None, None, None if dx is None else _shaped(dx, input), *gradients


def split_mlp(bias: Any, args: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Split `args` into input, weights and biases (empty without `bias`); raise if the numbers do not match."""
    layers = (len(args) - 1) // (2 if bias else 1)
    if layers < 1 or len(args) != 1 + layers * (2 if bias else 1):
        raise ValueError(
            f"got {len(args)} tensors {'with' if bias else 'without'} bias; expected an input, the weights"
            f"{' and as many biases' if bias else ''}"
        )
    return args[0], args[1 : 1 + layers], args[1 + layers :]


def mlp_forward(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str) -> list[Tensor]:
    """Return the output of every layer, for a 2-D input, without autograd."""
    outputs = []
    for layer, weight in enumerate(weights):
        input = activated_linear(input, weight, biases[layer] if biases else None, activation)
        outputs.append(input)
    return outputs


def mlp_backward(
    dy: Tensor,
    input: Tensor,
    weights: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    activation: str,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Return the requested gradients, ordered as input, weights, biases; None for the others.

    All tensors are 2-D and outputs are contiguous. Without activation the last output is not needed.
    """
    layers = len(weights)
    of_weights, of_biases = wanted[1 : 1 + layers], wanted[1 + layers :] or (False,) * layers
    gradients: list[Tensor | None] = [None] * len(wanted)
    dy = dy.contiguous()  # Dynamo of PyTorch 2.6 refuses to trace `is_contiguous` in a backward pass
    last = None if activation == "none" else outputs[-1]
    launches = last is not None and not torch.compiler.is_compiling() and takes_kernel(dy, last)
    rows = dy.shape[0]
    for layer in reversed(range(layers)):
        below = wanted[0] or any(of_weights[:layer]) or any(of_biases[:layer])
        if not (below or of_weights[layer] or of_biases[layer]):
            break
        output: Any = outputs[layer]
        in_place = layer + 1 < layers  # the caller's gradient must not be overwritten
        if launches and (elements := dy.numel()):
            dz = dy if in_place else torch.empty_like(dy)
            dbias = launch_activation_backward(dy, output, dz, activation, rows, elements // rows, of_biases[layer])
            dy = dz
        else:
            dy, dbias = activation_backward(dy, output, activation, of_biases[layer], in_place)
        if dbias is not None:
            gradients[1 + layers + layer] = dbias
        if of_weights[layer]:
            gradients[1 + layer] = dy.t().mm(outputs[layer - 1] if layer else input)  # type: ignore[arg-type]
        if below:
            dy = dy.mm(weights[layer])
    if wanted[0]:
        gradients[0] = dy
    return gradients
