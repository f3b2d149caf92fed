"""The multi-layer perceptron with autograd, in one node.

Where its layers are not huge the host is the limit. So what shapes and dtypes decide (whether they fit, which kernels
will run) is found once and kept, and a call does little more than its matrix products.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._checks import check_tensors
from .._plans import Plans
from .launches import ActivationPlan
from .nodes import as_given, cast_like_autocast, differentiable_gradients, shaped
from .op import (
    FAMILY,
    activated_linear,
    activation_backward,
    as_rows,
    check_mlp,
    is_large,
    plan_activation_backward,
)
from .reference import ACTIVATIONS


class GradientPlan:
    """Which gradients are wanted of input, weights and biases, and the kernels that help with them, layer by layer."""

    def __init__(self, wanted: Sequence[bool], layers: int, plans: Sequence[ActivationPlan | None]) -> None:
        self.wanted = wanted
        self.input = wanted[0]
        self.weights = wanted[1 : 1 + layers]
        self.biases = wanted[1 + layers :] or (False,) * layers
        self.plans = plans
        # No gradient is wanted below this layer; none at all where it is that of no layer.
        self.lowest = next(
            (layer for layer in range(layers) if self.input or self.weights[layer] or self.biases[layer]), layers
        )


class MlpPlan:
    """What is known of a perceptron once its tensors were found fit."""

    def __init__(self, layers: int, activation: str, widest: int) -> None:
        self.layers = layers
        self.activation = activation
        self.widest = widest  # elements of its largest layer
        self._gradients: dict[tuple[str, Sequence[bool]], GradientPlan] = {}

    def gradients(self, wanted: Sequence[bool], outputs: Sequence[Tensor]) -> GradientPlan:
        """For gradients like `outputs`, the results of every layer."""
        key = (_library.requested(), wanted)
        found = self._gradients.get(key)
        if found is None:
            biases = wanted[1 + self.layers :] or (False,) * self.layers
            plans = [plan_activation_backward(y, self.activation, w) for y, w in zip(outputs, biases, strict=True)]
            found = self._gradients[key] = GradientPlan(wanted, self.layers, plans)
        return found


_plans: Plans[MlpPlan] = Plans()


def mlp_plan(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str, dtype: torch.dtype | None
) -> MlpPlan:
    """The plan for tensors like these under autocast to `dtype`; raises where they do not fit each other."""
    try:
        key = (activation, dtype, input.device, *[(t.shape, t.dtype) for t in (input, *weights, *biases)], len(biases))
    except AttributeError:  # says which is no tensor
        check_mlp(input, weights, biases, activation, same_dtype=dtype is None)
        raise
    plan = _plans.get(key)
    if plan is None:
        check_mlp(input, weights, biases, activation, same_dtype=dtype is None)
        rows = input.numel() // max(1, input.shape[-1])
        plan = MlpPlan(len(weights), activation, rows * max([weight.shape[0] for weight in weights]))
        _plans.keep(key, plan)
    return plan


def mlp(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), activation: str = "relu") -> Tensor:
    """`input` [..., in] through dense layers, each of them followed by `activation`: "none", "relu" or "sigmoid".

    Under autocast in its dtype.
    """
    if not isinstance(input, Tensor):
        check_tensors(input=input)
    dtype = _library.autocast_dtype(input)
    if torch.compiler.is_compiling():
        return _compiled_mlp(input, weights, biases, activation, dtype)
    if not _library.runs_triton(FAMILY, input):
        check_mlp(input, weights, biases, activation, same_dtype=dtype is None)
        return composed_mlp(bool(biases), activation, input, *weights, *biases)
    plan = mlp_plan(input, weights, biases, activation, dtype)
    needs_graph = torch.is_grad_enabled()
    # Without gradients always: there is no node, and fewer operators.
    if needs_graph and not is_large(plan.widest):
        return composed_mlp(bool(biases), activation, input, *weights, *biases)
    if dtype is not None:
        input, *others = cast_like_autocast(dtype, (input, *weights, *biases))
        weights, biases = others[: plan.layers], others[plan.layers :]
    if needs_graph:
        return _apply_node(plan, input, *weights, *biases)
    return shaped(mlp_forward(as_rows(input), weights, biases, activation)[-1], input)


def _compiled_mlp(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str, dtype: torch.dtype | None
) -> Tensor:
    """The same for torch.compile, which asks these questions once in any case."""
    check_mlp(input, weights, biases, activation, same_dtype=dtype is None)
    arguments: Sequence[Any] = (input, *weights, *biases)
    widest = input.numel() // max(1, input.shape[-1]) * max([weight.shape[0] for weight in weights])
    needs_graph = torch.is_grad_enabled()
    if not _library.runs_triton(FAMILY, input) or (needs_graph and not is_large(widest)):
        return composed_mlp(len(biases) > 0, activation, *arguments)
    arguments = cast_like_autocast(dtype, arguments)
    if needs_graph:
        return MlpFunction.apply(len(biases) > 0, ACTIVATIONS.index(activation), *arguments)
    layers = len(weights)
    return shaped(
        mlp_forward(as_rows(arguments[0]), arguments[1 : 1 + layers], arguments[1 + layers :], activation)[-1], input
    )


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
    if activation == "relu" and biases and input.is_cuda:  # one product each, and no questions between them
        for weight, bias in zip(weights, biases, strict=True):
            input = torch._addmm_activation(bias, input, weight.t())
            outputs.append(input)
        return outputs
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
    """Those gradients of input, weights and biases that are wanted, in this order.

    All of two dimensions; without activation the last output is not needed.
    """
    layers = len(weights)
    return _gradients(dy, input, weights, outputs, activation, GradientPlan(wanted, layers, [None] * layers))


def _gradients(
    dy: Tensor,
    input: Tensor,
    weights: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    activation: str,
    plan: GradientPlan,
) -> list[Tensor | None]:
    """The same for a plan; where that has kernels, `outputs` are as the forward pass left them."""
    layers = len(weights)
    gradients: list[Tensor | None] = [None] * len(plan.wanted)
    weights_wanted, biases_wanted, plans, lowest = plan.weights, plan.biases, plan.plans, plan.lowest
    layer = layers - 1
    if not dy.is_contiguous():
        dy = dy.contiguous()
    while layer >= lowest:
        by_kernels = plans[layer]
        if by_kernels is None:
            dy, dbias = activation_backward(dy, outputs[layer], activation, biases_wanted[layer], layer + 1 < layers)
        else:  # in place, but not of the gradient that we were given
            dz = dy if layer + 1 < layers else torch.empty_like(dy)
            dbias = by_kernels.run(dy, outputs[layer], dz)  # type: ignore[arg-type]  # kept where a kernel needs it
            dy = dz
        if dbias is not None:
            gradients[1 + layers + layer] = dbias
        if weights_wanted[layer]:
            gradients[1 + layer] = dy.t().mm(outputs[layer - 1] if layer else input)  # type: ignore[arg-type]
        if layer > lowest or plan.input:
            dy = dy.mm(weights[layer])
        layer -= 1
    if plan.input:
        gradients[0] = dy
    return gradients


def _forward(ctx: Any, plan: MlpPlan, args: tuple[Tensor, ...], wanted: Sequence[bool]) -> Tensor:
    """The forward of both nodes; `wanted` are the gradients of `args`."""
    input, layers, activation = args[0], plan.layers, plan.activation
    outputs = mlp_forward(as_rows(input), args[1 : 1 + layers], args[1 + layers :], activation)
    output = shaped(outputs[-1], input)
    ctx.plan = plan
    if torch.compiler.is_compiling():
        ctx.gradient_plan = None
    else:  # here, because autograd's thread runs Python at 0.6 times the speed
        ctx.gradient_plan = plan.gradients(wanted, outputs)
    ctx.save_for_backward(*args, *outputs[:-1], None if activation == "none" else output)
    return output


def _backward(ctx: Any, dy: Tensor, wanted: Sequence[bool]) -> Sequence[Tensor | None]:
    plan = ctx.plan
    layers, activation = plan.layers, plan.activation
    saved = ctx.saved_tensors  # once: checkpointing allows no more
    args, hidden, output = saved[:-layers], saved[-layers:-1], saved[-1]
    compiling = torch.compiler.is_compiling()
    if torch.is_grad_enabled() and not compiling:
        again = functools.partial(composed_mlp, len(args) > 1 + layers, activation)
        return differentiable_gradients(wanted, again, args, dy)
    input = args[0]
    outputs = *hidden, output if output is None else as_rows(output)
    how = GradientPlan(wanted, layers, [None] * layers) if compiling else ctx.gradient_plan
    gradients = _gradients(as_rows(dy), as_rows(input), args[1 : 1 + layers], outputs, activation, how)
    if gradients[0] is not None:
        gradients[0] = shaped(gradients[0], input)
    return gradients


class MlpFunction(torch.autograd.Function):
    """Dense layers, each with an activation after it: 0 none, 1 relu, 2 sigmoid. With upstream's name and arguments.

    `args` are the input, the weights and, with `bias`, as many biases.
    """

    @staticmethod
    @as_given
    def forward(ctx, bias, activation, *args):  # type: ignore[override]
        layers = len(split_mlp(bias, args)[1])
        return _forward(ctx, MlpPlan(layers, ACTIVATIONS[activation], 0), args, ctx.needs_input_grad[2:])

    @staticmethod
    @as_given
    def backward(ctx, grad_o):  # type: ignore[override]
        return None, None, *_backward(ctx, grad_o, ctx.needs_input_grad[2:])


class MlpNode(torch.autograd.Function):
    """The same for arguments that were checked, with the plan for them."""

    @staticmethod
    def forward(ctx, plan, *args):  # type: ignore[override]
        return _forward(ctx, plan, args, ctx.needs_input_grad[1:])

    @staticmethod
    @as_given
    def backward(ctx, grad_o):  # type: ignore[override]
        return None, *_backward(ctx, grad_o, ctx.needs_input_grad[1:])


_apply_node = _library.quick_apply(MlpNode)
