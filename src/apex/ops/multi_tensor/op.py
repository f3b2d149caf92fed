"""Functions of lists of tensors: scaling, sums and norms, in one pass per device and combination of dtypes.

`overflow` is a tensor of one number that becomes 1 if an input has an infinite or NaN element. If `noop`, also a tensor
of one number, is not 0, the device skips the work. Both may be the same tensor. `nonfinite_counts`, int32 [tensors, 2],
counts infinite and NaN elements of every checked tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import rules
from .dispatch import FAMILY, Groups, grouped, groups_of, known_groups
from .flat import laid_out_alike
from .rule import Rule, Slots
from .tables import upload


def scale(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    factor: float | Tensor,
    *,
    overflow: Tensor | None = None,
    nonfinite_counts: Tensor | None = None,
    noop: Tensor | None = None,
    names: tuple[str, str] = ("outputs", "inputs"),
) -> None:
    """Compute `outputs[i] = factor * inputs[i]`; they may be the same tensors."""
    hyper = {"factor": 1.0 if isinstance(factor, Tensor) else factor}
    checks = (1,) if overflow is not None else ()
    _apply(rules.SCALE, (outputs, inputs), names, hyper, factor, checks, overflow, nonfinite_counts, noop)


def _apply(
    rule: Rule,
    slots: Slots,
    names: Sequence[str],
    hyper: dict[str, Any],
    factor: float | Tensor,
    checks: tuple[int, ...],
    overflow: Tensor | None,
    nonfinite_counts: Tensor | None,
    noop: Tensor | None = None,
) -> None:
    """Run a pass over every group; a `factor` that is a tensor multiplies slot 1."""
    for indices, lists in groups_of(slots, names):
        counters = None if nonfinite_counts is None else _counters(nonfinite_counts, indices, lists.device)
        lists.apply(
            rule,
            hyper,
            grad_scale=factor_on(factor, lists.device) if isinstance(factor, Tensor) else None,
            overflow=flag_on(overflow, lists.device),
            nonfinite_counts=counters,
            noop=flag_on(noop, lists.device),
            checks=checks,
        )
        if nonfinite_counts is not None and counters is not None and counters is not nonfinite_counts:
            places = upload(indices, torch.int64, nonfinite_counts.device)
            nonfinite_counts[places] += counters.to(nonfinite_counts.device)


def _counters(nonfinite_counts: Tensor, indices: Sequence[int], device: torch.device) -> Tensor:
    """Return the tensor for a group's counts: `nonfinite_counts` itself if the group has all tensors, else zeros."""
    if len(indices) == len(nonfinite_counts) and nonfinite_counts.device == device:
        return nonfinite_counts
    return torch.zeros(len(indices), 2, dtype=torch.int32, device=device)


@torch.no_grad()
def zero(tensors: Iterable[Tensor]) -> None:
    """Zero tensors of any kind, by one call of PyTorch per dtype and device instead of one per tensor."""
    alike: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layout != torch.strided:
            tensor.zero_()
        else:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in alike.values():
        torch._foreach_zero_(group)


