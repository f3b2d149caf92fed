"""Tensor lists with state in host memory: it is copied to the GPU piece by piece, updated there, and copied back.

The GPU's copy engines move more bytes per second than kernels that access host memory: a kernel reads 128 bytes per
request, and requests take bandwidth of the bus from written bytes. While one piece is updated, the next one is copied
to the GPU and the previous one back. A piece is a range of a rule's programs, so that every element is computed by
the same program, with the same bits, as in one launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._device import real_tensors
from .._host_memory import HostMemory
from . import config
from .codecs import GROUP, Encodings, has_scales
from .rule import GRADIENT, Rule, Slots
from .tables import INDICES, Layout, keep_if_captured, upload
from .triton_lists import TritonLists

# Ranges begin at multiples of this many bytes in a piece.
_ALIGNMENT = 512


class _Range(NamedTuple):
    """A range of bytes of one tensor, copied to the GPU as part of a piece."""

    slot: int
    tensor: int  # index in the list
    column: int  # column of the slot in the table of addresses
    start: int  # first byte in the tensor
    host: Tensor  # the bytes in host memory
    offset: int  # first byte in the piece


class _Draft(NamedTuple):
    """A piece before GPU memory is assigned to it: programs, as (tensor, first block, blocks), and byte ranges."""

    programs: list[tuple[int, int, int]]
    ranges: list[_Range]

    @property
    def nbytes(self) -> int:
        if not self.ranges:
            return 0
        last = self.ranges[-1]
        return -(-(last.offset + last.host.numel()) // _ALIGNMENT) * _ALIGNMENT


class _Piece(NamedTuple):
    """A range of a rule's programs, and the copies (slot, host memory, device memory) of the state they update."""

    launched: int  # number of programs
    programs: Tensor  # tensor and block of each program
    fixed: Tensor  # the table of addresses, those of device memory for copied ranges
    copies: list[tuple[int, Tensor, Tensor]]


