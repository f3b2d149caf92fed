"""Tensor lists anywhere: a rule is a loop of PyTorch operators over pieces that fit a cache.

Large tensors are walked through in slices, small ones are strung together, so that the temporaries of a rule stay small
and near and the number of operators follows the amount of data, not the number of tensors. On a CPU the operators are
those of the rule's program (`programs.py`), elsewhere those of its function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import foreach, native, native_lamb, rules
from .programs import Square, elements_of, pattern_of, program_of
from .rule import FLAG_COUNT, SCALARS, SLOTS, Rule, padded
from .tables import current_stream, upload
from .tracing import FULL, SMALL

Slots = Sequence[Sequence[Tensor] | None]

# Elements per piece. It bounds the temporaries; on a CPU, calls of fewer elements cost more than a near cache saves.
CPU_PIECE = 1 << 20
DEVICE_PIECE = 1 << 24
# Elements per call over lists.
CPU_BATCH = 1 << 22
# Tensors of fewer elements are strung together: on a CPU the calls for one of 65536 take as long as copying it around.
STRUNG = 1 << 16


@dataclass(frozen=True)
class Piece:
    """Tensors of these `indices`, whole; or, of one tensor, elements `start` to `stop` in memory order."""

    indices: tuple[int, ...]
    start: int | None = None
    stop: int | None = None


def cut_into_pieces(
    sizes: Sequence[int],
    limit: int,
    sliceable: Sequence[bool],
    slices: Callable[[int], Iterator[tuple[int, int]]] | None = None,
    shortest: int | None = None,
) -> Iterator[Piece]:
    """Pieces of at most `limit` elements, but for tensors that are not sliceable, which are pieces of their own.

    `slices` gives the bounds of a tensor's slices; without it they are as long as possible. Tensors of fewer than
    `shortest` elements are strung together.
    """
    shortest = min(STRUNG, limit // 4) if shortest is None else shortest
    strung: list[int] = []
    elements = 0
    for index, size in enumerate(sizes):
        if not size:
            continue
        if not sliceable[index]:
            yield Piece((index,))
        elif size >= shortest:
            bounds = slices(index) if slices else ((at, min(at + limit, size)) for at in range(0, size, limit))
            yield from (Piece((index,), start, stop) for start, stop in bounds)
        else:
            if elements + size > limit:
                yield Piece(tuple(strung))
                strung, elements = [], 0
            strung.append(index)
            elements += size
    if strung:
        yield Piece(tuple(strung))


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


def _raise_flag(overflow: Tensor, values: Any) -> bool:
    """Notes what is not finite; False where the host knows that all is."""
    # A sum takes a twentieth of the time of a look at every element. It may overflow where no element is infinite.
    if values.device.type == "cpu" and math.isfinite(values.sum()):
        return False
    bad = ~torch.isfinite(values).all()
    overflow.copy_(torch.maximum(overflow, bad.to(overflow.dtype)))
    return True


def _overflown(written: Tensor, inputs: Sequence[Any]) -> Tensor:
    """Numbers that are not finite although the inputs are; 0 in place of the others."""
    written = written.to(torch.float32)
    if written.device.type == "cpu" and math.isfinite(written.sum()):
        return written
    known = functools.reduce(torch.logical_and, (torch.isfinite(values) for values in inputs))
    return torch.where(known, written, 0.0)


def _checked(found: Tensor, overflow: Tensor | None, checks: tuple[int, ...]) -> Tensor:
    """What was measured, as it is returned."""
    found = found.to(torch.float32)
    if overflow is not None and 0 in checks:
        _raise_flag(overflow, found[:, 0])
    return found


_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors


class TorchLists:
    """Lists of tensors on one device, one dtype per list; strided ones too."""

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None, *, contiguous: bool = False) -> None:
        """With `contiguous` they are known to be so, all of them."""
        first = next(tensors for tensors in slots if tensors)
        self.device = first[0].device
        self.stream = current_stream(self.device)
        self.results = len(first)
        self.point_to(slots, copy)
        self.sizes = tuple(map(Tensor.numel, first))
        used = [tensors for tensors in (*slots, copy) if tensors]
        self._compute = torch.float64 if any(tensors[0].dtype == torch.float64 for tensors in used) else torch.float32
        if contiguous:
            self._same_layout = self._contiguous = [True] * len(first)
        else:
            self._same_layout = list(map(_share_layout, zip(*used, strict=True)))
            self._contiguous = list(map(Tensor.is_contiguous, first))
        self._numbers: dict[Piece, tuple[Tensor, Tensor]] = {}
        self._batches: dict[int, list[Piece]] = {}
        # Sums are gathered in double precision where a device has it.
        self._sums = torch.float64 if self.device.type in ("cpu", "cuda") else torch.float32
        self.same_layout = all(self._same_layout)

    @functools.cached_property
    def _pieces(self) -> list[Piece]:
        limit = CPU_PIECE if self.device.type == "cpu" else DEVICE_PIECE
        return list(cut_into_pieces(self.sizes, limit, self._same_layout))

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
        culprits: Tensor | None = None,
        checks: tuple[int, ...] = (),
        seed: int | None = None,
    ) -> Tensor | None:
        """Runs `rule` on all tensors; returns what it measured, float32 [tensors, 2 or more].

        `hyper` goes to the rule's `scalars`. Nothing is done when `noop` is not 0. `grad_scale` multiplies the
        gradients; `whole` holds the two numbers of each tensor; `overflow` becomes 1 when a slot among `checks` has an
        infinite or NaN element, and `culprits`, int32 [tensors, 2], counts such elements of slots 0 and 1. Slot 0
        stands for what was measured first or, where nothing is, for numbers that are written to it and are not finite
        although those of slots 1 and 2 are. With a `seed`, slot 0 is rounded stochastically to bfloat16.
        """
        skip = None
        if noop is not None:
            if self.device.type != "cpu":
                skip = noop.reshape(()) != 0  # no wait for the device
            elif noop.item() != 0:
                if not rule.quantities:
                    return None
                return torch.zeros(self.results, max(2, rule.quantities), dtype=torch.float32, device=self.device)
        if skip is None and native.apply(rule, self, hyper, flags, grad_scale, seed):
            return None
        if skip is None and foreach.scale(rule, self, hyper, grad_scale, overflow, culprits):
            return None
        plain = all(option is None for option in (skip, whole, grad_scale, overflow, seed))
        if plain and self._run_lists(rule, hyper, flags):
            return None
        found = foreach.measure(rule, self, hyper, grad_scale) if skip is None else None
        if found is not None:
            return _checked(found, overflow, checks)
        compute = self._computation(rule, hyper, flags)
        if rule.quantities:
            found = torch.zeros(self.results, max(2, rule.quantities), dtype=self._sums, device=self.device)
        for piece in self._pieces:
            views = {slot: self._views(self.slots[slot], piece) for slot in rule.slots}
            values = [self._joined(views[slot]) if slot in rule.reads else 0.0 for slot in range(SLOTS)]
            if overflow is not None:
                for slot in checks:
                    if slot and _raise_flag(overflow, values[slot]) and slot == 1 and culprits is not None:
                        self._count_culprits(culprits, values[slot], piece)
            if grad_scale is not None:
                values[1] = values[1] * grad_scale.to(self._compute)
            results, terms = compute(values, self._whole(whole, piece))
            if overflow is not None and 0 in checks and not rule.quantities:
                written = _overflown(results[0].to(views[0][0].dtype), (values[1], values[2]))
                if _raise_flag(overflow, written) and culprits is not None:
                    self._count_culprits(culprits, written, piece)
            if found is not None:
                self._measure(rule, terms, piece, found)
            for slot in rule.writes:
                self._write(slot, views[slot], results[slot], piece, skip, seed)
        return None if found is None else _checked(found, overflow, checks)

    def _run_lists(self, rule: Rule, hyper: dict[str, Any], flags: tuple[bool, ...]) -> bool:
        """Runs the rule's program over lists of tensors, if it can; says whether it did."""
        if not self._takes_lists or rule.quantities:
            return False
        numbers = [float(value) for value in padded(rule.scalars(**hyper), SCALARS, 0.0)]
        program = program_of(rule, padded(flags, FLAG_COUNT, False), None, pattern_of(numbers))
        if not program.takes_lists:
            return False
        registers = program.registers(numbers)
        for slots, _ in self.batches():
            program.run_lists(slots, registers)
        return True

    def batches(self, elements: int | None = None) -> Iterator[tuple[list[Any], list[Tensor] | None]]:
        """Slots and copies of as many tensors at once as bound the temporaries; or of a slice of one."""
        for batch in self._batches_of(elements or CPU_BATCH):
            slots = [self._views(tensors, batch) if tensors else None for tensors in self.slots]
            yield slots, self._views(self.copy, batch) if self.copy else None

    @functools.cached_property
    def _takes_lists(self) -> bool:
        """Whether lists go into PyTorch's calls as they are."""
        types = {tensors[0].dtype for tensors in self.slots if tensors}
        return self.device.type == "cpu" and self.same_layout and self.copy is None and types == {self._compute}

    def _batches_of(self, elements: int) -> list[Piece]:
        if elements not in self._batches:
            sliceable = [True] * len(self.sizes)
            self._batches[elements] = list(cut_into_pieces(self.sizes, elements, sliceable, shortest=elements))
        return self._batches[elements]

    def _count_culprits(self, culprits: Tensor, values: Any, piece: Piece) -> None:
        parts = values.split(self._sizes_of(piece)) if len(piece.indices) > 1 else (values,)
        for index, part in zip(piece.indices, parts, strict=True):
            culprits[index] += torch.stack((part.isinf().sum(), part.isnan().sum()))

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
            return (results[0], results[1][: rule.quantities]) if rule.quantities else (results, ())

        return call

    @torch.no_grad()
    def measured_total(self, rule: Rule, hyper: dict[str, Any], *, root: bool = False, **options: Any) -> Tensor:
        """Runs a rule that measures one quantity; returns its sum (or maximum) over all tensors, float32 [1]."""
        if options.get("noop") is None:
            total = foreach.total(rule, self, hyper, options.get("grad_scale"))
            if total is not None:
                single = _checked(total.reshape(1, 1), options.get("overflow"), options.get("checks", ()))
                return (single.sqrt() if root else single).reshape(1)
        found = self.apply(rule, hyper, **options)
        assert found is not None
        return self.total(found, maximum=rule.maximum, root=root)

    @torch.no_grad()
    def lamb(
        self,
        hyper: dict[str, Any],
        flags: tuple[bool, ...],
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        seed: int | None = None,
    ) -> None:
        """LAMB's two passes: see `TritonLists.lamb`."""
        if self.device.type == "cpu":
            if noop is not None and noop.item() != 0:
                return
            if native_lamb.apply(self, hyper, flags, grad_scale, seed):
                return
        found = self.apply(rules.LAMB_MOMENTS, hyper, flags, noop=noop, grad_scale=grad_scale)
        self.apply(rules.LAMB_STEP, hyper, flags, noop=noop, whole=found, seed=seed)

    def measured_clip(
        self, rule: Rule, limit: float, margin: float, *, noop: Tensor | None = None, grad_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm of all gradients, and what brings them down to `limit`: see `TritonLists.measured_clip`."""
        norm = self.measured_total(rule, {}, root=not rule.maximum, noop=noop, grad_scale=grad_scale)
        factor = torch.clamp(limit / (norm + margin), max=1.0)
        return norm, factor if grad_scale is None else factor * grad_scale

    def measured_average(
        self,
        rule: Rule,
        averages: Tensor,
        share: float,
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> None:
        """Moves `averages` towards what `rule` measures of each tensor: see `TritonLists.measured_average`."""
        found = self.apply(rule, {}, noop=noop, grad_scale=grad_scale)
        assert found is not None
        now, before = found[:, 0], averages[:, 0]
        after = torch.where(before < 0, now, before.lerp(now, share))
        before.copy_(after if noop is None else torch.where(noop.reshape(()) != 0, before, after))

    def total(self, per_tensor: Tensor, *, maximum: bool = False, root: bool = False) -> Tensor:
        """Sum (or maximum) over the tensors of the first quantity, float32 [1]; its root if asked for."""
        values = per_tensor[:, 0]
        if not values.numel():
            return torch.zeros(1, dtype=torch.float32, device=self.device)
        found = values.amax() if maximum else values.sum(dtype=self._sums)
        return (found.sqrt() if root else found).to(torch.float32).reshape(1)

    def _views(self, tensors: Sequence[Tensor] | None, piece: Piece) -> list[Tensor]:
        assert tensors is not None
        chosen = [tensors[index] for index in piece.indices]
        if not self._same_layout[piece.indices[0]]:
            return chosen  # one tensor, whose elements are taken in the order of its indices
        if len(chosen) > 1:
            return [t if self._contiguous[i] else flat(t) for i, t in zip(piece.indices, chosen, strict=True)]
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
        if len(piece.indices) == 1:
            row = whole[piece.indices[0]].to(self._compute)
            return row[0], row[1]
        indices, sizes = self._numbers_of(piece)
        rows = whole[indices].to(self._compute)
        count = sum(self._sizes_of(piece))  # without which a GPU would be asked for it
        first, second = (torch.repeat_interleave(rows[:, k], sizes, output_size=count) for k in range(2))
        return first, second

    def _sizes_of(self, piece: Piece) -> list[int]:
        """Elements of each tensor that belong to the piece."""
        if piece.start is not None and piece.stop is not None:
            return [piece.stop - piece.start]
        return [self.sizes[index] for index in piece.indices]

    def _numbers_of(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Indices and sizes of tensors that are strung together."""
        if piece not in self._numbers:
            self._numbers[piece] = (
                upload(list(piece.indices), torch.int64, self.device),
                upload(self._sizes_of(piece), torch.int64, self.device),
            )
        return self._numbers[piece]

    def _measure(self, rule: Rule, terms: Sequence[Any], piece: Piece, found: Tensor) -> None:
        for quantity, term in enumerate(terms):
            if len(piece.indices) == 1:
                row = found[piece.indices[0]]
                if rule.maximum:
                    row[quantity] = torch.maximum(row[quantity], term.amax())
                else:
                    row[quantity] += foreach.square_sum(term.root) if isinstance(term, Square) else term.sum()
                continue
            term = elements_of(term)
            indices, sizes = self._numbers_of(piece)
            if self.device.type == "cpu":
                # In the dtype of the sums, because the terms are added one after the other.
                parts = torch.segment_reduce(term.to(found.dtype), "max" if rule.maximum else "sum", lengths=sizes)
            else:
                every = term.split(self._sizes_of(piece))
                parts = torch.stack([part.amax() if rule.maximum else part.sum() for part in every]).to(found.dtype)
            found[indices, quantity] = parts

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
        parts = [value.view(views[0].shape)] if len(views) == 1 else _unflatten(value, views)
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
        here: dict[str, Any] = {"dtype": torch.int64, "device": value.device}
        if len(piece.indices) == 1:
            start = piece.start or 0
            index = torch.arange(start, start + value.numel(), **here)
            return index, torch.tensor(piece.indices, **here)
        index = torch.cat([torch.arange(size, **here) for size in self._sizes_of(piece)])
        return index, torch.repeat_interleave(*self._numbers_of(piece))
