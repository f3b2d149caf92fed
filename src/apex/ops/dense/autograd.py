"""The dense layers with autograd. The Functions have upstream's names and arguments, since clients call them by name.

They take inputs of any number of dimensions and compute as many gradients as are wanted. Under autocast they run in the
dtype they are given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .launches import ActivationPlan
from .op import (
    FAMILY,
    activated_linear,
    activation_backward,
    as_rows,
    check_dense_gelu_dense,
    check_input,
    check_layer,
    check_mlp,
    gelu,
    is_large,
    linear,
    plan_activation_backward,
)
from .reference import ACTIVATIONS


def _as_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a Function's forward or backward in the dtype of its tensors, also under autocast."""

    @functools.wraps(function)
    def wrapper(ctx: Any, *args: Any) -> Any:
        if torch._C._is_any_autocast_enabled():  # the quick question first: most calls end here
            tensor = next(value for value in args if isinstance(value, Tensor))
            if _library.autocast_dtype(tensor) not in (None, tensor.dtype):
                with torch.autocast(tensor.device.type, enabled=False):
                    return function(ctx, *args)
        return function(ctx, *args)

    return wrapper


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Rows as a tensor with the leading dimensions of `like`."""
    if like.dim() == 2:
        return rows
    # Not a view of another tensor, which autograd would not let the caller of a Function change.
    return torch.ops.aten._unsafe_view.default(rows, (*like.shape[:-1], rows.shape[-1]))


class FusedDenseFunc(torch.autograd.Function):
    """A dense layer."""

    @staticmethod
    @_as_given
    def forward(ctx, input, weight, bias):  # type: ignore[override]
        ctx.save_for_backward(input, weight)
        return _shaped(linear(as_rows(input), weight, bias), input)

    @staticmethod
    @_as_given
    def backward(ctx, grad_output):  # type: ignore[override]
        input, weight = ctx.saved_tensors
        return *_dense_gradients(ctx.needs_input_grad, input, weight, grad_output), (
            as_rows(grad_output).sum(0) if ctx.needs_input_grad[2] else None
        )


class DenseNoBiasFunc(torch.autograd.Function):
    """A dense layer without bias."""

    @staticmethod
    @_as_given
    def forward(ctx, input, weight):  # type: ignore[override]
        ctx.save_for_backward(input, weight)
        return _shaped(linear(as_rows(input), weight, None), input)

    @staticmethod
    @_as_given
    def backward(ctx, grad_output):  # type: ignore[override]
        input, weight = ctx.saved_tensors
        return _dense_gradients(ctx.needs_input_grad, input, weight, grad_output)


def _dense_gradients(
    wanted: Sequence[bool], input: Tensor, weight: Tensor, dy: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    rows = as_rows(dy)
    return (
        _shaped(rows.mm(weight), input) if wanted[0] else None,
        rows.t().mm(as_rows(input)) if wanted[1] else None,
    )


class FusedDenseGeluDenseFunc(torch.autograd.Function):
    """Two dense layers with gelu (the tanh form) between them; biases may be None."""

    @staticmethod
    @_as_given
    def forward(ctx, input, weight1, bias1, weight2, bias2):  # type: ignore[override]
        if True not in ctx.needs_input_grad:
            return _infer_dense_gelu_dense(input, weight1, bias1, weight2, bias2)
        output, hidden, active = dense_gelu_dense_forward(as_rows(input), weight1, bias1, weight2, bias2)
        ctx.save_for_backward(input, weight1, bias1, weight2, bias2, hidden, active)
        return _shaped(output, input)

    @staticmethod
    @_as_given
    def backward(ctx, grad_output):  # type: ignore[override]
        *inputs, hidden, active = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _differentiable_gradients(ctx.needs_input_grad, composed_dense_gelu_dense, inputs, grad_output)
        input, weight1, _, weight2, _ = inputs
        dx, *gradients = dense_gelu_dense_backward(
            as_rows(grad_output), as_rows(input), hidden, active, weight1, weight2, ctx.needs_input_grad
        )
        return None if dx is None else _shaped(dx, input), *gradients


def _infer_dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    active = activated_linear(as_rows(input), weight1, bias1, "gelu")
    return _shaped(linear(active, weight2, bias2), input)


def dense_gelu_dense_forward(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the output of the first layer and its gelu, for an input of two dimensions."""
    hidden = linear(input, weight1, bias1)
    active = gelu(hidden)
    return linear(active, weight2, bias2), hidden, active