class StagedLists(TritonLists):
    """`TritonLists` with tensors in a `HostMemory`. Rules that measure read these directly, without copies."""

    def __init__(
        self, slots: Slots, copy: Sequence[Tensor] | None, encodings: Encodings | None, memory: HostMemory
    ) -> None:
        self._memory = memory
        # For each column of the table of addresses: slot, tensors, and whether 64 elements share one number.
        self._listed: list[tuple[int, Sequence[Tensor], bool]] = []
        # By layout: the table of addresses that the pieces were made for, the pieces, and their memory.
        self._pieces: dict[int, tuple[Any, list[_Piece], list[Tensor]]] = {}
        super().__init__(slots, copy, encodings)

    def point_to(self, slots: Slots, copy: Sequence[Tensor] | None = None, encodings: Encodings | None = None) -> None:
        """Replace the tensors by others of the same sizes and dtypes."""
        self._listed = []
        for slot, tensors in enumerate((*slots, copy)):
            if tensors and slot != GRADIENT:
                self._listed.append((slot, tensors, False))
                encoded = None if encodings is None else encodings.get(slot)
                if encoded is not None and encoded.companions is not None:
                    self._listed.append((slot, encoded.companions, has_scales(encoded.codec)))
        super().point_to(slots, copy, encodings)

    def _launches(self, rule: Rule, layout: Layout) -> Iterator[tuple[int, Tensor | None, Tensor | None]]:
        pieces: list[_Piece] = []
        if not rule.quantities and layout.programs is not None:
            pieces, memory = self._pieces_of(layout)
        if not pieces:
            yield from super()._launches(rule, layout)
            return
        for piece in pieces:
            keep_if_captured(self.device, piece.programs, piece.fixed, *memory)
        slots = {*rule.reads, *rule.writes}  # a skipped step writes nothing, so that all of it must be in the piece
        arriving, leaving = self._memory.streams()
        current = torch.cuda.current_stream(self.device) if arriving is not None else None
        if current is not None:
            arriving.wait_stream(current)
        stored: list[Any] = []
        for index, piece in enumerate(pieces):
            with _on(arriving, stored[index - len(memory)] if index >= len(memory) else None):
                for slot, host, device in piece.copies:
                    if slot in slots:
                        device.copy_(host, non_blocking=True)
            if current is not None:
                current.wait_stream(arriving)
            yield piece.launched, piece.programs, piece.fixed
            with _on(leaving, None if current is None else current.record_event()):
                for slot, host, device in piece.copies:
                    if slot in rule.writes:
                        host.copy_(device, non_blocking=True)
            stored.append(None if current is None else leaving.record_event())
        if current is not None:
            current.wait_stream(leaving)

    def _pieces_of(self, layout: Layout) -> tuple[list[_Piece], list[Tensor]]:
        made = self._pieces.get(id(layout))
        if made is None or made[0] is not self.table.fixed:
            with real_tensors():
                made = self._pieces[id(layout)] = (self.table.fixed, *self._make_pieces(layout))
        return made[1], made[2]

    def _make_pieces(self, layout: Layout) -> tuple[list[_Piece], list[Tensor]]:
        """Return the pieces of a layout, and the GPU buffers they share; none if host memory holds little state."""
        drafts = self._drafts(layout)
        if not drafts:
            return [], []
        largest = max(draft.nbytes for draft in drafts)
        count = min(config.PIECES_AT_ONCE, len(drafts))
        memory = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(count)]
        addresses = torch.tensor(self.table.rows(), **INDICES)
        pieces = []
        for index, draft in enumerate(drafts):
            base, rows, copies = memory[index % count], addresses.clone(), []
            for slot, tensor, column, start, host, offset in draft.ranges:
                # Programs add the offset of their block in the whole tensor, `start` or more.
                rows[tensor, 1 + column] = base.data_ptr() + offset - start
                copies.append((slot, host, base[offset : offset + host.numel()]))
            tensors, starts, blocks = torch.tensor(draft.programs, **INDICES).unbind(1)
            shifts = (blocks.cumsum(0) - blocks - starts).repeat_interleave(blocks)
            block_numbers = torch.arange(len(shifts), **INDICES) - shifts
            numbers = torch.stack((tensors.repeat_interleave(blocks), block_numbers), 1)
            programs = upload(numbers, torch.int32, self.device)
            pieces.append(_Piece(len(numbers), programs, upload(rows, torch.int64, self.device), copies))
        return pieces, memory

    def _drafts(self, layout: Layout) -> list[_Draft]:
        columns = [
            (slot, [self._memory.bytes_of(tensor) for tensor in tensors], tensors, grouped)
            for slot, tensors, grouped in self._listed
        ]
        total = sum(part.numel() for _, parts, _, _ in columns for part in parts if part is not None)
        limit = config.piece(total)
        drafts: list[_Draft] = [_Draft([], [])] if limit else []
        for tensor, size in enumerate(self.sizes if limit else ()):
            # Column, slot, bytes of the tensor, and how many of them belong to a block.
            parts = [
                (column, slot, part, layout.elements // (GROUP if grouped else 1) * tensors[tensor].element_size())
                for column, (slot, members, tensors, grouped) in enumerate(columns)
                if (part := members[tensor]) is not None
            ]
            per_block = sum(width for *_, width in parts)
            first, blocks = 0, -(-size // layout.elements)
            while first < blocks:
                draft = drafts[-1]
                room = limit - draft.nbytes
                if room < per_block and draft.ranges:
                    drafts.append(_Draft([], []))
                    continue
                count = min(blocks - first, max(1, room // per_block)) if per_block else blocks
                draft.programs.append((tensor, first, count))
                for column, slot, part, width in parts:
                    start = first * width
                    host = part[start : (first + count) * width]
                    draft.ranges.append(_Range(slot, tensor, column, start, host, draft.nbytes))
                first += count
        return drafts


@contextlib.contextmanager
def _on(stream: Any, event: Any) -> Iterator[None]:
    """Make a stream current and let it wait for an event; without a stream, or without an event, skip this."""
    if stream is None:
        yield
        return
    if event is not None:
        stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield
