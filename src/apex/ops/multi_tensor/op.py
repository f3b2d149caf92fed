"""Functions of lists of tensors: scaling, sums and norms, in one pass per device and combination of dtypes.

`overflow` is a tensor of one number that becomes 1 if an input has an infinite or NaN element. If `noop`, also a tensor
of one number, is not 0, the device skips the work. Both may be the same tensor. `nonfinite_counts`, int32 [tensors, 2],
counts infinite and NaN elements of every checked tensor.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _library
from .._checks import check_tensors
from .._tolerance import excess
from . import rules
from .flat import laid_out_alike
from .rule import SLOTS, Rule, Slots
from .tables import current_stream, upload
from .torch_lists import TorchLists
from .triton_lists import TritonLists

Lists = TritonLists | TorchLists
Groups = list[tuple[Sequence[int], Lists]]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    for _, lists in known_groups(slots) or _grouped(slots, fits):
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

    `checks_sum` is for outputs of few bits: a sum that is not finite although `x` and `y` are counts like one in `x`.
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
    each = torch.zeros(len(inputs), dtype=torch.float32, device=device) if per_tensor else _nothing(device)
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
            each = values
        else:
            each[upload(indices, torch.int64, device)] = values.to(device)
        totals.append(lists.total(measured, rule, root=root))
    if len(totals) == 1:
        return totals[0], each
    if not totals:
        return torch.zeros(1, dtype=torch.float32, device=device), each
    stacked = torch.cat([total.to(device) for total in totals])
    return (stacked.amax() if rule.maximum else stacked.sum().sqrt()).reshape(1), each


def flag_on(flag: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the flag; raise unless it is on the device of the tensors."""
    if flag is None or flag.device == device:
        return flag
    raise ValueError(f"the flag is on {flag.device}, tensors are on {device}; they must be on the same device")


def factor_on(factor: float | Tensor, device: torch.device) -> Tensor | None:
    if isinstance(factor, Tensor):
        return factor.detach().reshape(1).to(device, torch.float32)
    return None if factor == 1.0 else torch.full((1,), factor, dtype=torch.float32, device=device)


def self_check(device: torch.device) -> float:
    """Return the largest error of one AdamW step and one norm, as a multiple of its tolerance."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    sizes = (7, 5000, 1)
    slots = [
        [torch.rand(size, generator=generator, dtype=torch.float32, device="cpu") for size in sizes] for _ in range(4)
    ]
    exact = [[tensor.double() for tensor in tensors] for tensors in slots]
    ours = [[tensor.to(device) for tensor in tensors] for tensors in slots]
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    expected_norm = torch.cat(exact[1]).norm().reshape(1)
    lists = make_lists([*ours, None])
    norm = lists.measured_total(rules.SQUARE_SUM, {}, root=True)
    lists.apply(rules.ADAM, hyper, (True, False))
    make_lists([*exact, None]).apply(rules.ADAM, hyper, (True, False))
    pairs = [(norm, expected_norm), *zip(ours[0], exact[0], strict=True)]
    return max(excess(actual.cpu(), expected, torch.float32) for actual, expected in pairs)


FAMILY = _library.register_family(
    _library.OpFamily("multi_tensor", "update rules, scaling and norms over lists of tensors", self_check)
)


def check(slots: Slots, names: Sequence[str]) -> None:
    """Raise unless all lists match each other, tensor by tensor."""
    used = [(name, tensors) for name, tensors in zip(names, slots, strict=True) if tensors is not None]
    first_name, first = used[0]
    for name, tensors in used:
        if len(tensors) != len(first):
            raise ValueError(f"{name} has {len(tensors)} tensors, {first_name} has {len(first)}")
        for index, (tensor, expected) in enumerate(zip(tensors, first, strict=True)):
            if not isinstance(tensor, Tensor):
                check_tensors(
                    **{f"{name}[{index}]": tensor}
                )  # raises; naming all tensors would take longer than the rest
            if tensor.dtype not in DTYPES:
                raise TypeError(
                    f"{name}[{index}] is {tensor.dtype}; float16, bfloat16, float32 and float64 are accepted"
                )
            if tensor.layout != torch.strided:
                raise TypeError(f"{name}[{index}] is sparse ({tensor.layout}); only dense tensors are accepted")
            if tensor.numel() != expected.numel():
                raise ValueError(
                    f"{name}[{index}] has {tensor.numel()} elements, {first_name}[{index}] has {expected.numel()}"
                )
            if tensor.device != expected.device:
                raise ValueError(f"{name}[{index}] is on {tensor.device}, {first_name}[{index}] on {expected.device}")


def kernel_fits(tensors: Sequence[Tensor]) -> bool:
    """Return whether the kernel can take tensors of the same index: dense, laid out alike, and of dtypes it knows."""
    return all(_library.runs_triton(FAMILY, tensor) for tensor in tensors) and laid_out_alike(tensors)


def make_lists(slots: Slots, copy: Sequence[Tensor] | None = None) -> Lists:
    """Return the lists of one group, on the implementation that the dispatch chooses."""
    used = [tensors for tensors in (*slots, copy) if tensors]
    fits = all(map(kernel_fits, zip(*used, strict=True)))
    return TritonLists(slots, copy) if fits else TorchLists(slots, copy)


def groups_of(slots: Slots, names: Sequence[str]) -> Groups:
    """Check the lists, and return their groups: indices, and the lists of these tensors.

    The tensors of a group have one device, one dtype per list, and one implementation. `names` are the names of the
    given slots in errors.
    """
    groups = known_groups(slots)
    if groups is not None:
        return groups
    check(slots, names)
    return _grouped(slots, kernel_fits)


def _grouped(slots: Slots, kernel_fits: Callable[[Sequence[Tensor]], bool]) -> Groups:
    used = [tensors for tensors in slots if tensors is not None]
    members: dict[Any, list[int]] = {}
    for index, tensors in enumerate(zip(*used, strict=True)):
        key = (tensors[0].device, kernel_fits(tensors), *(tensor.dtype for tensor in tensors))
        members.setdefault(key, []).append(index)
    groups: Groups = []
    for (_, fits, *_), indices in members.items():
        chosen = _rule_slots(slots, indices)
        groups.append((indices, TritonLists(*chosen) if fits else TorchLists(*chosen)))
    _remember(slots, groups)
    return groups


def _rule_slots(slots: Slots, indices: Sequence[int]) -> tuple[Slots, Sequence[Tensor] | None]:
    """Return all slots of a rule with the tensors of these indices, and the list that gets a copy of slot 0."""
    chosen = [
        tensors if tensors is None or len(indices) == len(tensors) else [tensors[index] for index in indices]
        for tensors in slots
    ]
    if len(chosen) > SLOTS:
        return chosen[:SLOTS], chosen[SLOTS]
    return (*chosen, *(None,) * (SLOTS - len(chosen))), None


# Loss scalers and norms get gradients of the same sizes at every step, and mostly at the same addresses. So groups with
# their tables are kept from call to call.
_MOST_KEPT = 32
# The check that compiled graphs use for their inputs: types, dtypes, devices, sizes and strides of tensors. It takes
# 17 us for 160 tensors on the host of an H200, half of the time of looking at each from Python.
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


# By signature: a check whether tensors look like those that the groups were made for, and these groups.
_kept: OrderedDict[tuple[Any, ...], tuple[Callable[..., bool], Groups]] = OrderedDict()


def looks_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a check whether tensors, given one by one, have the types, dtypes, sizes, strides, ... of these.

    The check may wrongly return False, and does if a tensor is given twice. It holds no tensor.
    """
    if _Guards is None:
        return lambda *others: False
    return _Guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check


