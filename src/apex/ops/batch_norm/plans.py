"""The plan for a call of `batch_norm`, found by one lookup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._plans import Plans, kind
from . import stages
from .checks import check
from .layout import dense
from .norm_plan import NormPlan, norm_plan
from .spec import BatchNormSpec
from .torch_norm import NativePlan, keeps_float32, native_plan

_UNKNOWN: Any = object()
_plans: Plans[NormPlan | NativePlan | None] = Plans()


def plan_for(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> NormPlan | NativePlan | None:
    """How the norm is computed, for arguments that fit each other, else an exception.

    None where something must be done first. A plan is for any momentum.
    """
    if not _library.may_plan(input):
        return None
    eps, _, training, relu, channel_dim = spec
    key = (
        *(input.shape, input.stride(), input.dtype, input.device),
        None if z is None else (z.shape, z.stride(), z.dtype, z.device),
        *(kind(weight), kind(bias), kind(running_mean), kind(running_var)),
        *(eps, training, relu, channel_dim, torch._C._get_cudnn_enabled()),
    )
    plan = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        check(input, running_mean, running_var, weight, bias, z, spec)
        plan = _plans.keep(key, _made(input, z, running_mean, running_var, weight, bias, spec))
    return plan


def _made(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> NormPlan | NativePlan | None:
    per_channel = (weight, bias, running_mean, running_var)
    if at_most_one_value(input, spec):
        return None
    if not runs_kernels(input, z, spec):
        return native_plan(input, z, *per_channel, spec)
    if (
        dense(input, spec) is not input
        or (z is not None and z.stride() != input.stride())
        or not all(each is None or each.is_contiguous() for each in per_channel)
    ):
        return None
    return norm_plan(input, z, *per_channel, spec)


def at_most_one_value(input: Tensor, spec: BatchNormSpec) -> bool:
    """Whether the input is empty, or has nothing to be normalised with but itself."""
    return not input.numel() or (spec.training and input.numel() == input.shape[spec.channel_dim])


def runs_kernels(input: Tensor, z: Tensor | None, spec: BatchNormSpec) -> bool:
    """Not for few elements, nor where nothing follows the norm, unless it is one that PyTorch is slow or inexact at."""
    if not _library.runs_triton(stages.FAMILY, input):
        return False
    if _library.requested() == "triton":
        return True
    if z is not None and input.element_size() <= 2:
        return True  # PyTorch would round the norm before it adds
    if not keeps_float32(input if spec.channel_dim == 1 else input.movedim(-1, 1), spec.training):
        return True  # its gradients would be inexact, or cost copies to be exact
    if input.numel() < stages.NATIVE_BELOW:
        return False
    if spec.relu or z is not None:
        return True
    contiguous = spec.training and spec.channel_dim == 1 and input.dim() > 2 and input.is_contiguous()
    return contiguous and input.shape[2:].numel() >= stages.PLAIN_POSITIONS
