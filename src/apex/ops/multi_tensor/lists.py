"""From lists of any tensors to groups that one rule can walk over: checks, grouping, dispatch, reuse of tables."""

from __future__ import annotations

import functools
import operator
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from .recognition import recognise, recognise_on_cpu, remember, remember_on_cpu, rule_slots
from .rule import GRADIENT
from .self_check import self_check
from .tables import current_stream
from .torch_lists import TorchLists, is_dense
from .triton_lists import TritonLists

Slots = Sequence[Sequence[Tensor] | None]
Lists = TritonLists | TorchLists

_PLAIN = {Tensor, torch.nn.Parameter}
_dtype = operator.attrgetter("dtype")
_device = operator.attrgetter("device")
_is_cpu = operator.attrgetter("is_cpu")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = frozenset(DTYPES)

FAMILY = _library.register_family(
    _library.OpFamily(
        "multi_tensor",
        "update rules, scaling and norms over lists of tensors",
        self_check,
    )
)

# Tables of lists that were used lately, by device, stream, thread, dtypes and sizes: callers like a loss scaler come
# back with the same gradients every step.
_REMEMBERED = 32
_remembered: OrderedDict[_Key, TritonLists] = OrderedDict()


def check(slots: Slots, names: Sequence[str]) -> None:
    """Raises unless all lists match each other, tensor by tensor."""
    used = [(name, tensors) for name, tensors in zip(names, slots, strict=True) if tensors is not None]
    first_name, first = used[0]
    for name, tensors in used:
        if len(tensors) != len(first):
            raise ValueError(f"{name} has {len(tensors)} tensors, {first_name} has {len(first)}")
        for index, (tensor, expected) in enumerate(zip(tensors, first, strict=True)):
            check_tensors(**{f"{name}[{index}]": tensor})
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


