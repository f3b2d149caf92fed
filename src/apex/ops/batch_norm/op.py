"""`batch_norm`: which way a norm is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check
from .layout import dense, laid_out_like
from .library_ops import registered
from .norm_plan import norm_plan
from .plans import at_most_one_value, plan_for, runs_kernels
from .spec import BatchNormSpec, BatchStatistics
from .stages import contiguous_places
from .torch_norm import by_reference, native_norm


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    z: Tensor | None = None,
    relu: bool = False,
    channel_dim: int = 1,
) -> Tensor:
    """Batch norm of `input`, plus `z` where it is given, then ReLU where it is asked for.

    `input` is [N, C, ...] in any memory format, or [N, ..., C] with `channel_dim=-1`. In `training` the statistics are
    those of the input and the running ones, where there are any, move towards them by `momentum`; otherwise the running
    ones are used. The running variance is the unbiased one; a single value per channel counts as its own. Statistics
    are float32 (float64 for float64), whatever the dtype of the input, which is that of the output.
    """
    spec = BatchNormSpec(float(eps), float(momentum), bool(training), bool(relu), channel_dim)
    return batch_norm_with_statistics(input, z, running_mean, running_var, weight, bias, spec, wanted=False)[0]


def batch_norm_with_statistics(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    wanted: bool = True,
) -> tuple[Tensor, BatchStatistics | None]:
    """The same, and in training, where they are `wanted`, the statistics of the batch, detached from the graph."""
    plan = plan_for(input, z, running_mean, running_var, weight, bias, spec)
    if plan is not None:
        return plan.run(input, z, weight, bias, running_mean, running_var, spec.momentum, wanted)
    check(input, running_mean, running_var, weight, bias, z, spec)
    tensors = (input, z, running_mean, running_var, weight, bias, spec)
    if at_most_one_value(input, spec):
        return by_reference(*tensors)
    if not runs_kernels(input, z, spec):
        return native_norm(*tensors, wanted and spec.training)
    return registered(*tensors) if torch.compiler.is_compiling() else _by_kernels(*tensors)


def _by_kernels(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> tuple[Tensor, BatchStatistics | None]:
    """Kernels, once everything lies as they take it."""
    values = dense(input, spec)
    z = None if z is None else laid_out_like(values, z)
    weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
    with contiguous_places(running_mean, running_var) as places:
        plan = norm_plan(values, z, weight, bias, *places, spec)
        return plan.run(values, z, weight, bias, *places, spec.momentum, True)


def average_factor(momentum: float | None, num_batches_tracked: Tensor | None) -> float:
    """The weight of the next batch in running statistics: the momentum, or where that is None an equal share.

    As in PyTorch, an equal share waits for the device to say how many there were. The caller counts the batch, once the
    norm has taken it.
    """
    if momentum is not None:
        return momentum
    if num_batches_tracked is None:
        return 0.0
    return 1.0 / (float(num_batches_tracked) + 1.0)
