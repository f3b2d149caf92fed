"""Tensor lists anywhere: a rule is a loop of PyTorch operators over pieces that fit a cache.

Large tensors are walked through in slices, small ones are strung together, so that the temporaries of a rule stay small
and near and the number of operators follows the amount of data, not the number of tensors. On a CPU the operators are
those of the rule's program (`programs.py`), elsewhere those of its function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import native
from .programs import pattern_of, program_of
from .rule import FLAG_COUNT, SCALARS, SLOTS, Rule, padded
from .tracing import FULL, SMALL

Slots = Sequence[Sequence[Tensor] | None]

# Elements per piece: on a CPU what stays in the cache with its temporaries, elsewhere what bounds the temporaries.
CPU_PIECE = 1 << 16
DEVICE_PIECE = 1 << 24


@dataclass(frozen=True)
class Piece:
    """Tensors `first` to `last`, whole; or, of one tensor, elements `start` to `stop` in memory order."""

    first: int
    last: int
    start: int | None = None
    stop: int | None = None


def _pieces(sizes: Sequence[int], limit: int, sliceable: Sequence[bool]) -> Iterator[Piece]:
    index = 0
    while index < len(sizes):
        if not sliceable[index]:
            yield Piece(index, index + 1)
            index += 1
        elif sizes[index] >= limit // 4:
            for start in range(0, sizes[index], limit):
                yield Piece(index, index + 1, start, min(start + limit, sizes[index]))
            index += 1
        else:
            first, elements = index, 0
            while index < len(sizes) and sliceable[index] and elements + sizes[index] <= limit:
                elements += sizes[index]
                index += 1
            if elements:
                yield Piece(first, index)


def flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order, as a view."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each at its own place."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _share_layout(tensors: Sequence[Tensor]) -> bool:
    """Whether elements at the same place in memory belong together."""
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    return is_dense(first) and all(
        tensor.shape == first.shape and tensor.stride() == first.stride() for tensor in tensors
    )


def _raise_flag(overflow: Tensor, values: Any) -> None:
    # A sum takes a twentieth of the time of a look at every element. It may overflow where no element is infinite.
    if values.device.type == "cpu" and math.isfinite(values.sum()):
        return
    bad = ~torch.isfinite(values).all()
    overflow.copy_(torch.maximum(overflow, bad.to(overflow.dtype)))


_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors


class TorchLists:
    """Lists of tensors on one device, one dtype per list; strided ones too."""

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        first = next(tensors for tensors in slots if tensors)
        self.device = first[0].device
        self.stream = 0
        self.sizes = tuple(tensor.numel() for tensor in first)
        self.results = len(self.sizes)
        self.point_to(slots, copy)
        used = [tensors for tensors in (*slots, copy) if tensors]
        self._compute = torch.float64 if any(tensors[0].dtype == torch.float64 for tensors in used) else torch.float32
        same_layout = [_share_layout(tensors) for tensors in zip(*used, strict=True)]
        limit = CPU_PIECE if self.device.type == "cpu" else DEVICE_PIECE
        self._pieces = list(_pieces(self.sizes, limit, same_layout))
        self._same_layout = same_layout
        self._contiguous = [tensor.is_contiguous() for tensor in first]
        self.same_layout = all(same_layout)

    def point_to(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        """Other tensors of the same sizes, dtypes and layouts in place of the present ones."""
        self.slots = tuple(slots)
        self.copy = copy

    @torch.no_grad()
    def apply(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        flags: tuple[bool, ...] = (),
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        whole: Tensor | None = None,
        overflow: Tensor | None = None,
        checks: tuple[int, ...] = (),
        seed: int | None = None,
    ) -> Tensor | None:
        """Runs `rule` on all tensors; returns what it measured, float32 [tensors, 2 or more].

        `hyper` goes to the rule's `scalars`. Nothing is done when `noop` is not 0. `grad_scale` multiplies the
        gradients; `whole` holds the two numbers of each tensor; `overflow` becomes 1 when a slot among `checks` has an
        infinite or NaN element, 0 standing for what was measured first; with a `seed`, slot 0 is rounded stochastically
        to bfloat16.
        """
        skip = None
        if noop is not None:
            if self.device.type != "cpu":
                skip = noop.reshape(()) != 0  # no wait for the device
            elif noop.item() != 0:
                return torch.zeros(self.results, max(2, rule.quantities)) if rule.quantities else None
        if skip is None and native.apply(rule, self, hyper, flags, grad_scale, seed):
            return None
        compute = self._computation(rule, hyper, flags)
        found = None
        if rule.quantities:
            found = torch.zeros(self.results, max(2, rule.quantities), dtype=torch.float64, device=self.device)
        for piece in self._pieces:
            views = {slot: self._views(self.slots[slot], piece) for slot in rule.slots}
            values = [self._joined(views[slot]) if slot in rule.reads else 0.0 for slot in range(SLOTS)]
            if overflow is not None:
                for slot in checks:
                    if slot:
                        _raise_flag(overflow, values[slot])
            if grad_scale is not None:
                values[1] = values[1] * grad_scale.to(self._compute)
            results, terms = compute(values, self._whole(whole, piece))
            if found is not None:
                self._measure(rule, terms, piece, found)
            for slot in rule.writes:
                self._write(slot, views[slot], results[slot], piece, skip, seed)
        if found is None:
            return None
        found = found.to(torch.float32)
        if overflow is not None and 0 in checks:
            _raise_flag(overflow, found[:, 0])
        return found

    def _computation(
        self, rule: Rule, hyper: dict[str, Any], flags: tuple[bool, ...]
    ) -> Callable[[Sequence[Any], tuple[Any, Any]], tuple[Any, Sequence[Any]]]:
        """A function of values and whole that gives, by slot, what is written, and what is measured.

        On a CPU it may work in place, on values of slots that are written.
        """
        scalars = padded(rule.scalars(**hyper), SCALARS, 0.0)
        constants = padded(flags, FLAG_COUNT, False)
        if self.device.type == "cpu":
            numbers = [float(value) for value in scalars]
            pattern = pattern_of(numbers)
            prepared: dict[int | None, Any] = {}

            def run(values: Sequence[Any], whole: tuple[Any, Any]) -> tuple[Any, Sequence[Any]]:
                kind = None if not isinstance(whole[0], Tensor) else FULL if whole[0].dim() else SMALL
                if kind not in prepared:
                    program = program_of(rule, constants, kind, pattern)
                    prepared[kind] = program, program.registers(numbers)
                program, registers = prepared[kind]
                return program.run(values, whole, registers)

            return run
        scalars = tuple(v.to(self._compute) if isinstance(v, Tensor) else v for v in scalars)

        def call(values: Sequence[Any], whole: tuple[Any, Any]) -> tuple[Any, Sequence[Any]]:
            results = rule.function(tuple(values), whole, scalars, constants)
            return results if rule.quantities else (results, ())

        return call

    def total(self, per_tensor: Tensor, *, maximum: bool = False, root: bool = False) -> Tensor:
        """Sum (or maximum) over the tensors of the first quantity, float32 [1]; its root if asked for."""
        values = per_tensor[:, 0]
        if not values.numel():
            return torch.zeros(1, device=self.device)
        found = values.amax() if maximum else values.sum(dtype=torch.float64)
        return (found.sqrt() if root else found).to(torch.float32).reshape(1)

    def _views(self, tensors: Sequence[Tensor] | None, piece: Piece) -> list[Tensor]:
        assert tensors is not None
        chosen = tensors[piece.first : piece.last]
        if not self._same_layout[piece.first]:
            return list(chosen)  # one tensor, whose elements are taken in the order of its indices
        if len(chosen) > 1:
            contiguous = self._contiguous[piece.first : piece.last]
            return list(chosen) if all(contiguous) else [flat(tensor) for tensor in chosen]
        view = flat(chosen[0])
        if piece.start is None or (piece.start == 0 and piece.stop == view.numel()):
            return [view]
        return [view[piece.start : piece.stop]]

    def _joined(self, views: list[Tensor]) -> Tensor:
        """All elements of the views: in one dimension, and in the dtype that is computed in."""
        values = views[0].reshape(-1) if len(views) == 1 else _flatten(views)
        return values if values.dtype == self._compute else values.to(self._compute)

    def _whole(self, whole: Tensor | None, piece: Piece) -> tuple[Any, Any]:
        if whole is None:
            return 0.0, 0.0
        rows = whole[piece.first : piece.last].to(self._compute)
        if piece.last - piece.first > 1:
            sizes = self.sizes[piece.first : piece.last]
            counts, total = torch.tensor(sizes, device=rows.device), sum(sizes)
            first, second = (torch.repeat_interleave(rows[:, k], counts, output_size=total) for k in range(2))
            return first, second
        return rows[0, 0], rows[0, 1]

    def _measure(self, rule: Rule, terms: Sequence[Any], piece: Piece, found: Tensor) -> None:
        rows = found[piece.first : piece.last]
        for quantity, term in enumerate(terms):
            if piece.last - piece.first > 1:
                parts = self._of_each_tensor(rule, term, piece)
            else:
                parts = term.amax() if rule.maximum else term.sum()
            if rule.maximum:
                rows[:, quantity] = torch.maximum(rows[:, quantity], parts)
            else:
                rows[:, quantity] += parts

    def _of_each_tensor(self, rule: Rule, term: Tensor, piece: Piece) -> Tensor:
        """Sums or maxima over each tensor of a piece that has several: one call instead of one per tensor."""
        lengths = torch.tensor(self.sizes[piece.first : piece.last], device=term.device)
        # In double precision, because the terms are added one after the other.
        return torch.segment_reduce(term.double(), "max" if rule.maximum else "sum", lengths=lengths, initial=0)

    def _write(
        self, slot: int, views: list[Tensor], value: Tensor, piece: Piece, skip: Tensor | None, seed: int | None
    ) -> None:
        if slot == 0 and seed is not None:
            value = self._round_stochastically(value, piece, seed)
        self._put(views, value, piece, skip)
        if slot == 0 and self.copy is not None:
            self._put(self._views(self.copy, piece), value, piece, skip)

    def _put(self, views: list[Tensor], value: Tensor, piece: Piece, skip: Tensor | None) -> None:
        if len(views) == 1 and value.data_ptr() == views[0].data_ptr():
            return  # computed in place
        sizes = self.sizes[piece.first : piece.last]
        if len(views) == 1:
            parts = [value.view(views[0].shape)]
        elif all(sizes):
            parts = _unflatten(value, views)
        else:
            parts = [part.view(view.shape) for view, part in zip(views, value.split(sizes), strict=True)]
        if skip is not None:
            parts = [torch.where(skip, view, part.to(view.dtype)) for view, part in zip(views, parts, strict=True)]
        torch._foreach_copy_(views, parts)

    def _round_stochastically(self, value: Tensor, piece: Piece, seed: int) -> Tensor:
        """What the kernel does, in int64: see `kernels._round_stochastically`."""
        index, numbers = self._numbering(value, piece)
        word = 0xFFFFFFFF
        noise = ((index & word) * 0x9E3779B1 + seed * 0x85EBCA6B + numbers * 0xC2B2AE35) & word
        noise = ((noise ^ (noise >> 16)) * 0x85EBCA6B) & word
        noise = ((noise ^ (noise >> 13)) * 0xC2B2AE35) & word
        noise = (noise ^ (noise >> 16)) & 0xFFFF
        single = value.to(torch.float32)
        bits = (single.view(torch.int32).to(torch.int64) + noise) & ~0xFFFF
        rounded = ((bits + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32)
        return torch.where(single == single, rounded, single)

    def _numbering(self, value: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """The index of every element within its tensor, and the number of its tensor."""
        if not self._same_layout[piece.first]:
            index = torch.arange(value.numel(), device=value.device)
        elif piece.start is not None:
            index = torch.arange(piece.start, piece.start + value.numel(), device=value.device)
        else:
            sizes = self.sizes[piece.first : piece.last]
            index = torch.cat([torch.arange(size, device=value.device) for size in sizes])
        numbers = torch.arange(piece.first, piece.last, device=value.device)
        if piece.last - piece.first > 1:
            numbers = torch.repeat_interleave(
                numbers, torch.tensor(self.sizes[piece.first : piece.last], device=value.device)
            )
        return index, numbers
