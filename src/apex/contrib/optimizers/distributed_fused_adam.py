"""DistributedFusedAdam: Adam and AdamW with state and gradients divided among processes (ZeRO-2)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._zero import checkpoints
from ._zero.arena import Arena
from ._zero.layout import Piece
from ._zero.subclassing import SubclassableOptimizer

# Private names of upstream's module that clients import from here.
from ._zero.subclassing import _coalescing_manager as _coalescing_manager
from ._zero.subclassing import _coalescing_manager_append_work as _coalescing_manager_append_work
from ._zero.subclassing import _disable_pre_forward_hook as _disable_pre_forward_hook
from ._zero.subclassing import _multi_tensor_copy as _multi_tensor_copy


class DistributedFusedAdam(SubclassableOptimizer):
    """`apex.optimizers.FusedAdam` with its state divided among processes; the same numbers on averaged gradients.

    Parameters are laid out in buckets, and each process owns an equal part of every bucket: it sums up the gradients of
    that part, keeps its state and updates it, and sends the result to the others; models are not wrapped. Backward
    passes take gradients away from parameters: `param.grad` is None after them. A gradient that is missing counts as
    zeros. All processes must take as many backward passes and steps. Where torch.distributed is not initialised, or has
    one process, nothing is sent.

    - `dtype`, `grad_sync_dtype`, `param_sync_dtype`: of the state, and of gradients and parameters that are sent, which
      are `dtype` unless given; as integers parameters travel as they are, or, of fewer bits, without their last bits;
    - `device`: where the parameters are, which is all that is accepted;
    - `process_group`: all processes, as a grid: state is divided among `distributed_process_group` (all of them unless
      given) and repeated in `redundant_process_group` (nobody unless given);
    - `average_grad_sync`: whether gradients are averaged, not summed;
    - `overlap_grad_sync`: whether buckets of gradients are sent during backward passes;
    - `overlap_param_sync`: whether `step` returns before parameters have arrived: each is waited for at its first use;
    - `bucket_cap_mb`: the size of a bucket of gradients; `pipeline_size`: how many are on their way at once outside of
      backward passes;
    - `contiguous_param_buffer`, `contiguous_grad_buffer`: parameters (from `init_param_buffer` or the first step on)
      and gradients (from `zero_grad` on) are views of buffers that stay, in which they are sent without copies;
    - `store_params`: whether the state has the parameters in `dtype`, where theirs is another; without it updates are
      rounded to the parameters' dtype;
    - `store_param_remainders`: it has the 16 bits that bfloat16 parameters lack to float32 instead: half the memory;
    - `with_scaled_states`: state is float16 or bfloat16 (`dtype`), with a scale for every piece of a parameter;
    - `nccl_ub`: buffers are allocated by NCCL, where it can, which then copies nothing; needs `contiguous_grad_buffer`;
    - `capturable`: step count and learning rate are on the device, so that a CUDA graph can be replayed.
    """

    @dataclass
    class ParameterFragment:
        """Where elements of a parameter lie in a bucket, and which of them in this rank's shard of it.

        Ranges are pairs of the first element and the one after the last; None if the shard has no element.
        """

        param_group_id: int
        param_id: int
        bucket_id: int
        param_range: tuple[int, int]
        bucket_range: tuple[int, int]
        in_local_shard: bool
        shard_range: tuple[int | None, int | None] | None
        shard_bucket_range: tuple[int | None, int | None] | None
        shard_param_range: tuple[int | None, int | None] | None

    class StateBucket:
        """This rank's shard of a bucket: sizes, dtypes, what lies in it, and views of the state."""

        def __init__(
            self, arena: Arena, number: int, fragments: list[Any], shards: dict[str, Tensor], offset: int
        ) -> None:
            """`offset` says where the arena starts in a buffer of all arenas with the same dtypes."""
            self.bucket_size = arena.layout.bucket_sizes[number]
            self.shard_size = arena.layout.shard_sizes[number]
            self.dtype, self.grad_sync_dtype = arena.dtypes[:2]
            self.param_sync_dtype = arena.param_sync_dtype
            self.filled_size = self.bucket_size
            self.able_to_fill = False
            self.contiguous_buffer_offset = offset + arena.layout.bucket_starts[number]
            self.fragments = fragments
            self.params_shard: Tensor | None = None
            self.param_remainders_shard: Tensor | None = None
            for name, values in shards.items():
                setattr(self, name, arena.shard(values, number))

        def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
            """Return the dtypes of state, of gradients that are sent and of parameters that are sent."""
            return self.dtype, self.grad_sync_dtype, self.param_sync_dtype

    @dataclass
    class ParameterBucket:
        """Updated parameters of a bucket, by the names of upstream's class. Subclasses name it in annotations."""

        params_shard: Tensor | None = None
        params_bucket: Tensor | None = None

    def parameter(self, *args: Any) -> Any:
        """A parameter: of a fragment, or of a parameter group's number and its own in it."""
        if len(args) == 1 and isinstance(args[0], DistributedFusedAdam.ParameterFragment):
            group, index = args[0].param_group_id, args[0].param_id
        elif len(args) == 2 and all(isinstance(each, int) for each in args):
            group, index = args
        else:
            raise TypeError(f"a ParameterFragment, or two numbers, are expected; not {args}")
        return self.param_groups[group]["params"][index]

    def _arena_added(self, arena: Arena) -> None:
        super()._arena_added(arena)
        numbers = self._numbers()
        shards = self._states[-1].shards()
        for bucket in self._buckets_of(arena, shards, numbers, len(self.state["buckets"])):
            self.state["buckets"].append(bucket)
            for fragment in bucket.fragments:
                self.state[self.parameter(fragment)].setdefault("fragments", []).append(fragment)

    def _buckets_of(
        self, arena: Arena, shards: dict[str, Tensor], numbers: dict[Tensor, tuple[int, int]], first: int
    ) -> Iterator[StateBucket]:
        """Yield an arena's buckets, numbered from `first` on."""
        dtypes = (*arena.dtypes[:2], arena.param_sync_dtype)
        before = itertools.takewhile(lambda other: other is not arena, (state.arena for state in self._states))
        offset = sum(other.layout.size for other in before if (*other.dtypes[:2], other.param_sync_dtype) == dtypes)
        for number, pieces in enumerate(arena.layout.pieces):
            size = arena.layout.shard_sizes[number]
            begin, end = arena.groups.rank * size, (arena.groups.rank + 1) * size
            fragments = [
                self._fragment(*numbers[arena.params[piece.param]], first + number, piece, begin, end)
                for piece in pieces
            ]
            yield self.StateBucket(arena, number, fragments, shards, offset)

    def _fragment(self, group: int, param: int, bucket: int, piece: Piece, begin: int, end: int) -> ParameterFragment:
        """Return the fragment of a piece of a parameter; this rank's shard is `begin` to `end` of the bucket."""
        start, stop = max(piece.offset, begin), min(piece.offset + piece.size, end)
        owned = start < stop
        first = piece.start - piece.offset  # from places in the bucket to elements of the parameter
        return self.ParameterFragment(
            param_group_id=group,
            param_id=param,
            bucket_id=bucket,
            param_range=(piece.start, piece.stop),
            bucket_range=(piece.offset, piece.offset + piece.size),
            in_local_shard=owned,
            shard_range=(start - begin, stop - begin) if owned else (None, None),
            shard_bucket_range=(start, stop) if owned else (None, None),
            shard_param_range=(start + first, stop + first) if owned else (None, None),
        )

    def state_dict(  # type: ignore[override]
        self, *, state_dict_format: int | None = None, gather_on_root: bool | None = None
    ) -> dict[str, Any] | None:
        """The state; all processes must call it.

        Format 2, the default, has whole tensors of every parameter, in the host's memory: the same in all processes,
        or, if `gather_on_root`, in the first one, None in others. Format 1 has the shards of every rank, in the first
        process, None in others; or, unless `gather_on_root`, this rank's own, as views. `load_state_dict` takes both on
        any number of processes, but for a single rank's own.
        """
        if state_dict_format not in (None, 1, 2):
            raise ValueError(f"state_dict_format={state_dict_format} is not known; 1 and 2 are")
        self._settle()
        if state_dict_format == 1:
            return checkpoints.shards_of_ranks(self, True if gather_on_root is None else gather_on_root)
        return checkpoints.whole_tensors(self, bool(gather_on_root))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, or what `apex.optimizers.FusedAdam` or `torch.optim.AdamW` saved.

        Parameters get the values that the state has of them. All processes must call it.
        """
        self._settle()
        checkpoints.load(self, state_dict)

    def _settle(self) -> None:
        """Makes missing state, waits for gradients and parameters, and takes skipped steps off the count."""
        self.init_params()
        self.grad_sync()
        self.param_sync()
        self._steps.settle()