def group(slots: Slots) -> list[list[int]]:
    """Indices of tensors that share their device and, list by list, their dtype and their way through the dispatch."""
    used = [tensors for tensors in slots if tensors is not None]
    groups: dict[Any, list[int]] = {}
    for index, tensors in enumerate(zip(*used, strict=True)):
        key = (tensors[0].device, kernel_fits(tensors), *(tensor.dtype for tensor in tensors))
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def kernel_fits(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel can take tensors of the same index: dense, laid out alike, of types it knows."""
    first = tensors[0]
    if not all(_library.runs_triton(FAMILY, tensor) for tensor in tensors):
        return False
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    return is_dense(first) and all(
        tensor.shape == first.shape and tensor.stride() == first.stride() for tensor in tensors
    )


def pick(tensors: Sequence[Tensor] | None, indices: list[int]) -> list[Tensor] | None:
    return None if tensors is None else [tensors[index] for index in indices]


def make_lists(slots: Slots, copy: Sequence[Tensor] | None = None) -> Lists:
    """The lists of one group, on the implementation that the dispatch chooses."""
    used = [tensors for tensors in (*slots, copy) if tensors]
    fits = all(map(kernel_fits, zip(*used, strict=True)))
    return TritonLists(slots, copy) if fits else TorchLists(slots, copy)


def groups_of(slots: Slots, names: Sequence[str]) -> list[tuple[Sequence[int], Lists]]:
    """Every group of the lists, which are checked: indices, and the lists of these tensors.

    `names` are those of the slots that are given.
    """
    try:
        known = known_lists(slots)
        if known is not None:
            return [(range(len(known.sizes)), known)]
        on_cpu = _lists_on_cpu(slots)
        if on_cpu is not None:
            return [(range(on_cpu.results), on_cpu)]
        facts = _facts(slots)
    except AttributeError:
        check(slots, names)  # says which is no tensor
        raise
    if facts is not None:
        lists = _remembered.get(facts.key)
        if (
            lists is not None
            and lists.points_to(facts.fixed, facts.moving)
            and _library.runs_triton(FAMILY, facts.first)
        ):
            remember(slots, lists)  # seen twice, so that there may be a third time
            return [(range(len(lists.sizes)), lists)]
        if _plain(slots):
            indices = range(len(facts.key.sizes))
            if all(_library.runs_triton(FAMILY, tensors[0]) for tensors in slots if tensors):
                return [(indices, _remembered_lists(facts.key, slots))]
            return [(indices, TorchLists(*rule_slots(slots), contiguous=facts.contiguous))]
    check(slots, names)
    return [(indices, _lists_of_group([pick(tensors, indices) for tensors in slots])) for indices in group(slots)]


def _lists_on_cpu(slots: Slots) -> TorchLists | None:
    """Contiguous tensors on the CPU that need no grouping, found with as few looks as possible."""
    used = list({id(tensors): tensors for tensors in slots if tensors is not None}.values())
    first = used[0]
    if not first or not isinstance(first[0], Tensor) or not first[0].is_cpu or _library.runs_triton(FAMILY, first[0]):
        return None
    known = recognise_on_cpu(slots) if all(used) else None
    if known is not None:
        return known
    for tensors in used:
        if not set(map(type, tensors)) <= _PLAIN or not all(map(_is_cpu, tensors)):
            return None
        dtypes = set(map(_dtype, tensors))
        if len(dtypes) != 1 or not dtypes <= _DTYPES or not _are_contiguous(tensors):
            return None
        if tensors is not first and list(map(Tensor.numel, tensors)) != list(map(Tensor.numel, first)):
            return None
    lists = TorchLists(*rule_slots(slots), contiguous=True)
    remember_on_cpu(slots, lists)
    return lists


def _are_contiguous(tensors: Sequence[Tensor]) -> bool:
    try:
        return all(map(Tensor.is_contiguous, tensors))
    except RuntimeError:  # sparse
        return False


def known_lists(slots: Slots) -> TritonLists | None:
    """The lists of tensors that `groups_of` has seen twice, and that need no grouping."""
    first = next((tensors for tensors in slots if tensors), None)
    if first is None or not isinstance(first[0], Tensor) or not _library.runs_triton(FAMILY, first[0]):
        return None
    return recognise(slots)


def _lists_of_group(slots: Slots) -> Lists:
    used = [tensors for tensors in slots if tensors]
    if not kernel_fits([tensors[0] for tensors in used]):
        return TorchLists(*rule_slots(slots))
    return _remembered_lists(_key(slots, used[0][0].device, tuple(map(Tensor.numel, used[0]))), slots)


class _Key(NamedTuple):
    """What a table depends on besides addresses."""

    device: torch.device
    stream: int
    # What one has found is not to be pointed elsewhere by another before it is used.
    thread: int
    types: tuple[torch.dtype | None, ...]
    sizes: tuple[int, ...]


def _key(slots: Slots, device: torch.device, sizes: tuple[int, ...]) -> _Key:
    types = tuple(tensors[0].dtype if tensors else None for tensors in slots)
    return _Key(device, current_stream(device), threading.get_ident(), types, sizes)


class _Facts(NamedTuple):
    """A key, and the addresses of the tensors: of the gradients, and of every other list."""

    key: _Key
    fixed: list[list[int]]
    moving: list[int] | None
    first: Tensor
    contiguous: bool


def _facts(slots: Slots) -> _Facts | None:
    """What identifies lists that may need no grouping: dense tensors, laid out alike, one dtype and the same sizes.

    Looks at every tensor every time, through `map` over built-in methods: 40 us for 160 tensors.
    """
    sizes: tuple[int, ...] | None = None
    fixed: list[list[int]] = []
    moving: list[int] | None = None
    seen: dict[int, list[int]] = {}
    first = None
    contiguous = True
    for slot, tensors in enumerate(slots):
        if tensors is None:
            continue
        addresses = seen.get(id(tensors))  # one list in two slots: in place
        if addresses is None:
            try:
                addresses = seen[id(tensors)] = list(map(Tensor.data_ptr, tensors))
                contiguous = contiguous and all(map(Tensor.is_contiguous, tensors))
            except (RuntimeError, TypeError):  # sparse tensors, or others without memory
                return None
            numels = tuple(map(Tensor.numel, tensors))
            if not tensors or len(set(map(_dtype, tensors))) != 1 or numels != (sizes or numels):
                return None
            sizes = numels
            first = tensors[0] if first is None else first
        if slot == GRADIENT:
            moving = addresses
        else:
            fixed.append(addresses)
    if first is None or sizes is None or (not contiguous and not _laid_out_alike(slots)):
        return None
    return _Facts(_key(slots, first.device, sizes), fixed, moving, first, contiguous)


def _laid_out_alike(slots: Slots) -> bool:
    """Whether the tensors of each index are all contiguous, or dense and strided alike: channels last, say."""
    first, *others = [tensors for tensors in slots if tensors is not None]
    contiguous = list(map(Tensor.is_contiguous, first))
    strides = list(map(Tensor.stride, first))
    for tensors in others:
        if tensors is first:
            continue
        alike = zip(contiguous, map(Tensor.is_contiguous, tensors), strides, map(Tensor.stride, tensors), strict=True)
        if not all((a and b) or s == t for a, b, s, t in alike):
            return False
    rest = (tensor for tensor, is_contiguous in zip(first, contiguous, strict=True) if not is_contiguous)
    return all(_is_dense(tensor.shape, tensor.stride()) for tensor in rest)


@functools.lru_cache(4096)
def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    return is_dense(torch.empty(0, dtype=torch.float32, device="meta").as_strided(shape, strides))


def _plain(slots: Slots) -> bool:
    """Whether all tensors are of the kind that everything here takes, and on one device."""
    used = [tensors for tensors in slots if tensors is not None]
    if not all(set(map(type, tensors)) <= _PLAIN for tensors in used):
        return False
    indices = {index for tensors in used for index in map(Tensor.get_device, tensors)}
    if len(indices) != 1:
        return False
    if indices == {-1} and len({device for tensors in used for device in map(_device, tensors)}) != 1:  # of no GPU
        return False
    return all(tensors[0].dtype in DTYPES for tensors in used)


def _remembered_lists(key: _Key, slots: Slots) -> TritonLists:
    lists = _remembered.pop(key, None)
    if lists is None:
        lists = TritonLists(*rule_slots(slots))
    else:
        lists.point_to(*rule_slots(slots))
    if key.stream < 0:
        return lists  # of a CUDA graph: see `current_stream`
    _remembered[key] = lists
    if len(_remembered) > _REMEMBERED:
        _remembered.popitem(last=False)
    return lists
