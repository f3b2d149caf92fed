"""Update rules over lists given by a caller, such as the compiled names; optimizers keep their own buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import rules
from .dispatch import Lists, check, groups_of
from .op import factor_on, flag_on, l2norm, max_norm
from .rule import Rule, Slots
from .tables import upload

_NAMES = tuple(f"tensor_lists[{index}]" for index in range(6))

TensorLists = Sequence[Sequence[Tensor]]
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # numbers read by `read_once`

NamedSlots = tuple[Slots, Sequence[str]]


def expect(tensor_lists: TensorLists, *counts: int) -> None:
    """Raise ValueError unless the number of lists is one of `counts`."""
    if len(tensor_lists) not in counts:
        wanted = " or ".join(map(str, counts))
        raise ValueError(f"tensor_lists has {len(tensor_lists)} lists; {wanted} are expected")


def expect_flag(flag: Tensor, name: str = "noop_flag") -> Tensor:
    """Return the flag; raise unless it is a tensor of one number."""
    if not isinstance(flag, Tensor):
        raise TypeError(f"{name} is a {type(flag).__name__}; a tensor of one number is expected")
    if flag.numel() != 1:
        raise ValueError(f"{name} has {flag.numel()} elements; a tensor of one number is expected")
    return flag


def in_slots(tensor_lists: TensorLists, *order: int | None) -> NamedSlots:
    """Return the lists ordered by a rule's slots (sixth: the copy of slot 0), and their names in errors."""
    slots = [None if index is None else tensor_lists[index] for index in order]
    return slots, ["" if index is None else _NAMES[index] for index in order]


@torch.no_grad()
def update(
    rule: Rule,
    named: NamedSlots,
    hyper: dict[str, Any],
    flags: tuple[bool, ...] = (),
    *,
    noop: Tensor | None = None,
    grad_scale: float | Tensor = 1.0,
    whole: Tensor | None = None,
) -> list[Tensor]:
    """Run one pass of `rule`, see `TorchLists.apply`; return its measurements for each group of tensors."""
    measurements = []
    for indices, lists in groups_of(*named):
        measured = lists.apply(
            rule,
            hyper,
            flags,
            noop=flag_on(noop, lists.device),
            grad_scale=factor_on(grad_scale, lists.device),
            whole=None if whole is None else _rows(whole, indices, lists.device),
        )
        if measured is not None:
            measurements.append(measured)
    return measurements


