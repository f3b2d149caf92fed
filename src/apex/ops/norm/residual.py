"""The norm of a sum: residual, output of a branch and bias of the branch's last layer are added in the same kernel.

    output, total = add_norm(branch, residual, added, ...)      total = residual + branch + added

The total is the residual of the next branch. Its gradient comes from both results: the kernel that differentiates the
norm adds the two, and sums the gradient of `added`. For a GPT's block with 8192 rows of 768 in bfloat16 this is one
pass forward where there were two, and one backward where there were four.

No `Op` declares it: both results are differentiable, and branch and residual have the same gradient, while an operator
may not return one tensor twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_optional_tensors, check_tensors
from .._device import empty_on
from . import config, op, reference


def add_norm(
    branch: Tensor,
    residual: Tensor,
    added: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    subtract_mean: bool,
    memory_efficient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the norm of residual + branch + added, and that sum; a layer norm with `subtract_mean`, else an RMS norm.

    `memory_efficient` saves the norm's output for the backward pass instead of the sum.
    """
    shape = op.checked_shape(branch, normalized_shape, weight, bias)
    check_addends(branch, residual, added)
    is_large = memory_efficient or branch.numel() >= config.NATIVE_BELOW or _library.requested != "auto"
    if is_large and _runs_kernels(branch, residual, added, shape, weight, bias, subtract_mean):
        arguments = (branch, residual, added, weight, bias, shape[0], eps, subtract_mean, memory_efficient)
        return AddNormFunction.apply(*arguments) if torch.is_grad_enabled() else _forward(*arguments)[:2]
    total = residual + (branch if added is None else branch + added)
    return op._norm(total, shape, weight, bias, eps, subtract_mean, memory_efficient, None), total


def check_addends(input: Tensor, residual: Tensor, input_bias: Tensor | None) -> None:
    """Raise if residual or bias cannot be added to the input."""
    check_tensors(input=input, residual=residual)
    check_optional_tensors(input_bias=input_bias)
    shape = input.shape
    if residual.shape != shape or (input_bias is not None and input_bias.shape != shape[-1:]):
        raise ValueError(
            f"residual has shape {list(residual.shape)} and the added bias "
            f"{None if input_bias is None else list(input_bias.shape)}; expected {list(shape)} and "
            f"{list(shape[-1:])}, as the input has them"
        )
    for name, tensor in (("residual", residual), ("input_bias", input_bias)):
        if tensor is not None and tensor.device != input.device:
            raise ValueError(f"{name} is on {tensor.device}, the input on {input.device}")


def _runs_kernels(
    branch: Tensor,
    residual: Tensor,
    added: Tensor | None,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    subtract_mean: bool,
) -> bool:
    if weight is None or (bias is None) == subtract_mean or len(shape) != 1:
        return False
    if not _library.runs_triton(op.FAMILY, branch):
        return False
    if reference.is_exporting() if torch.compiler.is_compiling() else _library.sees_operators_only():
        return False
    if any(tensor is not None and tensor.dtype != branch.dtype for tensor in (residual, added)):
        return False
    for parameter in (added, weight, bias):
        if parameter is not None and (parameter.dtype in _library.TOO_WIDE or not parameter.is_contiguous()):
            return False
    return branch.numel() > 0 and config.adds(shape[0], branch.dtype.itemsize, subtract_mean)


class AddNormFunction(torch.autograd.Function):
    """Autograd node of `add_norm`; it returns the norm and the sum."""

    @staticmethod
    def forward(ctx, branch, residual, added, weight, bias, *settings):  # type: ignore[override]
        output, total, statistics = _forward(branch, residual, added, weight, bias, *settings)
        ctx.settings, ctx.has_added = settings, added is not None
        ctx.save_for_backward(output if settings[3] else total, weight, bias, statistics)
        return output, total

    @staticmethod
    @_library.once_differentiable
    def backward(ctx, dy, dsum):  # type: ignore[override]
        saved, weight, bias, statistics = ctx.saved_tensors
        run = torch.ops.apex.add_norm_backward if torch.compiler.is_compiling() else launch_backward
        dx, dweight, *others = run(
            dy.contiguous(), dsum.contiguous(), saved, weight, bias, statistics, ctx.has_added, *ctx.settings
        )
        dadded = others[-1] if ctx.has_added else None
        return dx, dx, dadded, dweight, None if bias is None else others[0], *(None,) * 4


