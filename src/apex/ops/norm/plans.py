"""The plan for a call of a norm, found by one lookup."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from .._plans import Plans, kind
from .checks import check_row_length, checked_shape
from .dispatch import FAMILY
from .launches import ForwardPlan, forward_plan
from .spec import NormSpec

_plans: Plans[ForwardPlan] = Plans()


def plan_for(
    input: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    memory_efficient: bool,
    subtract_mean: bool,
    out_dtype: torch.dtype | None,
) -> ForwardPlan | None:
    """How kernels compute the norm over the trailing `shape`, for arguments that fit each other, else an exception.

    None where no kernel runs or something must be done first.
    """
    if not _library.may_plan(input):
        return None
    kinds = (input.shape, input.dtype, input.device, kind(weight), kind(bias))
    key = (*kinds, shape, eps, memory_efficient, subtract_mean, out_dtype)
    plan = _plans.get(key)
    if plan is not None:
        return plan
    shape = checked_shape(input, shape, weight, bias)
    numel = input.numel()
    if (
        type(numel) is Tensor  # torch.jit.trace sees operators, not kernel launches
        or not numel
        or not _library.runs_triton(FAMILY, input)
        or not all(parameter is None or parameter.is_contiguous() for parameter in (weight, bias))
    ):
        return None
    spec = NormSpec(check_row_length(shape), eps, subtract_mean, memory_efficient)
    return _plans.keep(key, forward_plan(input, weight, bias, spec, out_dtype or input.dtype))
