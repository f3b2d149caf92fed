"""Lists of tensors whose rows are measured and updated one by one: row i is everything at index i of dimension 0.

A vector is a single row. Rows are entries of the tables of the kernels, found by arithmetic: a model with 1.3 billion
parameters has half a million of them, too many to look at one by one from Python.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _device
from . import config
from .launches import reductions
from .lists import kernel_fits
from .programs import elements_of
from .rule import GRADIENT, Rule
from .tables import INDICES, AddressTable, Layout, current_stream, keep_if_captured, upload
from .torch_lists import CPU_PIECE, DEVICE_PIECE, Piece, Slots, TorchLists, cut_into_pieces, is_dense
from .triton_lists import TritonLists

if TYPE_CHECKING:
    from .._launch import BoundLaunch

MINIMUM_BLOCK = 128
# Blocks of a row that one program walks over. A launch that adds up four sums of 26,000 rows takes longer.
LONGEST_WALK = 16


def row_count(tensor: Tensor) -> int:
    """The number of rows, none of them empty."""
    if not tensor.numel():
        return 0
    return tensor.shape[0] if tensor.ndim > 1 else 1


def rows_are_stretches(tensor: Tensor) -> bool:
    """Whether every row is one stretch of memory, and the rows lie one after the other."""
    if tensor.ndim < 2 or tensor.is_contiguous():
        return tensor.is_contiguous()
    return is_dense(tensor) and (tensor.shape[0] == 1 or tensor.stride(0) == tensor.numel() // max(1, tensor.shape[0]))


class RowTable(AddressTable):
    """The addresses of all rows, given those of the tensors."""

    def __init__(
        self, counts: Tensor, row_sizes: Tensor, widths: Sequence[int], gradient_width: int, device: torch.device
    ) -> None:
        self.owner = torch.repeat_interleave(torch.arange(len(counts), **INDICES), counts)
        first = counts.cumsum(0) - counts
        super().__init__(row_sizes[self.owner].tolist(), device)
        self._widths = torch.tensor([*widths, gradient_width], **INDICES)
        self._before = (torch.arange(len(self.owner), **INDICES) - first[self.owner]) * row_sizes[self.owner]
        step = self._widths[:, None] * row_sizes * (counts > 1)
        self._rows_aligned = not bool((step & 15).any())

    def _of_rows(self, addresses: list[list[int]], widths: Tensor) -> Tensor:
        return torch.tensor(addresses, **INDICES)[:, self.owner] + widths[:, None] * self._before

    def update_fixed(self, addresses: list[list[int]]) -> None:
        """Addresses of the tensors of every list but the gradients; see `AddressTable.update_fixed`."""
        if addresses != self._fixed_addresses:
            rows = self._of_rows(addresses, self._widths[:-1])
            self.fixed = upload(torch.stack((torch.tensor(self.sizes, **INDICES), *rows), 1), torch.int64, self.device)
            self._fixed_addresses = addresses
            self._fixed_aligned = self._rows_aligned and not any(address & 15 for row in addresses for address in row)
            self.uploads += 1

    def update_moving(self, addresses: list[int] | None) -> None:
        """Addresses of the gradients; see `AddressTable.update_moving`."""
        if addresses is not None and addresses != self._moving_addresses:
            self.moving = upload(self._of_rows([addresses], self._widths[-1:])[0], torch.int64, self.device)
            self._moving_addresses = addresses
            self._moving_aligned = not any(address & 15 for address in addresses)
            self.uploads += 1


class TritonRowLists(TritonLists):
    """`TritonLists` whose tensors are rows."""

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        first = next(tensors for tensors in slots if tensors)
        self.device = first[0].device
        self.stream = current_stream(self.device)
        self.types = tuple(tensors[0].dtype if tensors else None for tensors in (*slots, copy))
        counts = [row_count(tensor) for tensor in first]
        row_sizes = [tensor.numel() // max(1, count) for tensor, count in zip(first, counts, strict=True)]
        gradients = slots[GRADIENT]
        assert gradients
        fixed = [
            tensors[0].element_size() for slot, tensors in enumerate((*slots, copy)) if slot != GRADIENT and tensors
        ]
        rows_of_tensors = torch.tensor(counts, **INDICES)
        self._table: RowTable = RowTable(
            rows_of_tensors, torch.tensor(row_sizes, **INDICES), fixed, gradients[0].element_size(), self.device
        )
        self.sizes = tuple(self._table.sizes)
        bounds = torch.cat((torch.zeros(1, **INDICES), rows_of_tensors.cumsum(0)))
        self._tensor_bounds = upload(bounds, torch.int32, self.device)
        self._projections: dict[Any, BoundLaunch] = {}
        self._begin()
        self._finishes_each = False  # mostly there is one program per row, and nothing to add up
        self.point_to(slots, copy)

    def _block_for(self, lists: int) -> int:
        """No more than the average row needs: what a block has beyond the end of its row is idle."""
        largest = config.block(_device.facts(self.device), lists)
        average = sum(self.sizes) // max(1, len(self.sizes))
        return min(largest, max(MINIMUM_BLOCK, 1 << (average - 1).bit_length() if average > 1 else 1))

    def _blocks_together(self, block: int, lists: int) -> int:
        """A program per row, so that nothing is left to add up, unless a row is very long."""
        needed = -(-max(self.sizes) // block)
        return 1 << (needed - 1).bit_length() if needed <= LONGEST_WALK else super()._blocks_together(block, lists)

    def _scratch(self, shape: tuple[int, ...]) -> Tensor:
        """Sums of rows may go to whoever asked for them."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def _per_tensor(self, rule: Rule, partials: Tensor, layout: Layout, noop: Tensor | None) -> Tensor:
        if layout.count == len(self.sizes):  # a program per row
            return partials
        return super()._per_tensor(rule, partials, layout, noop)

    def project(
        self, found: Tensor, limits: Tensor, eps: float, delta: float, decay: float | Tensor, ratio: float
    ) -> Tensor:
        """See `projection.project`."""
        whole = torch.empty((len(self.sizes), 2), dtype=torch.float32, device=self.device)
        on_device, decay = None, self._here(decay)
        if isinstance(decay, Tensor):
            on_device, decay = decay.to(self.device, torch.float32).reshape(1), 0.0
        key = on_device is None
        launch = self._projections.get(key)
        if launch is None:
            launch = self._projections[key] = reductions().project_rows.bind(
                (limits.shape[1],),
                (0.0,) * 4,
                (config.REDUCE_BLOCK,),
                device=self.device,
                num_warps=config.REDUCE_WARPS,
            )
        keep_if_captured(self.device, self._tensor_bounds, limits)
        launch(found, self._tensor_bounds, limits, on_device, whole, floats=(*map(float, (eps, delta, decay, ratio)),))
        return whole