def adam_hyper(
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | Tensor,
    bias_correction: int,
    weight_decay: float,
    **more: Any,
) -> dict[str, Any]:
    """Return the numbers of compiled names, given in their order, under the names that Adam-like rules use."""
    numbers = {"lr": number(lr), "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    return {**numbers, "step": number(step), "bias_correction": bool(bias_correction), **more}


def lamb_step(
    lists: Lists,
    hyper: dict[str, Any],
    flags: tuple[bool, ...],
    *,
    noop: Tensor | None = None,
    grad_scale: Tensor | None = None,
    seed: int | None = None,
    over_shards: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Take a step of LAMB; the first pass measures the step's length per tensor for the second.

    `over_shards` adds up the measurements of tensors that are shards. FLAGS: decoupled decay, cautious decay.
    """
    lengths = lists.apply(rules.LAMB_MOMENTS, hyper, flags, noop=noop, grad_scale=grad_scale)
    if over_shards is not None and lengths is not None:
        lengths = over_shards(lengths)
    lists.apply(rules.LAMB_STEP, hyper, flags, noop=noop, whole=lengths, seed=seed)


@torch.no_grad()
def lamb(
    named: NamedSlots,
    hyper: dict[str, Any],
    *,
    decoupled: bool,
    adapts: bool,
    noop: Tensor | None = None,
    grad_scale: float | Tensor = 1.0,
) -> None:
    """Take a step of LAMB, or of Adam if not `adapts`: its length does not adapt to the parameter's.

    Half-precision moments are too coarse for computing the step twice: the gradients are then overwritten by the steps.
    """
    moments = (tensor for tensors in named[0][2:4] for tensor in tensors or ())
    if not adapts:
        update(rules.LAMB_UNSCALED, named, hyper, (decoupled,), noop=noop, grad_scale=grad_scale)
    elif any(tensor.dtype.itemsize < 4 for tensor in moments):
        _lamb_through_gradients(named, hyper, decoupled, noop, grad_scale)
    else:
        for _, lists in groups_of(*named):
            here = flag_on(noop, lists.device)
            lamb_step(lists, hyper, (decoupled,), noop=here, grad_scale=factor_on(grad_scale, lists.device))


def _lamb_through_gradients(
    named: NamedSlots, hyper: dict[str, Any], decoupled: bool, noop: Tensor | None, grad_scale: float | Tensor
) -> None:
    slots, names = named
    params, gradients, first, second = slots[:4]
    assert params is not None
    assert gradients is not None
    check(slots, names)  # also for the second pass, before the first changes anything
    if not params:
        return
    device = params[0].device
    options = {key: hyper[key] for key in ("beta1", "beta2", "eps", "step", "bias_correction")}
    options["beta3"] = 1 - hyper["beta1"] if hyper["grad_averaging"] else 1.0
    update(
        rules.LAMB_UPDATE,
        ((params, gradients, first, second, gradients), (*names[:4], names[1])),
        options,
        (decoupled,),
        noop=noop,
        grad_scale=grad_scale,
        whole=torch.full((len(params), 2), hyper["weight_decay"], dtype=torch.float32, device=device),
    )
    norms = [l2norm(tensors, per_tensor=True)[1] for tensors in (params, gradients)]
    update(
        rules.LAMB_WEIGHTS,
        ((params, gradients, None, None, None, *slots[5:]), (*names[:2], "", "", "", *names[5:])),
        {"lr": hyper["lr"]},
        noop=noop,
        whole=torch.stack(norms, 1),
    )


def clip_factor(norm: float | Tensor, largest: float | Tensor) -> float | Tensor:
    """Return the factor that shortens gradients of this norm to the largest one allowed; 1 if they are shorter."""
    if not isinstance(norm, Tensor) and not isinstance(largest, Tensor):
        return largest / norm if norm > largest else 1.0
    device = next(value.device for value in (norm, largest) if isinstance(value, Tensor))
    norm = torch.as_tensor(norm, dtype=torch.float64, device=device)
    return torch.where(norm > largest, largest / norm, 1.0).reshape(())


def per_tensor(tensors: Sequence[Tensor], **named: Tensor) -> Tensor:
    """Return one or two vectors of a number per tensor as columns, [tensors, 2]; a single vector fills both."""
    for name, values in named.items():
        if values.numel() != len(tensors):
            raise ValueError(f"{name} has {values.numel()} elements; there are {len(tensors)} tensors")
    columns = [values.detach().reshape(-1) for values in named.values()]
    return torch.stack((columns[0], columns[-1]), 1)


@torch.no_grad()
def average_norms(
    gradients: Sequence[Tensor], norms: Tensor, beta: float, *, maximum: bool, overflow: Tensor, name: str
) -> None:
    """Move `norms` [tensors] towards the gradients' norms: the largest values, or the roots of average squares."""
    if norms.numel() != len(gradients):
        raise ValueError(f"{name} has {norms.numel()} elements; there are {len(gradients)} tensors")
    if not gradients:
        return
    measure = max_norm if maximum else l2norm
    new_norms = measure(gradients, per_tensor=True, overflow=overflow, names=("", _NAMES[0]))[1].view(norms.shape)
    if maximum:
        norms.mul_(beta).add_(new_norms, alpha=1 - beta)
    else:
        norms.square_().mul_(beta).addcmul_(new_norms, new_norms, value=1 - beta).sqrt_()


def number(value: float | Tensor) -> float | Tensor:
    """Return a number for a rule's `scalars`; tensors stay on their device, in double precision."""
    return value.detach().to(torch.float64).reshape(()) if isinstance(value, Tensor) else value


def read_once(values: Tensor) -> list[float]:
    """Return the numbers of a small tensor. Waits for the device the first time, and again after an in-place operation.

    On a device other than the CPU it does not notice a change that PyTorch does not count (through `.data`).
    """
    if values.device.type == "cpu" or values.is_inference():
        return values.tolist()
    stamp = (values._version, values.data_ptr())
    entry = _read.get(values)
    if entry is None or entry[0] != stamp:
        entry = _read[values] = (stamp, values.tolist())
    return entry[1]


def _rows(whole: Tensor, indices: Sequence[int], device: torch.device) -> Tensor:
    """Return the rows of `whole` that belong to the tensors at `indices`."""
    if len(indices) != len(whole):
        whole = whole[upload(indices, torch.int64, whole.device)]
    return whole.to(device, torch.float32).contiguous()


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Lower the loss scale after `hysteresis` overflows, raise it after `growth_interval` steps without; in place.

    Never waits for the device: everything is computed with `where`.
    """
    overflowed = found_inf.reshape(current_scale.shape) > 0
    patience = torch.where(overflowed, hysteresis_tracker - 1, hysteresis_tracker)
    backs_off = overflowed & (patience <= 0)
    successes = growth_tracker + 1
    # In double precision, so that factors that are not powers of two give the same sequence everywhere.
    grown = (current_scale.double() * growth_factor).to(current_scale.dtype)
    lowered = (current_scale.double() * backoff_factor).to(current_scale.dtype)
    # Subnormal numbers become zero, as in upstream's kernel.
    lowered = torch.where(
        lowered < torch.finfo(current_scale.dtype).smallest_normal, torch.zeros_like(lowered), lowered
    )
    # The scale does not grow beyond float32; the tracker starts anew in any case.
    grows = ~overflowed & (successes == growth_interval)
    current_scale.copy_(
        torch.where(backs_off, lowered, torch.where(grows & torch.isfinite(grown), grown, current_scale))
    )
    growth_tracker.copy_(torch.where(overflowed | grows, torch.zeros_like(successes), successes))
    hysteresis_tracker.copy_(torch.where(overflowed, patience, torch.full_like(patience, hysteresis)))
    return current_scale