@torch.no_grad()
def mask(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zero the elements of each tensor whose mask, bool of the same shape and on the same device, is False."""
    slots: Slots = (tensors, None, [mask.view(torch.uint8) for mask in masks])
    fits = lambda pair: _library.runs_triton(FAMILY, pair[0]) and laid_out_alike(pair)  # noqa: E731
    for _, lists in known_groups(slots) or grouped(slots, fits):
        lists.apply(rules.MASK, {})


def axpby(
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    outputs: Sequence[Tensor],
    a: float | Tensor,
    b: float | Tensor,
    *,
    overflow: Tensor | None = None,
    nonfinite_counts: Tensor | None = None,
    checks: str = "xy",
    checks_sum: bool = False,
    names: tuple[str, str, str] = ("outputs", "x", "y"),
) -> None:
    """Compute `outputs[i] = a * x[i] + b * y[i]`; `checks` names the checked inputs, `nonfinite_counts` counts in `x`.

    `checks_sum` is for outputs of few bits: if a sum overflows although `x` and `y` are finite, it counts in `x`.
    """
    wanted = ((0, checks_sum), (1, "x" in checks), (2, "y" in checks))
    slots = tuple(slot for slot, is_checked in wanted if overflow is not None and is_checked)
    hyper = {"a": 1.0 if isinstance(a, Tensor) else a, "b": b.reshape(()) if isinstance(b, Tensor) else b}
    _apply(rules.AXPBY, (outputs, x, y), names, hyper, a, slots, overflow, nonfinite_counts)


def l2norm(
    inputs: Sequence[Tensor],
    *,
    per_tensor: bool = False,
    outputs: Sequence[Tensor] | None = None,
    factor: float | Tensor = 1.0,
    of_inputs: bool = False,
    overflow: Tensor | None = None,
    names: tuple[str, str] = ("outputs", "inputs"),
) -> tuple[Tensor, Tensor]:
    """Return the norm of all elements, float32 [1], and, if `per_tensor`, of each tensor, [tensors] (else empty).

    The norm is of `factor * inputs`, which is also written to `outputs` if given; or, if `of_inputs`, of `inputs`.
    `overflow` becomes 1 if the norm is not finite.
    """
    if outputs is None:
        rule = rules.SQUARE_SUM
    else:
        rule = rules.SCALE_AFTER_SQUARE_SUM if of_inputs else rules.SCALE_SQUARE_SUM
    return _norm(rule, inputs, outputs, factor, per_tensor, overflow, names)


def max_norm(
    inputs: Sequence[Tensor],
    *,
    per_tensor: bool = False,
    overflow: Tensor | None = None,
    names: tuple[str, str] = ("", "inputs"),
) -> tuple[Tensor, Tensor]:
    """Return the largest absolute value of all elements, float32 [1], and, if `per_tensor`, of each tensor."""
    return _norm(rules.MAXIMUM, inputs, None, 1.0, per_tensor, overflow, names)


def clip(
    gradients: Sequence[Tensor], limit: float, margin: float, *, maximum: bool = False, known: Groups | None = None
) -> Tensor:
    """Scale tensors so that their joint norm plus `margin` is at most `limit`; return the norm before, float32 [1].

    The norm is the largest absolute value if `maximum`, else the root of the sum of squares. `known` is the result of
    `clipped_before` for these tensors.
    """
    rule = rules.MAXIMUM if maximum else rules.SQUARE_SUM
    groups = known or groups_of((gradients, gradients), ("gradients", "gradients"))
    if len(groups) == 1:
        ((_, lists),) = groups
        norm, factor = lists.measured_clip(rule, limit, margin)
        lists.apply(rules.SCALE, {"factor": 1.0}, grad_scale=factor)
        return norm
    norm, _ = _norm(rule, gradients, None, 1.0, False, None, ("", "gradients"))
    scale(gradients, gradients, torch.clamp(limit / (norm + margin), max=1.0))
    return norm


def clipped_before(gradients: Sequence[Tensor]) -> Groups | None:
    """Return the groups that an earlier `clip` made for tensors of the same sizes, pointed to these; or None."""
    return known_groups((gradients, gradients))


@functools.cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=device)


def _norm(
    rule: Rule,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor] | None,
    factor: float | Tensor,
    per_tensor: bool,
    overflow: Tensor | None,
    names: tuple[str, str],
) -> tuple[Tensor, Tensor]:
    groups = groups_of((outputs, inputs), names)
    device = inputs[0].device if inputs else torch.device("cpu")
    per_tensor_norms = torch.zeros(len(inputs), dtype=torch.float32, device=device) if per_tensor else _nothing(device)
    root = len(groups) == 1 and not rule.maximum
    totals = []
    for indices, lists in groups:
        on_device = factor_on(factor, lists.device) if isinstance(factor, Tensor) else None
        hyper = {} if rule is rules.MAXIMUM else {"factor": 1.0 if on_device is not None else factor}
        options: dict[str, Any] = {
            "grad_scale": on_device,
            "overflow": flag_on(overflow, lists.device),
            "checks": (0,) if overflow is not None else (),
        }
        if not per_tensor:
            totals.append(lists.measured_total(rule, hyper, root=root, **options))
            continue
        measured = lists.apply(rule, hyper, **options)
        assert measured is not None
        values = measured[:, 0] if rule.maximum else measured[:, 0].sqrt()
        if len(groups) == 1:
            per_tensor_norms = values
        else:
            per_tensor_norms[upload(indices, torch.int64, device)] = values.to(device)
        totals.append(lists.total(measured, rule, root=root))
    if len(totals) == 1:
        return totals[0], per_tensor_norms
    if not totals:
        return torch.zeros(1, dtype=torch.float32, device=device), per_tensor_norms
    stacked = torch.cat([total.to(device) for total in totals])
    return (stacked.amax() if rule.maximum else stacked.sum().sqrt()).reshape(1), per_tensor_norms


def flag_on(flag: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the flag; raise unless it is on the device of the tensors."""
    if flag is None or flag.device == device:
        return flag
    raise ValueError(f"the flag is on {flag.device}, tensors are on {device}; they must be on the same device")


def factor_on(factor: float | Tensor, device: torch.device) -> Tensor | None:
    if isinstance(factor, Tensor):
        return factor.detach().reshape(1).to(device, torch.float32)
    return None if factor == 1.0 else torch.full((1,), factor, dtype=torch.float32, device=device)