def _forward(branch: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    run = torch.ops.apex.add_norm if torch.compiler.is_compiling() else launch_forward
    return run(branch.contiguous(), residual.contiguous(), *rest)


def launch_forward(
    branch: Tensor,
    residual: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    from_output: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, sum and statistics."""
    device, dtype = branch.device, branch.dtype
    dtypes = (dtype, dtype, *[None if each is None else each.dtype for each in (weight, bias, residual, added)])
    launches = op._forward_launch(branch.shape, row_length, dtypes, subtract_mean, device)
    empty = empty_on(device)
    output, total = (empty(launches.shape, launches.strides, dtype) for _ in range(2))
    statistics = empty(launches.statistics, launches.statistics_strides, torch.float32)
    launches.main((branch, weight, bias, residual, added, total, output, statistics), (eps,))
    return output, total, statistics


def launch_backward(
    dy: Tensor,
    dsum: Tensor,
    saved: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    has_added: bool,
    row_length: int,
    eps: float,
    subtract_mean: bool,
    from_output: bool,
) -> list[Tensor]:
    """Return the gradients of the sum, of weight and, if given, of bias and of the added bias."""
    device, dtype = saved.device, saved.dtype
    dtypes = (dtype, dy.dtype, dsum.dtype, weight.dtype, None if bias is None else bias.dtype)
    launches = op._backward_launches(
        saved.shape, row_length, dtypes, (subtract_mean, from_output, True, has_added), device
    )
    empty = empty_on(device)
    dx = empty(launches.shape, launches.strides, dtype)
    gradients = _parameter_gradients(dy, weight, bias, has_added)
    dbias, dadded = None if bias is None else gradients[1], gradients[-1] if has_added else None
    partials = empty((launches.partials,), (1,), torch.float32)
    launches.main((dy, saved, weight, bias, statistics, dsum, dx, partials), launches.limit)
    launches.sums((partials, gradients[0], dbias, dadded))
    return [dx, *gradients]


def _parameter_gradients(dy: Tensor, weight: Tensor, bias: Tensor | None, has_added: bool) -> list[Tensor]:
    """Allocate the gradients of weight, bias and added bias, if these are given."""
    dbias = [] if bias is None else [bias.new_empty(bias.shape)]
    return [weight.new_empty(weight.shape), *dbias, *([dy.new_empty(weight.shape)] if has_added else [])]


def _fake(branch, residual, added, weight, bias, row_length, eps, subtract_mean, from_output):  # type: ignore[no-untyped-def]
    statistics = branch.new_empty((1 + subtract_mean, branch.numel() // row_length), dtype=torch.float32)
    return branch.new_empty(branch.shape), branch.new_empty(branch.shape), statistics


_SETTINGS = "int row_length, float eps, bool subtract_mean, bool from_output"
# Registered without a derivative: AddNormFunction, which calls them in compiled code, has it.
_library.register_op(
    f"add_norm(Tensor branch, Tensor residual, Tensor? added, Tensor weight, Tensor? bias, {_SETTINGS}) "
    "-> (Tensor, Tensor, Tensor)",
    launch_forward,
    _fake,
)
_library.register_op(
    "add_norm_backward(Tensor dy, Tensor dsum, Tensor saved, Tensor weight, Tensor? bias, Tensor statistics, "
    f"bool has_added, {_SETTINGS}) -> Tensor[]",
    launch_backward,
    lambda dy, dsum, saved, weight, bias, statistics, has_added, *settings: [
        saved.new_empty(saved.shape),
        *_parameter_gradients(dy, weight, bias, has_added),
    ],
)
