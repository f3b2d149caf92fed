"""`group_norm`: checks, dispatch, autograd and registration with `torch.library`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_per_channel, check_tensors
from .._plans import Plans, kind
from . import reference
from .launches import ForwardPlan, contiguous, dense, forward_plan, triton_backward, triton_forward
from .self_check import self_check
from .spec import GroupNormSpec

FAMILY = _library.register_family(
    _library.OpFamily(
        "group_norm",
        "group norm in both layouts, with SiLU",
        self_check,
    )
)

ACTIVATIONS = ("", "silu", "swish")


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "",
) -> Tensor:
    """Group norm of `input` [N, C, ...] over `num_groups` groups of channels, then `activation` ("", silu or swish).

    Computed in float32 whatever the dtypes; the output has the input's dtype and layout.
    """
    if not isinstance(input, Tensor):
        check_tensors(input=input)
    plan = _plan_for(input, num_groups, weight, bias, eps, activation)
    if plan is not None:
        if torch.is_grad_enabled():
            return _apply_node(input, weight, bias, None, plan)
        return plan.run(input, weight, bias)[0]
    check(input, num_groups, weight, bias, activation)
    spec = GroupNormSpec(num_groups, eps, bool(activation))
    if not input.numel():
        return reference.forward(input, weight, bias, spec)[0]  # PyTorch's operator leaves gradients undefined
    if not _library.runs_triton(FAMILY, input):
        return _native(input, weight, bias, spec)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return GroupNormFunction.apply(dense(input), contiguous(weight), contiguous(bias), spec, None)
    return triton_forward(dense(input), weight, bias, spec)[0]


def _plan_for(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str
) -> ForwardPlan | None:
    """How kernels compute the norm, for arguments that fit each other, else an exception.

    None where no kernel runs or PyTorch must first make something of a tensor.
    """
    if not _library.may_plan(input):
        return None
    kinds = (input.shape, input.stride(), input.dtype, input.device, kind(weight), kind(bias))
    key = (*kinds, num_groups, eps, activation)
    plan = _plans.get(key)
    if plan is not None:
        return plan
    check(input, num_groups, weight, bias, activation)
    if (
        not input.numel()
        or not _library.runs_triton(FAMILY, input)
        or dense(input) is not input
        or contiguous(weight) is not weight
        or contiguous(bias) is not bias
    ):
        return None
    return _plans.keep(key, forward_plan(input, weight, bias, GroupNormSpec(num_groups, eps, bool(activation))))


_plans: Plans[ForwardPlan] = Plans()


def check(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, activation: str) -> None:
    """Raises for arguments that do not fit each other."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not known; '' (none), 'silu' and 'swish' are")
    if input.dim() < 2:
        raise ValueError(f"input has shape {list(input.shape)}; images and channels, [N, C, ...], are needed")
    if not input.is_floating_point():
        raise TypeError(f"group_norm needs a floating-point input, got {input.dtype}")
    channels = input.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"the {channels} channels of the input cannot be cut into num_groups={num_groups}")
    check_per_channel(input, channels, weight=weight, bias=bias)


def _native(input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: GroupNormSpec) -> Tensor:
    """PyTorch's operators, in float32 because they round statistics to the dtype of their input."""
    dtype = reference.compute_dtype(input, weight, bias)
    wide = input if input.dtype == dtype else input.to(dtype)
    if wide.is_cpu and not wide.requires_grad:
        # PyTorch 2.13 crashes where of a channels-last norm the parameters alone are differentiated.
        wide = wide.contiguous()
    if weight is not None and weight.dtype != dtype:
        weight = weight.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # without one the derivative of PyTorch's operator fails
    output = torch.group_norm(wide, spec.groups, weight, bias, spec.eps)
    if spec.silu:
        output = torch.nn.functional.silu(output)
    if output.dtype != input.dtype:
        output = output.to(input.dtype)
    # On a GPU it takes channels-last inputs and gives contiguous outputs.
    return output if output.stride() == input.stride() else _laid_out_like(input, output)


def group_norm_forward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, spec: GroupNormSpec
) -> tuple[Tensor, Tensor]:
    """Output and statistics [N, G, 2], mean and variance, without autograd."""
    if input.numel() and _library.runs_triton(FAMILY, input):
        output, statistics = triton_forward(dense(input), weight, bias, spec)
    else:
        output, statistics = reference.forward(input, weight, bias, spec)
    return _laid_out_like(input, output), statistics


