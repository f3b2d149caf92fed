"""From lists of any tensors to groups that one rule can walk over: checks, grouping, dispatch, reuse of tables."""

from __future__ import annotations

import itertools
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from .._tolerance import excess
from . import rules
from .flat import laid_out_alike
from .rule import SLOTS
from .tables import current_stream
from .torch_lists import TorchLists
from .triton_lists import TritonLists

Slots = Sequence[Sequence[Tensor] | None]
Lists = TritonLists | TorchLists
Groups = list[tuple[Sequence[int], Lists]]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def self_check(device: torch.device) -> float:
    """The largest error of one AdamW step and one norm, as a multiple of its tolerance."""
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
    return max(excess(found.cpu(), expected, torch.float32) for found, expected in pairs)


FAMILY = _library.register_family(
    _library.OpFamily("multi_tensor", "update rules, scaling and norms over lists of tensors", self_check)
)


def check(slots: Slots, names: Sequence[str]) -> None:
    """Raises unless all lists match each other, tensor by tensor."""
    used = [(name, tensors) for name, tensors in zip(names, slots, strict=True) if tensors is not None]
    first_name, first = used[0]
    for name, tensors in used:
        if len(tensors) != len(first):
            raise ValueError(f"{name} has {len(tensors)} tensors, {first_name} has {len(first)}")
        for index, (tensor, expected) in enumerate(zip(tensors, first, strict=True)):
            if not isinstance(tensor, Tensor):
                check_tensors(**{f"{name}[{index}]": tensor})  # raises; names of all would take longer than the rest
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
    """Whether the kernel can take tensors of the same index: dense, laid out alike, of types it knows."""
    return all(_library.runs_triton(FAMILY, tensor) for tensor in tensors) and laid_out_alike(tensors)


def make_lists(slots: Slots, copy: Sequence[Tensor] | None = None) -> Lists:
    """The lists of one group, on the implementation that the dispatch chooses."""
    used = [tensors for tensors in (*slots, copy) if tensors]
    fits = all(map(kernel_fits, zip(*used, strict=True)))
    return TritonLists(slots, copy) if fits else TorchLists(slots, copy)


def groups_of(slots: Slots, names: Sequence[str]) -> Groups:
    """Every group of the lists, which are checked: indices, and the lists of these tensors.

    A group shares its device and, list by list, its dtype and its way through the dispatch. `names` are those of the
    slots that are given.
    """
    found = known_groups(slots)
    if found is not None:
        return found
    check(slots, names)
    return _grouped(slots, kernel_fits)


def groups_with_masks(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> Groups:
    """Groups of tensors in slot 0 and their masks, uint8 tensors of the same shapes, in slot 2."""
    slots: Slots = (tensors, None, masks)
    fits = lambda pair: _library.runs_triton(FAMILY, pair[0]) and laid_out_alike(pair)  # noqa: E731
    return known_groups(slots) or _grouped(slots, fits)


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
    """All slots of a rule, and the list that gets a copy of slot 0, with the tensors of these indices."""
    chosen = [
        tensors if tensors is None or len(indices) == len(tensors) else [tensors[index] for index in indices]
        for tensors in slots
    ]
    if len(chosen) > SLOTS:
        return chosen[:SLOTS], chosen[SLOTS]
    return (*chosen, *(None,) * (SLOTS - len(chosen))), None


# Tables that are kept from call to call -------------------------------------------------------------------------------
# Loss scalers and norms get gradients of the same sizes at every step, and mostly at the same addresses.

_MOST_KEPT = 32
# Checks, as compiled graphs do it of their inputs, types, dtypes, devices, sizes and strides of tensors: 17 us for 160
# of them on the host of an H200, half of what it takes to look at each from Python.
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


class _Kept(NamedTuple):
    looks_right: Callable[..., bool]
    groups: Groups


_kept: OrderedDict[tuple[Any, ...], _Kept] = OrderedDict()


def looks_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A check of tensors given one by one: whether they are of the types, dtypes, sizes, strides, ... of these.

    It may say no to those that are, and does where one is given twice. It holds no tensor.
    """
    if _Guards is None:
        return lambda *others: False
    return _Guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check


def known_groups(slots: Slots) -> Groups | None:
    """Groups made earlier for tensors of the same sizes and dtypes on this stream, pointed to these; else None."""
    key = _key(slots)
    kept = None if key is None else _kept.get(key)
    if kept is None:
        return None
    try:
        if not kept.looks_right(*_different(slots)):
            return None
    except (RuntimeError, TypeError):  # sparse tensors, or none
        return None
    for indices, lists in kept.groups:
        lists.point_to(*_rule_slots(slots, indices))
    return kept.groups


def _remember(slots: Slots, groups: Groups) -> None:
    """Keeps groups for `known_groups`; the oldest are dropped where there are too many."""
    key = _key(slots)
    if key is None or not all(isinstance(lists, TritonLists) for _, lists in groups):
        return
    _kept.pop(key, None)
    _kept[key] = _Kept(looks_like(_different(slots)), groups)
    if len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)


def _key(slots: Slots) -> tuple[Any, ...] | None:
    """The key under which groups are kept: number of tensors, first and last shape. None where nothing is kept.

    That is where no kernel runs, and while a CUDA graph is recorded: what is uploaded then is there for that graph
    alone. A thread has its own, since what one has found is not to be pointed elsewhere by another.
    """
    first = next((tensors[0] for tensors in slots if tensors), None)
    if not isinstance(first, Tensor) or not _library.runs_triton(FAMILY, first):
        return None
    stream = current_stream(first.device)
    if stream < 0:
        return None
    key: list[Any] = [threading.get_ident(), first.device, stream]
    for index, tensors in enumerate(slots):
        if not tensors:
            key.append(None)
        elif index and _is_same(tensors, slots[index - 1]):
            key.append("in place")
        else:
            key.append((len(tensors), *(getattr(tensors[end], "shape", None) for end in (0, -1))))
    return tuple(key)


def _is_same(tensors: Sequence[Tensor], others: Sequence[Tensor] | None) -> bool:
    return tensors is others or (
        others is not None and len(tensors) == len(others) and all(map(operator.is_, tensors, others))
    )


def _different(slots: Slots) -> Sequence[Tensor]:
    """All tensors of the slots; a list that is in two neighbouring slots is taken once."""
    different = [t for index, t in enumerate(slots) if t and not (index and _is_same(t, slots[index - 1]))]
    return different[0] if len(different) == 1 else list(itertools.chain.from_iterable(different))
