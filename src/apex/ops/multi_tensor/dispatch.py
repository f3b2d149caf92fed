"""The choice between Triton and torch lists: which tensors a kernel can take, and lists kept from call to call."""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _library
from .._checks import check_tensors
from .._tolerance import excess
from . import rules
from .codecs import Encodings
from .flat import laid_out_alike
from .rule import SLOTS, Slots
from .tables import current_stream
from .torch_lists import TorchLists
from .triton_lists import TritonLists

Lists = TritonLists | TorchLists
# Groups of lists: the indices of a group's tensors, and the lists of these tensors.
Groups = list[tuple[Sequence[int], Lists]]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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


def make_lists(slots: Slots, copy: Sequence[Tensor] | None = None, encodings: Encodings | None = None) -> Lists:
    """Return the lists of one group, on the implementation that the dispatch chooses."""
    encoded = encodings or {}
    used = [tensors for slot, tensors in enumerate((*slots, copy)) if tensors and slot not in encoded]
    fits = all(map(kernel_fits, zip(*used, strict=True)))
    if encoded:
        fits = fits and all(map(laid_out_alike, zip(*(tensors for tensors in (*slots, copy) if tensors), strict=True)))
    return TritonLists(slots, copy, encodings) if fits else TorchLists(slots, copy, encodings)


def groups_of(slots: Slots, names: Sequence[str]) -> Groups:
    """Check the lists, and return their groups: indices, and the lists of these tensors.

    The tensors of a group have one device, one dtype per list, and one implementation. `names` are the names of the
    given slots in errors.
    """
    groups = known_groups(slots)
    if groups is not None:
        return groups
    check(slots, names)
    return grouped(slots, kernel_fits)


def grouped(slots: Slots, kernel_fits: Callable[[Sequence[Tensor]], bool]) -> Groups:
    """Return the groups of lists, and keep them; `kernel_fits` says whether a kernel can take tensors of one index."""
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
_MOST_GROUPS = 32
# The check that compiled graphs use for their inputs: types, dtypes, devices, sizes and strides of tensors. It takes
# 17 us for 160 tensors on the host of an H200, half the time of checks in Python.
_Guards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


# Maps a signature to groups, and to a check whether tensors look like the groups' tensors.
_groups_by_signature: OrderedDict[tuple[Any, ...], tuple[Callable[..., bool], Groups]] = OrderedDict()


def looks_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that checks whether its arguments have the types, dtypes, sizes and strides of `tensors`.

    It may wrongly return False, for example for a tensor that is passed twice. It holds no tensor.
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
    entry = None if key is None else _groups_by_signature.get(key)
    if entry is None:
        return None
    looks_right, groups = entry
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
    _groups_by_signature.pop(key, None)
    _groups_by_signature[key] = looks_like(tensors), groups
    if len(_groups_by_signature) > _MOST_GROUPS:
        _groups_by_signature.popitem(last=False)


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