class TorchRowLists(TorchLists):
    """`TorchLists` that measure, and take the two numbers, row by row."""

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        super().__init__(slots, copy)
        first = next(tensors for tensors in slots if tensors)
        self._counts = [row_count(tensor) for tensor in first]
        self._first_rows = [sum(self._counts[:index]) for index in range(len(first))]
        self.results = sum(self._counts)
        # Other tensors are taken whole, in the order of their indices, which is the order of their rows too.
        self._same_layout = [
            same and rows_are_stretches(tensor) for same, tensor in zip(self._same_layout, first, strict=True)
        ]
        limit = CPU_PIECE if self.device.type == "cpu" else DEVICE_PIECE
        slices = functools.partial(self._slices, limit)
        self._pieces = list(cut_into_pieces(self.sizes, limit, self._same_layout, slices))
        self._rows: dict[Piece, tuple[Tensor, Tensor]] = {}
        owner = torch.repeat_interleave(torch.arange(len(first), **INDICES), torch.tensor(self._counts, **INDICES))
        self.owner = owner.to(self.device)

    def _row_size(self, index: int) -> int:
        return self.sizes[index] // max(1, self._counts[index])

    def _slices(self, limit: int, index: int) -> Iterator[tuple[int, int]]:
        """Slices of a large tensor: some whole rows, or a part of one."""
        size, row = self.sizes[index], self._row_size(index)
        if row <= limit:
            step = limit // row * row
            yield from ((at, min(at + step, size)) for at in range(0, size, step))
        else:
            for begin in range(0, size, row):
                yield from ((at, min(at + limit, begin + row)) for at in range(begin, begin + row, limit))

    def _row_range(self, index: int, piece: Piece) -> tuple[int, int]:
        """The rows of tensor `index` that a piece touches."""
        first = self._first_rows[index]
        if piece.start is None or piece.stop is None:
            return first, first + self._counts[index]
        row = self._row_size(index)
        return first + piece.start // row, first + -(-piece.stop // row)

    def _rows_of(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The rows of tensors that are strung together, and how long each is."""
        if piece not in self._rows:
            ranges = [range(*self._row_range(index, piece)) for index in piece.indices]
            here: dict[str, Any] = {"dtype": torch.int64, "device": self.device}
            rows = torch.tensor([row for part in ranges for row in part], **here)
            sizes = torch.tensor([self._row_size(index) for index in piece.indices], **here)
            counts = torch.tensor([len(part) for part in ranges], **here)
            self._rows[piece] = rows, torch.repeat_interleave(sizes, counts)
        return self._rows[piece]

    def _spread(self, per_row: Tensor, piece: Piece) -> Tensor:
        """A value for every element of the piece from one for every row."""
        if len(piece.indices) > 1:
            rows, lengths = self._rows_of(piece)
            return torch.repeat_interleave(per_row[rows], lengths)
        (index,) = piece.indices
        begin, end = self._row_range(index, piece)
        row = self._row_size(index)
        if end - begin == 1 and piece.start is not None and piece.stop is not None:
            row = piece.stop - piece.start
        return per_row[begin:end, None].expand(-1, row).reshape(-1)

    def _whole(self, whole: Tensor | None, piece: Piece) -> tuple[Any, Any]:
        if whole is None:
            return 0.0, 0.0
        wide = whole.to(self._compute)
        return self._spread(wide[:, 0], piece), self._spread(wide[:, 1], piece)

    def _measure(self, rule: Rule, terms: Sequence[Any], piece: Piece, found: Tensor) -> None:
        for quantity, term in enumerate(map(elements_of, terms)):
            if len(piece.indices) == 1:
                begin, end = self._row_range(piece.indices[0], piece)
                found[begin:end, quantity] += term.view(end - begin, -1).sum(1)
            elif self.device.type == "cpu":
                rows, lengths = self._rows_of(piece)
                found[rows, quantity] = torch.segment_reduce(term.to(found.dtype), "sum", lengths=lengths)
            else:
                for index, part in zip(piece.indices, term.split(self._sizes_of(piece)), strict=True):
                    begin, end = self._row_range(index, piece)
                    found[begin:end, quantity] = part.view(end - begin, -1).sum(1).to(found.dtype)

    def _numbering(self, value: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """The index of every element within its row, and the number of its row."""
        here: dict[str, Any] = {"dtype": torch.int64, "device": value.device}
        rows = torch.arange(self.results, **here)
        indices = []
        for index in piece.indices:
            begin, end = self._row_range(index, piece)
            row = self._row_size(index)
            if piece.start is not None and piece.stop is not None and end - begin == 1:
                indices.append(torch.arange(piece.start % row, piece.start % row + value.numel(), **here))
            else:
                indices.append(torch.arange(row, **here).repeat(end - begin))
        return torch.cat(indices), self._spread(rows, piece)

    def of_tensors(self, per_row: Tensor, *, maximum: bool = False) -> Tensor:
        """Sums (or maxima) over the rows of each tensor: [tensors, columns] from [rows, columns]."""
        nothing = per_row.new_zeros(per_row.shape[1])
        parts = per_row.split(self._counts)
        return torch.stack([nothing if not len(part) else part.amax(0) if maximum else part.sum(0) for part in parts])


RowLists = TritonRowLists | TorchRowLists


def make_row_lists(slots: Slots, copy: Sequence[Tensor] | None = None) -> RowLists:
    """The lists of one group (see `make_lists`), row by row, on the implementation that the dispatch chooses."""
    used = [tensors for tensors in (*slots, copy) if tensors]
    fits = all(map(kernel_fits, zip(*used, strict=True))) and all(map(rows_are_stretches, used[0]))
    has_rows = any(tensor.numel() for tensor in used[0])
    return TritonRowLists(slots, copy) if fits and has_rows else TorchRowLists(slots, copy)
