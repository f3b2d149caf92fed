"""From lists of any tensors to groups that one rule can walk over: checks, grouping, dispatch, reuse of tables."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .rule import SLOTS
from .self_check import self_check
from .torch_lists import TorchLists, is_dense
from .triton_lists import TritonLists, current_stream

Slots = Sequence[Sequence[Tensor] | None]
Lists = TritonLists | TorchLists

_PLAIN = {Tensor, torch.nn.Parameter}
_dtype = operator.attrgetter("dtype")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

FAMILY = _library.register_family(
    _library.OpFamily(
        "multi_tensor",
        "update rules, scaling and norms over lists of tensors",
        self_check,
    )
)

# Tables of lists that were used lately, by device, stream, dtypes and sizes: callers like a loss scaler come back with
# the same gradients every step.
_REMEMBERED = 32
_remembered: OrderedDict[Any, TritonLists] = OrderedDict()


def check(slots: Slots, names: Sequence[str]) -> None:
    """Raises unless all lists match each other, tensor by tensor."""
    used = [(name, tensors) for name, tensors in zip(names, slots, strict=True) if tensors is not None]
    first_name, first = used[0]
    for name, tensors in used:
        if len(tensors) != len(first):
            raise ValueError(f"{name} has {len(tensors)} tensors, {first_name} has {len(first)}")
        for index, (tensor, expected) in enumerate(zip(tensors, first, strict=True)):
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

    Slots at the end may be left out; a list after the last slot gets a copy of what is written to slot 0. `names` are
    what errors call the lists.
    """
    uniform = _uniform(slots)
    if uniform is not None and uniform.for_kernel:
        return [(uniform.indices, _remembered_lists(uniform.key, slots))]
    if uniform is not None:  # not remembered: such lists hold the tensors themselves
        return [(uniform.indices, TorchLists(*_split(slots), contiguous=True))]
    check(slots, names)
    return [(indices, _lists_of_group([pick(tensors, indices) for tensors in slots])) for indices in group(slots)]


def _lists_of_group(slots: Slots) -> Lists:
    used = [tensors for tensors in slots if tensors]
    if not kernel_fits([tensors[0] for tensors in used]):
        return TorchLists(*_split(slots))
    return _remembered_lists(_key(slots, used[0][0].device, tuple(map(Tensor.numel, used[0]))), slots)


def _split(slots: Slots) -> tuple[Slots, Sequence[Tensor] | None]:
    """The slots of a rule, all of them, and the list that gets a copy of slot 0."""
    if len(slots) > SLOTS:
        return slots[:SLOTS], slots[SLOTS]
    return (*slots, *(None,) * (SLOTS - len(slots))), None


def _key(slots: Slots, device: torch.device, sizes: tuple[int, ...]) -> Any:
    """What a table depends on besides addresses."""
    types = tuple(tensors[0].dtype if tensors else None for tensors in slots)
    return device, current_stream(device), types, sizes


class _Uniform(NamedTuple):
    key: Any
    indices: Sequence[int]
    for_kernel: bool


def _uniform(slots: Slots) -> _Uniform | None:
    """What identifies lists that need no grouping: plain contiguous tensors, one dtype per list.

    Looks at every tensor every time, through `map` over built-in methods: 50 us for 160 tensors.
    """
    sizes = None
    first = None
    for_kernel = True
    before: Any = None
    for tensors in slots:
        if tensors is None or tensors is before:  # one list in two slots: in place
            continue
        before = tensors
        if not tensors or not set(map(type, tensors)) <= _PLAIN or not all(map(Tensor.is_contiguous, tensors)):
            return None
        dtypes = set(map(_dtype, tensors))
        numels = tuple(map(Tensor.numel, tensors))
        if len(dtypes) != 1 or numels != (sizes or numels) or len(set(map(Tensor.get_device, tensors))) != 1:
            return None
        if tensors[0].dtype not in DTYPES:
            return None
        for_kernel = for_kernel and _library.runs_triton(FAMILY, tensors[0])
        first = tensors[0] if first is None else first
        if tensors[0].device != first.device:
            return None
        sizes = numels
    if first is None or sizes is None:
        return None
    return _Uniform(_key(slots, first.device, sizes), range(len(sizes)), for_kernel)


def _remembered_lists(key: Any, slots: Slots) -> TritonLists:
    lists = _remembered.pop(key, None)
    if lists is None:
        lists = TritonLists(*_split(slots))
    else:
        lists.point_to(*_split(slots))
    _remembered[key] = lists
    if len(_remembered) > _REMEMBERED:
        _remembered.popitem(last=False)
    return lists
