"""Tables of tensors' addresses in device memory, which the multi-tensor kernels read in place of tensor arguments.

If an address changes, the table is uploaded again, into new memory: kernels in flight and captured CUDA graphs keep
the old table.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _device, _graph_numbers
from .._graph_numbers import capturing
from .._host import HOST

# Sizes, counts and addresses are computed on the host.
INDICES: dict[str, Any] = {"dtype": torch.int64, "device": HOST}

# Sources and targets of captured uploads, and tables that captured launches read: kept because a replay uses them
# again. Graphs of `apex.graphs` keep their own.
_captured: list[tuple[Tensor | None, ...]] = []
_recordings = itertools.count(-1, -1)


def _comparison() -> Any:
    """Return PyTorch's function that compares addresses of tensors, at some indices, with a list of addresses.

    Return None if PyTorch has no such function (on CPUs), or one that behaves differently.
    """
    have_addresses: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if have_addresses is None:
        return None
    tensors = list(torch.empty(2, dtype=torch.float32, device=HOST))
    try:
        addresses = [tensor.data_ptr() for tensor in tensors]
        same = [
            have_addresses(tensors, candidate, [0, 1]) for candidate in (addresses, addresses[::-1], [addresses[0], 0])
        ]
    except (TypeError, RuntimeError):  # other arguments, or no memory because fake tensors are active
        return None
    return have_addresses if same == [True, False, False] else None


_have_addresses = _comparison()


@functools.lru_cache(64)
def _indices(count: int) -> list[int]:
    return list(range(count))


def lie_at(tensors: list[Tensor], addresses: list[int]) -> bool:
    """Return whether the tensors have these addresses; both lists must have the same length.

    Raises a TypeError or RuntimeError for None or a sparse tensor, which have no address.
    """
    if _have_addresses is None:
        return list(map(Tensor.data_ptr, tensors)) == addresses
    return _have_addresses(tensors, addresses, _indices(len(addresses)))


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor on `device`, in stream order and without waiting for the copy."""
    if device.type != "cuda":
        return torch.as_tensor(values, dtype=dtype, device=device)
    if isinstance(values, Tensor):
        host = values.to(dtype).pin_memory()
    else:
        host = torch.tensor(values, dtype=dtype, device=HOST, pin_memory=True)
    capture = _graph_numbers.current
    if capture is not None and (kept := capture.memory(host.numel(), dtype)) is not None:
        result = kept.view(host.shape)
        capture.once.append(lambda: result.copy_(host, non_blocking=True))  # not in every replay: 6 us each
        return result
    result = host.to(device, non_blocking=True)
    if torch.cuda.is_current_stream_capturing():
        _keep(host, result)
    return result


def current_stream(device: torch.device) -> int:
    """Return the handle of the stream that work on `device` goes to; pointer tables are valid on one stream only.

    Returns 0 on the CPU, and a new negative number at each call during the capture of a CUDA graph: data uploaded then
    exists only when that graph is replayed, neither before nor in another graph.
    """
    if device.type != "cuda":
        return 0
    stream = _device.current_stream(_device.current_device() if device.index is None else device.index)
    # The default stream, 0, cannot be captured; asking takes 1 us.
    return next(_recordings) if stream and torch.cuda.is_current_stream_capturing() else stream


def keep_if_captured(device: torch.device, *tables: Tensor | None) -> None:
    """Keep tables alive that a captured launch reads: a CUDA graph outlives the lists that made them."""
    if current_stream(device) < 0:
        _keep(*tables)


def _keep(*tensors: Tensor | None) -> None:
    capture = capturing()
    (_captured if capture is None else capture.kept).append(tensors)


def _low_bits(addresses: Sequence[int]) -> int:
    """Return the bitwise or of all addresses' low four bits: 0 if every address is a multiple of 16."""
    return functools.reduce(operator.or_, addresses, 0) & 15