def dense_gelu_dense_backward(
    dy: Tensor,
    input: Tensor,
    hidden: Tensor,
    active: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    wanted: Sequence[bool] = (True,) * 5,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Those gradients of input, weight1, bias1, weight2 and bias2 that are wanted."""
    dbias2 = dy.sum(0) if wanted[4] else None
    dweight2 = dy.t().mm(active) if wanted[3] else None
    dx = dweight1 = dbias1 = None
    if wanted[0] or wanted[1] or wanted[2]:
        dhidden, dbias1 = activation_backward(dy.mm(weight2), hidden, "gelu", wanted[2], in_place=True)
        dweight1 = dhidden.t().mm(input) if wanted[1] else None
        dx = dhidden.mm(weight1) if wanted[0] else None
    return dx, dweight1, dbias1, dweight2, dbias2


def composed_dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    """The same in PyTorch's operators, differentiable any number of times."""
    hidden = functional.linear(input, weight1, bias1)
    return functional.linear(functional.gelu(hidden, approximate="tanh"), weight2, bias2)


def dense_gelu_dense(
    input: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None
) -> Tensor:
    """`input` [..., in] through two dense layers with gelu (the tanh form) between them.

    Under autocast in its dtype.
    """
    dtype = _library.autocast_dtype(input)
    check_dense_gelu_dense(input, weight1, bias1, weight2, bias2, same_dtype=dtype is None)
    arguments: Sequence[Any] = (input, weight1, bias1, weight2, bias2)
    if not _library.runs_triton(FAMILY, input) or not _has_large_layers(input, (weight1,)):
        return composed_dense_gelu_dense(*arguments)
    arguments = _cast(dtype, arguments)
    if not torch.is_grad_enabled():
        return _infer_dense_gelu_dense(*arguments)
    return FusedDenseGeluDenseFunc.apply(*arguments)


class MlpFunction(torch.autograd.Function):
    """Dense layers, each with an activation after it: 0 none, 1 relu, 2 sigmoid.

    `args` are the input, the weights and, with `bias`, as many biases.
    """

    @staticmethod
    @_as_given
    def forward(ctx, bias, activation, *args):  # type: ignore[override]
        input, weights, biases = split_mlp(bias, args)
        name = ACTIVATIONS[activation]
        outputs = mlp_forward(as_rows(input), weights, biases, name)
        ctx.activation = name
        ctx.layers = layers = len(weights)
        if True in ctx.needs_input_grad:
            # Planned here, because autograd's thread runs Python at 0.6 times the speed.
            biases_wanted = ctx.needs_input_grad[3 + layers :] or (False,) * layers
            ctx.plans = [plan_activation_backward(y, name, w) for y, w in zip(outputs, biases_wanted, strict=True)]
        output = _shaped(outputs[-1], input)
        ctx.save_for_backward(*args, *outputs[:-1], None if name == "none" else output)
        return output

    @staticmethod
    @_as_given
    def backward(ctx, grad_o):  # type: ignore[override]
        wanted, layers, activation = ctx.needs_input_grad[2:], ctx.layers, ctx.activation
        saved = ctx.saved_tensors  # once: checkpointing allows no more
        args, hidden, output = saved[:-layers], saved[-layers:-1], saved[-1]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            again = functools.partial(composed_mlp, len(args) > 1 + layers, activation)
            return None, None, *_differentiable_gradients(wanted, again, args, grad_o)
        input = args[0]
        outputs = *hidden, None if output is None else as_rows(output)
        dx, *gradients = mlp_backward(
            as_rows(grad_o), as_rows(input), args[1 : 1 + layers], outputs, activation, wanted, ctx.plans
        )
        return None, None, None if dx is None else _shaped(dx, input), *gradients


def split_mlp(bias: Any, args: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Input, weights and biases (empty without `bias`), which must be as many as the weights."""
    layers = (len(args) - 1) // (2 if bias else 1)
    if layers < 1 or len(args) != 1 + layers * (2 if bias else 1):
        raise ValueError(
            f"got {len(args)} tensors {'with' if bias else 'without'} bias; expected an input, the weights"
            f"{' and as many biases' if bias else ''}"
        )
    return args[0], args[1 : 1 + layers], args[1 + layers :]


def mlp_forward(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str) -> list[Tensor]:
    """The output of every layer, for an input of two dimensions."""
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
    plans: Sequence[ActivationPlan | None] | None = None,
) -> list[Tensor | None]:
    """Those gradients of input, weights and biases that are wanted, in this order.

    Without activation the last output is not needed.
    """
    layers = len(weights)
    plans = plans or [None] * layers
    gradients: list[Tensor | None] = [None] * len(wanted)
    for layer in reversed(range(layers)):
        bias = 1 + layers + layer
        bias_grad = bias < len(wanted) and wanted[bias]
        dy, dbias = activation_backward(dy, outputs[layer], activation, bias_grad, layer + 1 < layers, plans[layer])
        if bias_grad:
            gradients[bias] = dbias
        if wanted[1 + layer]:
            before = outputs[layer - 1] if layer else input
            gradients[1 + layer] = dy.t().mm(before)  # type: ignore[arg-type]  # only the last output may be absent
        if not (wanted[0] or True in wanted[1 : 1 + layer] or True in wanted[1 + layers : bias]):
            break
        dy = dy.mm(weights[layer])
    else:
        gradients[0] = dy
    return gradients


def composed_mlp(bias: Any, activation: str, *args: Tensor) -> Tensor:
    """The same in PyTorch's operators, differentiable any number of times."""
    output, weights, biases = split_mlp(bias, args)
    for layer, weight in enumerate(weights):
        output = functional.linear(output, weight, biases[layer] if biases else None)
        if activation == "relu":
            output = torch.relu(output)
        elif activation == "sigmoid":
            output = torch.sigmoid(output)
    return output


def mlp(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), activation: str = "relu") -> Tensor:
    """`input` [..., in] through dense layers, each of them followed by `activation`: "none", "relu" or "sigmoid".

    Under autocast in its dtype.
    """
    dtype = _library.autocast_dtype(input)
    check_mlp(input, weights, biases, activation, same_dtype=dtype is None)
    arguments: Sequence[Any] = (input, *weights, *biases)
    if not _library.runs_triton(FAMILY, input) or not _has_large_layers(input, weights):
        return composed_mlp(bool(biases), activation, *arguments)
    arguments = _cast(dtype, arguments)
    if not torch.is_grad_enabled():
        output = as_rows(arguments[0])
        for layer in range(1, 1 + len(weights)):
            output = activated_linear(
                output, arguments[layer], arguments[layer + len(weights)] if biases else None, activation
            )
        return _shaped(output, input)
    return MlpFunction.apply(bool(biases), ACTIVATIONS.index(activation), *arguments)


def dense(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`input` [..., in] through one dense layer: PyTorch's own operator, which adds the bias within the product."""
    check_layer(input, check_input(input), weight, bias, same_dtype=_library.autocast_dtype(input) is None)
    return functional.linear(input, weight, bias)


def _has_large_layers(input: Tensor, weights: Sequence[Tensor]) -> bool:
    """Without gradients always: there is no node, and fewer operators."""
    if not torch.is_grad_enabled():
        return True
    width = max([weight.shape[0] for weight in weights])
    return is_large(input.numel() // max(1, input.shape[-1]) * width)


def _cast(dtype: torch.dtype | None, tensors: Sequence[Any]) -> Sequence[Any]:
    """What autocast would make of the arguments of a matrix product."""
    if dtype is None:
        return tensors
    return [t if t is None or t.dtype in (dtype, torch.float64) else t.to(dtype) for t in tensors]


def _differentiable_gradients(
    wanted: Sequence[bool], function: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients themselves, for create_graph=True."""
    # Each argument by itself, though several may be one tensor.
    aliases = [tensor if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    chosen = [alias for alias, is_wanted in zip(aliases, wanted, strict=True) if is_wanted and alias is not None]
    found = iter(torch.autograd.grad(function(*aliases), chosen, dy, create_graph=True))
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)
