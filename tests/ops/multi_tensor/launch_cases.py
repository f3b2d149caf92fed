"""Launches of the multi-tensor kernels to compile for every GPU: every rule, with its flags off and on."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import Tensor

from apex.ops.multi_tensor import rules
from apex.ops.multi_tensor.codecs import Encoded, new_codes, new_companions
from apex.ops.multi_tensor.rows import TritonRowLists
from apex.ops.multi_tensor.rule import FLAG_COUNT, SCALARS, SLOTS, Rule
from apex.ops.multi_tensor.torch_lists import StateSeed
from apex.ops.multi_tensor.triton_lists import TritonLists

ALL_RULES: list[Rule] = [value for value in vars(rules).values() if isinstance(value, Rule)]

_F32, _BF16 = torch.float32, torch.bfloat16


def _list(dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(size, dtype=dtype, device="meta") for size in (5000, 3, 1)]


def _flags(rule: Rule) -> tuple[bool, ...]:
    """Off and on, where the rule asks for flags beyond having them among its arguments."""
    return (False, True) if inspect.getsource(rule.function).count("FLAGS") > 1 else (False,)


def _record(
    rule: Rule, flags: tuple[bool, ...], param: torch.dtype, grad: torch.dtype, copy: bool = False, **options
) -> None:
    slots = [None] * SLOTS
    for slot in rule.slots:
        slots[slot] = _list((param, grad, torch.uint8 if rule is rules.MASK else _F32, _F32, _F32)[slot])
    lists = TritonLists(slots, _list(_BF16) if copy else None)
    numbers = options.pop("numbers", (0.5,) * SCALARS)
    plain = Rule(rule.function, rule.reads, rule.writes, lambda: numbers, rule.helpers, rule.quantities, rule.maximum)
    whole = None if rule.quantities else torch.empty(3, 2, device="meta")
    found = lists.apply(plain, {}, flags, whole=whole, **options)
    if found is not None:
        flag = torch.empty(1, device="meta")
        # Programs that raise the flag they look at leave their sums to a second launch.
        lists.apply(plain, {}, flags, noop=flag, overflow=flag)
        lists.total(found, rule, root=not rule.maximum)
    if rule.quantities == 1 and not rule.writes and not options:
        factor, averages = torch.empty(1, device="meta"), torch.empty(3, 2, device="meta")
        lists.measured_clip(plain, 0.5, 1e-6)
        lists.measured_clip(plain, 0.5, 1e-6, noop=factor, grad_scale=factor)
        lists.measured_average(plain, averages, 0.1, noop=factor, grad_scale=factor)


def _record_projection() -> None:
    slots = [[torch.empty(shape, dtype=_F32, device="meta") for shape in ((7, 900), (5,))] for _ in range(4)]
    rows = TritonRowLists([*slots, None])
    found, limits = torch.empty(8, 4, device="meta"), torch.empty(2, 2, device="meta")
    for decay in (0.1, torch.empty((), device="meta")):
        rows.project(found, limits, 1e-8, 0.1, decay, 0.1)


def _record_codecs(codecs: dict[int, str], noise_places: Tensor | None = None) -> None:
    """Compile Adam with codecs of the parameters (slot 0) and of the moments, and with the places of shards."""
    slots = [_list(_BF16), _list(_BF16), _list(_F32), _list(_F32)]
    encodings = {}
    for slot, codec in codecs.items():
        if slot:
            slots[slot] = [new_codes(codec, tensor) for tensor in slots[slot]]
        encodings[slot] = Encoded(codec, [new_companions(codec, tensor) for tensor in slots[slot]])
    lists = TritonLists([*slots, None], None, encodings)
    lists.noise_places = noise_places
    numbers = (0.5,) * SCALARS
    plain = replace(rules.GUARDED_ADAM, scalars=lambda: numbers)
    lists.apply(plain, {}, (True, True, True), seed=StateSeed(7))


def record() -> None:
    _record_codecs({0: "remainder8", 2: "signed8", 3: "root8"})
    _record_codecs({0: "remainder16", 2: "float8", 3: "root8"}, torch.empty(3, 4, dtype=torch.int64, device="meta"))
    """Makes, and under `record_launches` collects, a launch of every rule."""
    flag = torch.empty(1, dtype=torch.int32, device="meta")
    factor = torch.empty(1, device="meta")
    for rule in ALL_RULES:
        for state in _flags(rule):
            _record(rule, (state,) * FLAG_COUNT, _F32, _F32)
    _record(rules.SCALE, (), _F32, torch.float16, overflow=flag, nonfinite_counts=flag, checks=(1,), noop=flag)
    _record(rules.AXPBY, (), _BF16, _BF16, overflow=flag, nonfinite_counts=flag, checks=(0, 1, 2))
    _record(rules.ADAM, (True,), _F32, _BF16, copy=True, noop=factor, grad_scale=factor)
    _record(rules.ADAM, (True,), _BF16, _BF16, seed=1)
    on_device = tuple(torch.empty((), device="meta") if index % 2 else 0.5 for index in range(SCALARS))
    _record(rules.ADAM, (True,), torch.float16, torch.float16, numbers=on_device, noop=flag)
    _record_projection()