def group_norm_backward(
    dy: Tensor,
    input: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: GroupNormSpec,
    param_grads: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, given the statistics of the forward pass."""
    if dy.shape != input.shape or dy.device != input.device:
        raise ValueError(
            f"the gradient has shape {list(dy.shape)} on {dy.device}, the input {list(input.shape)} on {input.device}"
        )
    expected = (input.shape[0], spec.groups, 2)
    if tuple(statistics.shape) != expected or statistics.device != input.device:
        raise ValueError(
            f"the statistics have shape {list(statistics.shape)} on {statistics.device}, expected {list(expected)} on "
            f"{input.device}"
        )
    if input.numel() and _library.runs_triton(FAMILY, input):
        statistics = statistics.to(torch.float32).contiguous()
        dx, dweight, dbias = triton_backward(dy, dense(input), statistics, weight, bias, spec, param_grads)
    else:
        dx, dweight, dbias = reference.backward(dy, input, statistics, weight, bias, spec)
    dx = _laid_out_like(input, dx)
    return (dx, dweight, dbias) if param_grads else (dx, None, None)


def _laid_out_like(input: Tensor, result: Tensor) -> Tensor:
    """`result` in the memory format of `input`, which is what `torch.compile` was promised."""
    like = torch.empty_like(input)
    return result if result.stride() == like.stride() else like.copy_(result)


class GroupNormFunction(torch.autograd.Function):
    """The autograd node of `group_norm` where kernels run; its arguments were checked, all of them are dense.

    Parameters are made so before, by operators of autograd: second derivatives follow what is saved here.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        spec: GroupNormSpec | None,
        plan: ForwardPlan | None,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            output, statistics = torch.ops.apex.group_norm_forward(input, weight, bias, *spec)  # type: ignore[misc]
            ctx.plan, ctx.spec = None, spec
        else:
            plan = plan or forward_plan(input, weight, bias, spec)  # type: ignore[arg-type]
            output, statistics = plan.run(input, weight, bias)
            wanted = ctx.needs_input_grad
            if True in wanted:
                # Planned here, because autograd's thread runs Python more slowly.
                ctx.plan = plan.backward(wanted[1] or wanted[2])
        ctx.save_for_backward(input, weight, bias, statistics)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        input, weight, bias, statistics = ctx.saved_tensors
        plan = ctx.plan
        if (
            plan is not None
            and not torch.is_grad_enabled()
            and dy.stride() == input.stride() == plan.strides  # hooks may have saved the input in another layout
            and dy.dtype == input.dtype
        ):
            return *plan.run(dy, input, statistics, weight, bias), None, None
        spec = ctx.spec if plan is None else plan.spec
        param_grads = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if torch.compiler.is_compiling():
            gradients = torch.ops.apex.group_norm_backward(dy, input, statistics, weight, bias, *spec, param_grads)
            dweight, dbias = (_library.none_if_empty(*each) for each in zip(gradients[1:], (weight, bias), strict=True))
            return gradients[0], dweight, dbias, None, None
        if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
            statistics = reference.forward(input, weight, bias, spec)[1]
            return *reference.backward(dy, input, statistics, weight, bias, spec), None, None
        return *triton_backward(dy, input, statistics, weight, bias, spec, param_grads), None, None


_apply_node = _library.quick_apply(GroupNormFunction)


def _forward(input, weight, bias, groups, eps, silu):
    return group_norm_forward(input, weight, bias, GroupNormSpec(groups, eps, silu))


def _forward_fake(input, weight, bias, groups, eps, silu):
    statistics = input.new_empty((input.shape[0], groups, 2), dtype=reference.compute_dtype(input))
    return torch.empty_like(input), statistics


def _backward(dy, input, statistics, weight, bias, groups, eps, silu, param_grads):
    spec = GroupNormSpec(groups, eps, silu)
    dx, *rest = group_norm_backward(dy, input, statistics, weight, bias, spec, param_grads)
    return dx, *(statistics.new_empty(0) if each is None else each for each in rest)


def _backward_fake(dy, input, statistics, weight, bias, groups, eps, silu, param_grads):
    absent = lambda parameter: parameter is None or not param_grads  # noqa: E731
    return torch.empty_like(input), *(
        statistics.new_empty(0) if absent(each) else torch.empty_like(each) for each in (weight, bias)
    )


def _setup_context(ctx, inputs, output):
    input, weight, bias, *spec = inputs
    ctx.spec = GroupNormSpec(*spec)
    ctx.save_for_backward(input, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _op_backward(ctx, dy, dstatistics):
    input, weight, bias, statistics = ctx.saved_tensors
    param_grads = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    dx, dweight, dbias = torch.ops.apex.group_norm_backward(dy, input, statistics, weight, bias, *ctx.spec, param_grads)
    return dx, _library.none_if_empty(dweight, weight), _library.none_if_empty(dbias, bias), None, None, None


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.group_norm_forward has a first derivative only; apex.ops.group_norm has a second one"
    )


_library.register_op(
    "group_norm_forward(Tensor input, Tensor? weight, Tensor? bias, int groups, float eps, bool silu) "
    "-> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_op_backward,
    setup_context=_setup_context,
)
_library.register_op(
    "group_norm_backward(Tensor dy, Tensor input, Tensor statistics, Tensor? weight, Tensor? bias, int groups, "
    "float eps, bool silu, bool param_grads) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
