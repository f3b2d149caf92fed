"""Lists of tensors whose rows are measured and updated one by one: row i is everything at index i of dimension 0.

A vector is a single row. Rows are entries of the kernels' tables, computed by arithmetic: a model with 1.3 billion
parameters has half a million of them, too many for a loop in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _device
from .._graph_numbers import Number
from . import config
from .dispatch import kernel_fits
from .flat import is_dense
from .rule import GRADIENT, Rule, Slots
from .tables import INDICES, PointerTable, keep_if_captured, upload
from .torch_lists import TorchLists
from .triton_lists import Sum, TritonLists, reductions

MINIMUM_BLOCK = 128
# Most blocks of a row that one program walks over. A launch that adds up four sums of 26,000 rows takes longer.
LONGEST_WALK = 16


def row_count(tensor: Tensor) -> int:
    """Return the number of rows that are not empty."""
    if not tensor.numel():
        return 0
    return tensor.shape[0] if tensor.ndim > 1 else 1


def rows_are_stretches(tensor: Tensor) -> bool:
    """Return whether every row is one stretch of memory, and the rows follow each other."""
    if tensor.ndim < 2 or tensor.is_contiguous():
        return tensor.is_contiguous()
    return is_dense(tensor) and (tensor.shape[0] == 1 or tensor.stride(0) == tensor.numel() // max(1, tensor.shape[0]))


class RowTable(PointerTable):
    """A table of the addresses of all rows, computed from the addresses of the tensors."""

    def __init__(
        self, counts: Tensor, row_sizes: Tensor, widths: Sequence[int], gradient_width: int, device: torch.device
    ) -> None:
        self.owner = torch.repeat_interleave(torch.arange(len(counts), **INDICES), counts)
        first = counts.cumsum(0) - counts
        super().__init__(row_sizes[self.owner].tolist(), device)
        self._widths = torch.tensor([*widths, gradient_width], **INDICES)
        self._before = (torch.arange(len(self.owner), **INDICES) - first[self.owner]) * row_sizes[self.owner]
        self._rows_aligned = not bool((self._widths[:, None] * row_sizes * (counts > 1) & 15).any())

    def _of_rows(self, addresses: list[list[int]], widths: Tensor) -> Tensor:
        return torch.tensor(addresses, **INDICES)[:, self.owner] + widths[:, None] * self._before

    def _fixed_rows(self, addresses: list[list[int]]) -> Tensor:
        rows = self._of_rows(addresses, self._widths[:-1])
        return torch.stack((torch.tensor(self.sizes, **INDICES), *rows), 1)

    def _moving_rows(self, addresses: list[int]) -> Tensor:
        return self._of_rows([addresses], self._widths[-1:])[0]

    @property
    def aligned(self) -> bool:
        """Whether every row starts at a multiple of 16 bytes."""
        return self._rows_aligned and super().aligned


class TritonRowLists(TritonLists):
    """`TritonLists` with rows in place of tensors."""

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None) -> None:
        super().__init__(slots, copy)
        self._finishes_each = False  # most rows have one program each, and nothing to add up

    def _make_table(self, slots: Slots, copy: Sequence[Tensor] | None) -> PointerTable:
        first = next(tensors for tensors in slots if tensors)
        counts = [row_count(tensor) for tensor in first]
        row_sizes = [tensor.numel() // max(1, count) for tensor, count in zip(first, counts, strict=True)]
        widths = [tensors[0].element_size() if tensors else 0 for tensors in (*slots, copy)]
        fixed = [width for slot, width in enumerate(widths) if slot != GRADIENT and width]
        rows = torch.tensor(counts, **INDICES)
        bounds = torch.cat((torch.zeros(1, **INDICES), rows.cumsum(0)))
        self._tensor_bounds = upload(bounds, torch.int32, self.device)
        return RowTable(rows, torch.tensor(row_sizes, **INDICES), fixed, widths[GRADIENT], self.device)

    def _block_for(self, lists: int) -> int:
        """Return a block size no larger than the average row needs: lanes beyond the end of a row are idle."""
        largest = config.block(_device.facts(self.device), lists)
        average = sum(self.sizes) // max(1, len(self.sizes))
        return min(largest, max(MINIMUM_BLOCK, _device.next_power_of_2(average)))

    def _walk(self, block: int, lists: int, measures: bool) -> tuple[int, int]:
        """Return as many blocks as a row has, so that no partial sums remain, unless a row is very long."""
        needed = -(-max(self.sizes) // block)
        if measures and needed <= LONGEST_WALK:
            return _device.next_power_of_2(needed), 1
        return super()._walk(block, lists, measures)

    def _measured(self, rule: Rule, hyper: dict[str, Any], flags: tuple[bool, ...], total: Sum, given: Any) -> Tensor:
        layout = self._layout(rule)
        is_one_each = layout.count == len(self.sizes) and rule.quantities == total.columns
        if not (is_one_each and total.per_tensor) or total.average:
            return super()._measured(rule, hyper, flags, total, given)
        # Each row has one program, whose sums are the row's: nothing is left to add up.
        self._run(rule, hyper, flags, partials=total.out, **given)
        return total.out

    def project(
        self, row_sums: Tensor, limits: Tensor, eps: float, delta: float, decay: float | Tensor, ratio: float
    ) -> Tensor:
        """Decide between AdamP's two passes which tensors are projected; return float32 [rows, 2].

        The first column is the multiple of each row that the step loses, and the second is the row's weight decay.
        `row_sums` has the sums of p * g, g * g, p * p and p * step over each row; `limits` are the
        `projection_thresholds`. The decay is `decay`, times `ratio` for projected parameters.
        """
        whole, on_device, decay = self._empty(len(self.sizes), 2), None, self._here(decay)
        if isinstance(decay, Tensor):
            on_device, decay = decay.to(self.device, torch.float32).reshape(1), 0.0
        keep_if_captured(self.device, self._tensor_bounds, limits)
        reductions.project_rows(
            (limits.shape[1],),
            (row_sums, self._tensor_bounds, limits, on_device, whole),
            (),
            (float(eps), float(delta), float(decay), float(ratio)),
            BLOCK=config.REDUCE_BLOCK,
            num_warps=config.REDUCE_WARPS,
        )
        return whole


class TorchRowLists(TorchLists):
    """`TorchLists` that measure, and use the two numbers of `whole`, row by row."""

    def _row_count(self, tensor: Tensor) -> int:
        return row_count(tensor)

    def _by_address(self, tensors: Sequence[Tensor]) -> bool:
        return super()._by_address(tensors) and rows_are_stretches(tensors[0])

    def project(
        self, row_sums: Tensor, limits: Tensor, eps: float, delta: float, decay: float | Tensor, ratio: float
    ) -> Tensor:
        """Decide which tensors AdamP projects, as `TritonRowLists.project` does."""
        whole = torch.empty((self.results, 2), dtype=torch.float32, device=self.device)
        on_device = [number.on(self.device) if isinstance(number, Number) else number for number in (decay, ratio)]
        decay, ratio = on_device  # type: ignore[assignment]
        for index, (sums, out) in enumerate(
            zip(row_sums.split(self.row_counts), whole.split(self.row_counts), strict=True)
        ):
            if not len(sums):
                continue
            total = sums.sum(0, keepdim=True)
            by_row = _cosine(sums, eps).amax() < limits[0, index] * delta
            at_once = _cosine(total, eps)[0] < limits[1, index] * delta
            share = torch.where(by_row, _parallel(sums, eps), torch.where(at_once, _parallel(total, eps), 0.0))
            out[:, 0] = share
            out[:, 1] = torch.where(by_row | at_once, ratio, out.new_ones(())) * decay
        return whole


class ShardedRows:
    """Rows of tensors that are shards: sums over the parts of a row, and over the rows of a whole tensor.

    `add_columns` adds up values over the processes that hold parts of the same rows, `add_rows` over the processes that
    hold other rows of the same tensors. `largest_of_rows` returns maxima over the processes of `add_rows`.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],
        device: torch.device,
        add_columns: Callable[[Tensor], Tensor],
        add_rows: Callable[[Tensor], Tensor],
        largest_of_rows: Callable[[Tensor], Tensor],
    ) -> None:
        self.add_columns, self.add_rows, self.largest_of_rows = add_columns, add_rows, largest_of_rows
        # Processes whose parts of the rows are empty take part in the sums, so they count these rows too.
        counts = torch.tensor([shard.shape[0] if shard.ndim > 1 else 1 for shard in shards], **INDICES)
        owner = torch.repeat_interleave(torch.arange(len(shards), **INDICES), counts)
        present = torch.tensor([shard.numel() > 0 for shard in shards], dtype=torch.bool, device=INDICES["device"])
        self.counts = upload(counts, torch.int64, device)
        self.owner = upload(owner, torch.int64, device)
        self.present = upload(present[owner].nonzero().reshape(-1), torch.int64, device)

    def of_tensors(self, values: Tensor, operation: str) -> Tensor:
        """Return the sum or the maximum of values of rows, [rows, ...], for each tensor, in a fixed order."""
        return torch.segment_reduce(values, operation, lengths=self.counts, axis=0, unsafe=True, initial=0)