class Layout:
    """An assignment of programs to blocks of tensors, computed from the sizes of the tensors."""

    def __init__(
        self, sizes: Sequence[int], block: int, device: torch.device, blocks_per_program: int = 1, stages: int = 1
    ) -> None:
        self.block = block
        self.blocks_per_program = blocks_per_program
        self.stages = stages  # of a program's loads
        self.elements = block * blocks_per_program  # of a program
        with _device.real_tensors():
            counts = -(-torch.tensor(sizes, **INDICES) // self.elements)
            ends = counts.cumsum(0)
            self.count = int(ends[-1]) if len(sizes) else 0
            most = int(counts.max()) if len(sizes) else 0
            # The number of programs of the largest tensor.
            self.most = most
            if self.count >= 2**31:
                raise ValueError(f"{self.count} blocks of {self.elements} elements are more than one launch can take")
            self.programs: Tensor | None = None  # None: each tensor has one program, with the tensor's number
            if most > 1 or self.count < len(sizes):
                tensor = torch.repeat_interleave(torch.arange(len(sizes), **INDICES), counts)
                within = torch.arange(self.count, **INDICES) - (ends - counts)[tensor]
                self.programs = upload(torch.stack((tensor, within), 1), torch.int32, device)
            self.bounds = upload(torch.cat((torch.zeros(1, **INDICES), ends)), torch.int32, device)


class PointerTable:
    """Sizes and addresses of tensor lists; addresses of gradients, which move, are separate from the rest."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = list(sizes)
        self.device = device
        self.fixed: Tensor | None = None
        self.moving: Tensor | None = None
        self._fixed_addresses: list[list[int]] | None = None
        self._moving_addresses: list[int] | None = None
        self._fixed_aligned = self._moving_aligned = True
        # Whether the only other list is the gradients' own list, so that one comparison is enough.
        self._in_place = False

    def update_fixed(self, addresses: list[list[int]]) -> None:
        """Upload the addresses of every list except the gradients, one row per list, if they have changed."""
        if addresses != self._fixed_addresses:
            self.fixed = upload(self._fixed_rows(addresses), torch.int64, self.device)
            self._fixed_addresses = addresses
            self._fixed_aligned = not any(_low_bits(row) for row in addresses)

    def update_moving(self, addresses: list[int] | None) -> None:
        """Upload the addresses of the gradients if they have changed."""
        if addresses != self._moving_addresses:
            self.moving = None if addresses is None else upload(self._moving_rows(addresses), torch.int64, self.device)
            self._moving_aligned = addresses is None or not _low_bits(addresses)
        self._moving_addresses = addresses

    def rows(self) -> Any:
        """Return the rows of the table of addresses, gradients apart, as they were uploaded last."""
        return self._fixed_rows(self._fixed_addresses or [])

    def _fixed_rows(self, addresses: list[list[int]]) -> Any:
        """Return the table that kernels read: for each tensor its size, and its address in every list."""
        return list(zip(self.sizes, *addresses, strict=True))

    def _moving_rows(self, addresses: list[int]) -> Any:
        return addresses

    def has_gradients(self, tensors: list[Tensor]) -> bool:
        """Return whether these gradients, equally many, have the addresses that were uploaded last."""
        return self._moving_addresses is not None and lie_at(tensors, self._moving_addresses)

    def point_to(self, fixed: Sequence[list[Tensor]], gradients: list[Tensor] | None) -> None:
        """Point the table to the tensors of every list, gradients apart; upload addresses that have changed."""
        if len(fixed) == 1 and fixed[0] is gradients and self._in_place and self.has_gradients(gradients):
            return
        known = self._fixed_addresses
        if known is None or not all(map(lie_at, fixed, known)):
            self.update_fixed([list(map(Tensor.data_ptr, tensors)) for tensors in fixed])
        if gradients is None:
            self.update_moving(None)
        elif not self.has_gradients(gradients):
            self.update_moving(list(map(Tensor.data_ptr, gradients)))
        self._in_place = self._fixed_addresses == [self._moving_addresses]

    @property
    def aligned(self) -> bool:
        """Whether every tensor starts at a multiple of 16 bytes."""
        return self._fixed_aligned and self._moving_aligned