def known_groups(slots: Slots) -> Groups | None:
    """Return groups made earlier for equal sizes and dtypes on this stream, pointed to these tensors; or None."""
    key, tensors = _signature(slots)
    kept = None if key is None else _kept.get(key)
    if kept is None:
        return None
    looks_right, groups = kept
    try:
        if not looks_right(*tensors):
            return None
    except (RuntimeError, TypeError):  # sparse tensors, or objects that are no tensors
        return None
    for indices, lists in groups:
        lists.point_to(*_rule_slots(slots, indices))
    return groups


def _remember(slots: Slots, groups: Groups) -> None:
    """Keep groups for `known_groups`; drop the oldest if there are too many."""
    key, tensors = _signature(slots)
    if key is None or not all(isinstance(lists, TritonLists) for _, lists in groups):
        return
    _kept.pop(key, None)
    _kept[key] = looks_like(tensors), groups
    if len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)


def _signature(slots: Slots) -> tuple[tuple[Any, ...] | None, list[Tensor]]:
    """Return the key of kept groups, and all tensors; a list that is in two neighbouring slots is included once.

    The key has the number of tensors, first and last shape, and the inputs of the dispatch. It is None if nothing is
    kept: for tensor subclasses, and during the capture of a CUDA graph, since only that graph can use the tables that
    are uploaded then. Each thread has its own key, so that no other thread can point its groups elsewhere.
    """
    first = next((tensors[0] for tensors in slots if tensors), None)
    if first is None or type(first) not in _library.PLAIN:
        return None, []
    stream = current_stream(first.device)
    if stream < 0:
        return None, []
    key: list[Any] = [threading.get_ident(), first.device, stream, _library.requested, forward_ad._current_level]
    different: list[Tensor] = []
    previous: Sequence[Tensor] | None = None
    for tensors in slots:
        if not tensors:
            key.append(None)
        elif tensors is previous or (
            previous and len(tensors) == len(previous) and all(map(operator.is_, tensors, previous))
        ):
            key.append("in place")
        else:
            key.append((len(tensors), getattr(tensors[0], "shape", None), getattr(tensors[-1], "shape", None)))
            different.extend(tensors)
        previous = tensors
    return tuple(key), different
