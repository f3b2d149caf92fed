"""DistributedFusedAdam: Adam and AdamW with state and gradients sharded over processes (ZeRO-2)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...optimizers._checkpoints import load_with_hooks, saved_with_hooks
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
    """`apex.optimizers.FusedAdam` with its state sharded over processes; the same numbers for averaged gradients.

    Parameters are laid out in buckets, and each process owns an equal shard of every bucket. It reduces the gradients
    of its shards, keeps and updates their state, and sends the updated parameters to the others. Models are not
    wrapped. Backward passes take gradients away: `param.grad` is None afterwards. A missing gradient counts as zeros.
    All processes must take the same number of backward passes and steps. With one process nothing is sent.

    - `dtype`, `grad_sync_dtype`, `param_sync_dtype`: dtypes of the state, and of gradients and parameters while they
      are sent (`dtype` by default). With an integer `param_sync_dtype`, parameters are sent bit by bit, without their
      last bits if the integer is narrower;
    - `device`: must be the device of the parameters;
    - `process_group`: all processes, as a grid. State is sharded over `distributed_process_group` (by default all of
      them) and replicated over `redundant_process_group` (by default none);
    - `average_grad_sync`: average gradients instead of summing them;
    - `overlap_grad_sync`: send buckets of gradients during backward passes;
    - `overlap_param_sync`: let `step` return before parameters have arrived; the first use of a parameter waits for it;
    - `bucket_cap_mb`: the size of a bucket of gradients;
    - `pipeline_size`: the number of buckets that are sent concurrently outside of backward passes;
    - `contiguous_param_buffer`, `contiguous_grad_buffer`: make parameters (from `init_param_buffer` or the first step
      on) and gradients (from `zero_grad` on) views of lasting buffers, which are sent without copies;
    - `store_params`: keep the parameters in `dtype` as part of the state if they have another dtype. Otherwise updates
      are rounded to the parameters' dtype;
    - `store_param_remainders`: keep only the 16 bits that bfloat16 parameters lack to float32: half the memory;
    - `with_scaled_states`: keep state in float16 or bfloat16 (`dtype`), with a scale for every piece of a parameter;
    - `nccl_ub`: let NCCL allocate the buffers if it can, and send them without copies; needs `contiguous_grad_buffer`;
    - `capturable`: keep step count and learning rate on the device, so that a CUDA graph can be replayed;
    - `state_format`: how moments are stored, "float32", "bfloat16", "int8" or "float8" (docs/state_formats.md).
    """

    @dataclass
    class ParameterFragment:
        """The elements of a parameter in one bucket, and the part of them in this rank's shard.

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
        """This rank's shard of a bucket: sizes, dtypes, fragments of parameters, and views of the state."""

        def __init__(
            self, arena: Arena, number: int, fragments: list[Any], shards: dict[str, Tensor], offset: int
        ) -> None:
            """Make the shard; `offset` is the start of the arena in a buffer of all arenas with the same dtypes."""
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
            """Return the dtypes of the state, and of gradients and parameters while they are sent."""
            return self.dtype, self.grad_sync_dtype, self.param_sync_dtype

    @dataclass
    class ParameterBucket:
        """Updated parameters of a bucket, by the names of upstream's class. Subclasses name it in annotations."""

        params_shard: Tensor | None = None
        params_bucket: Tensor | None = None

    def parameter(self, *args: Any) -> Any:
        """Return the parameter of a fragment, or of a group's index and the parameter's index in the group."""
        if len(args) == 1 and isinstance(args[0], DistributedFusedAdam.ParameterFragment):
            group, index = args[0].param_group_id, args[0].param_id
        elif len(args) == 2 and all(isinstance(number, int) for number in args):
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
        first = piece.start - piece.offset  # difference of a parameter's index and an offset in the bucket
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
        """Return the state; all processes must call it.

        Format 2, the default, has whole tensors of every parameter in host memory, in all processes. With
        `gather_on_root` only the first process gets them, and the others None. Format 1 has the shards of every rank
        in the first process, and None in the others. With `gather_on_root=False` it has this rank's shards, as views.
        `load_state_dict` takes any of these on any number of processes, except the shards of a single rank.
        """
        if state_dict_format not in (None, 1, 2):
            raise ValueError(f"state_dict_format={state_dict_format} is not known; 1 and 2 are")
        self._settle()
        if state_dict_format == 1:
            self._refuse_numbered_experts()
            on_root = True if gather_on_root is None else gather_on_root
            return saved_with_hooks(self, lambda: checkpoints.shards_of_ranks(self, on_root))
        return saved_with_hooks(self, lambda: checkpoints.whole_tensors(self, bool(gather_on_root)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, `apex.optimizers.FusedAdam` or `torch.optim.AdamW`.

        Parameters get the values in the state dict, if it has any. All processes must call it.
        """
        self._settle()
        load_with_hooks(self, state_dict, functools.partial(checkpoints.load, self))

    def _settle(self) -> None:
        """Make missing state, wait for gradients and parameters, and subtract skipped steps from the count."""
        self.init_params()
        self.grad_sync()
        self.param_sync()
        self._steps.settle()
