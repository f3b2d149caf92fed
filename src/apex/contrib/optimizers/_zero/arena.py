"""Parameters that are laid out together, and the buffers that follow their layout."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ....ops._host_memory import HostMemory
from ....ops.multi_tensor.flat import FlatBuffer, flat, is_dense
from .groups import Groups
from .layout import Layout, Piece, merge_adjacent

logger = logging.getLogger("apex.contrib.optimizers")

# Memory pools that are registered with NCCL, one for each buffer, for as long as its process group lives.
_pools: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

# Parameters start at multiples of this many bytes in every buffer.
ALIGNMENT = 128

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Dtypes(NamedTuple):
    """Dtypes of the optimizer's state, and of gradients and parameters while they are sent.

    If `parameters` is an integer dtype, that many of the most significant bytes of each parameter are sent.
    """

    state: torch.dtype
    gradients: torch.dtype
    parameters: torch.dtype

    def check(self) -> Dtypes:
        """Return the dtypes; raise an error if one is not supported."""
        for name, value in zip(("dtype", "grad_sync_dtype", "param_sync_dtype"), self, strict=True):
            if value not in _FLOATS and not (name == "param_sync_dtype" and value in _INTEGERS):
                more = ", and integers of 8 to 64 bits" if name == "param_sync_dtype" else ""
                raise ValueError(f"{name}={value} is not supported; float32, float16 and bfloat16 are{more}")
        return self


class Arena:
    """Parameters of one device and dtype that are laid out together, and this rank's flat buffers for them.

    A whole buffer has `layout.size` elements; `bucket(buffer, number)` is a bucket of it. A flat shard has
    `layout.shard_size` elements; `shard(buffer, number)` is this rank's shard of a bucket. `owned` lists the pieces of
    parameters in a flat shard, bucket by bucket; `parts` lists them with neighbours merged.

    `group_of` has the index of each parameter's parameter group. `outgoing` has, for each bucket, the shard of updated
    parameters that `ParameterSync` sends; an optimizer sets it.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        group_of: Sequence[int],
        dtypes: Dtypes,
        groups: Groups,
        bucket_bytes: float | None,
        allocate: Callable[..., Tensor] = torch.zeros,
        host: HostMemory | None = None,
        layout: Callable[..., Layout] = Layout,
        alignment: int = 1,
    ) -> None:
        """Lay parameters out; a bucket of gradients has at most `bucket_bytes`, and `allocate` makes sent buffers.

        Parameters and shards start at multiples of `alignment` elements. `host` has the memory for lasting state, None
        for the device's memory.
        """
        self.params = list(params)
        self.group_of = list(group_of)
        self.dtypes = dtypes
        # The requested dtype, and the number of most significant bytes to send of each parameter; None for all.
        self.param_sync_dtype = dtypes.parameters
        self.sent_bytes: int | None = None
        if not dtypes.parameters.is_floating_point:
            own = self.params[0].dtype
            self.dtypes = dtypes._replace(parameters=own)
            self.sent_bytes = dtypes.parameters.itemsize if dtypes.parameters.itemsize < own.itemsize else None
        self.groups = groups
        self.device = self.params[0].device
        self.allocate = allocate
        self.host = host
        for index, param in enumerate(self.params):
            if not is_dense(param):
                raise ValueError(
                    f"parameter {index} of shape {tuple(param.shape)} has gaps or overlaps in memory (strides "
                    f"{param.stride()}); make it contiguous first"
                )
        width = dtypes.gradients.itemsize
        elements = None if bucket_bytes is None else int(bucket_bytes / width)
        sizes = [param.numel() for param in self.params]
        self.layout = layout(sizes, groups.ranks, elements, max(alignment, ALIGNMENT // width))
        self.outgoing: list[Tensor] = []
        # For each parameter a gradient, laid out like it, that has not been sent (one process: not used by a step).
        self.gradients: list[Tensor | None] = [None] * len(self.params)
        # This rank's flat shard of the sum over all processes.
        self.gradient_shard: Tensor | None = None
        # Whole buffers, if gradients or parameters are views of one.
        self.gradient_buffer: FlatBuffer | None = None
        self.parameter_buffer: FlatBuffer | None = None

    @functools.cached_property
    def owned(self) -> tuple[Piece, ...]:
        """Return the pieces of parameters that this rank owns, bucket by bucket."""
        return self.layout.owned_by(self.groups.rank)

    @functools.cached_property
    def parts(self) -> list[Piece]:
        """Return the pieces that this rank owns, with neighbours merged: whole parameters if there is one rank."""
        return merge_adjacent(self.owned)

    def new_shard(self, dtype: torch.dtype) -> Tensor:
        """Return a flat shard of zeros."""
        return torch.zeros(self.layout.shard_size, dtype=dtype, device=self.device)

    def new_state(self, dtype: torch.dtype, group: int = 1) -> Tensor:
        """Return a flat shard of zeros for lasting state, in host memory if the state is offloaded.

        With a `group` it has one number for this many elements.
        """
        size = self.layout.shard_size // group
        if self.host is None:
            return torch.zeros(size, dtype=dtype, device=self.device)
        return self.host.empty((size,), dtype).zero_()

    def new_buffer(self, dtype: torch.dtype) -> FlatBuffer:
        """Return a whole buffer of zeros, with a view for each parameter."""
        return FlatBuffer(self.params, self.layout.starts, self.layout.size, dtype, self.allocate)

    def shard(self, buffer: Tensor, bucket: int) -> Tensor:
        """Return this rank's shard of a bucket, as a view of a flat shard."""
        start = self.layout.shard_starts[bucket]
        return buffer[start : start + self.layout.shard_sizes[bucket]]

    def bucket(self, buffer: Tensor, bucket: int) -> Tensor:
        """Return a bucket, as a view of a whole buffer."""
        start = self.layout.bucket_starts[bucket]
        return buffer[start : start + self.layout.bucket_sizes[bucket]]

    def shards(self, values: Tensor | FlatBuffer) -> list[Tensor]:
        """Return this rank's shard of each bucket, as views of a flat shard or of a whole buffer."""
        if isinstance(values, Tensor):
            return list(values.split(self.layout.shard_sizes))
        buckets = values.values.split(self.layout.bucket_sizes)
        return [bucket.view(self.groups.ranks, -1)[self.groups.rank] for bucket in buckets]

    def copy_gradients(self, number: int, views: Sequence[Tensor]) -> list[Tensor]:
        """Copy the gradients of bucket `number` to views of its pieces; return the views without a gradient."""
        sources, filled, missing = [], [], []
        for piece, view in zip(self.layout.pieces[number], views, strict=True):
            gradient = self.gradients[piece.param]
            if gradient is None:
                missing.append(view)
            else:
                whole = flat(gradient)
                sources.append(whole if piece.size == len(whole) else whole[piece.start : piece.stop])
                filled.append(view)
        if sources:
            torch._foreach_copy_(filled, sources)
        return missing


class ParameterViews:
    """1-D views of pieces of parameters, made again only if parameters get other memory."""

    def __init__(self, arena: Arena, pieces: Sequence[Piece]) -> None:
        self._members = [(arena.params[piece.param], slice(piece.start, piece.stop)) for piece in pieces]
        self._addresses: list[int] = []
        self._views: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        """Return a 1-D view of each piece."""
        addresses = [param.data_ptr() for param, _ in self._members]
        if addresses != self._addresses:
            self._addresses = addresses
            self._views = [flat(param.detach())[elements] for param, elements in self._members]
        return self._views


def allocator(group: Any, device: torch.device, registered: bool) -> Callable[..., Tensor]:
    """Return a function like `torch.zeros` that allocates buffers for the collectives of a process group.

    If `registered`, and if NCCL can do it, buffers are registered with NCCL, which then sends them without a copy.
    """
    backend: Any = None if not registered or group is None or device.type != "cuda" else group._get_backend(device)
    try:
        allocate = backend.mem_allocator
        new_pool = torch.cuda.MemPool
    except (AttributeError, RuntimeError) as error:  # another backend, or PyTorch or NCCL is too old
        if registered:
            logger.info("nccl_ub: NCCL allocates no buffers on %s; they are allocated as usual: %s", device, error)
        return torch.zeros

    def zeros(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        pool = new_pool(allocate)
        with torch.cuda.use_mem_pool(pool, device):
            buffer = torch.zeros(size, dtype=dtype, device=device)
        try:
            backend.register_mem_pool(pool)
        except (AttributeError, RuntimeError) as error:
            logger.warning("nccl_ub: a buffer could not be registered with NCCL, and is used without: %s", error)
        _pools.setdefault(group, []).append(pool)
        return buffer

    return zeros