def project_shards(
    row_sums: Tensor, limits: Tensor, rows: ShardedRows, eps: float, delta: float, decay: Any, ratio: Any
) -> Tensor:
    """Decide which tensors AdamP projects, as `TritonRowLists.project` does, if the tensors are shards."""
    sums = torch.zeros((len(rows.owner), 4), dtype=torch.float32, device=row_sums.device)
    sums[rows.present] = row_sums[:, :4]
    sums = rows.add_columns(sums)
    total = rows.add_rows(rows.of_tensors(sums, "sum"))
    largest = rows.largest_of_rows(rows.of_tensors(_cosine(sums, eps), "max"))
    decay, ratio = (number.on(row_sums.device) if isinstance(number, Number) else number for number in (decay, ratio))
    by_row, at_once = largest < limits[0] * delta, _cosine(total, eps) < limits[1] * delta
    whole = torch.where(at_once, _parallel(total, eps), 0.0)[rows.owner]
    share = torch.where(by_row[rows.owner], _parallel(sums, eps), whole)
    shrink = torch.where((by_row | at_once)[rows.owner], ratio, sums.new_ones(())) * decay
    return torch.stack((share, shrink), 1)[rows.present].contiguous()


def _cosine(sums: Tensor, eps: float) -> Tensor:
    """Return the cosine of the angle between parameter and gradient."""
    return sums[:, 0].abs() / ((sums[:, 1].sqrt() + eps) * (sums[:, 2].sqrt() + eps))


def _parallel(sums: Tensor, eps: float) -> Tensor:
    """Return the component of the step along the parameter, in units of the parameter."""
    return sums[:, 3] / (sums[:, 2].sqrt() + eps).square()


RowLists = TritonRowLists | TorchRowLists


def make_row_lists(slots: Slots, copy: Sequence[Tensor] | None = None) -> RowLists:
    """Return row lists of one group (see `make_lists`), on the implementation that the dispatch chooses."""
    used = [tensors for tensors in (*slots, copy) if tensors]
    fits = all(map(kernel_fits, zip(*used, strict=True))) and all(map(rows_are_stretches, used[0]))
    has_rows = any(tensor.numel() for tensor in used[0])
    return TritonRowLists(slots, copy) if fits and has_rows else TorchRowLists(slots, copy)


def projection_thresholds(params: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the cosines, over delta, below which AdamP projects a parameter: by row and as a whole; 0 for never."""
    sizes = [
        (param.numel() // row_count(param), param.numel()) if param.ndim > 1 and param.numel() else (0, 0)
        for param in params
    ]
    roots = [[size**-0.5 if size else 0.0 for size in column] for column in zip(*sizes, strict=True)]
    return upload(roots, torch.float32, device)
