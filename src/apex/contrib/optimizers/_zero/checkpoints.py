"""State dicts of sharded optimizers: whole tensors (format 2), shards of ranks (format 1), sharded tensors.

Ranks may own other parts of a parameter when a state dict is loaded than when it was saved. So all formats are loaded
as slices of parameters, and each rank takes the elements that it owns now.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...._distributed.collectives import all_gather
from ...._failures import explained
from ....ops.multi_tensor.flat import flat, with_strides_of
from ....ops.multi_tensor.packed_floats import join_remainders
from ....optimizers._buckets import MASTER
from ....optimizers._checkpoints import step_counts
from ....optimizers._muon_directions import SQUARES
from .arena import Arena
from .layout import Piece, merge_adjacent, pick
from .scaled_state import ScaledState
from .state import PARAM, ArenaState

State = ArenaState | ScaledState

# (parameter, name, first element, elements): a slice of a parameter's state in the order of its memory.
StateSlice = tuple[Tensor, str, int, Tensor]

_GATHERING = "gathering the state of an optimizer"


def _names(state: State) -> tuple[str, ...]:
    """Return the names of all tensors that are saved for a parameter."""
    return PARAM, *state.names


def _by_param(parts: Iterable[Piece]) -> dict[int, list[Piece]]:
    """Return the parts of each parameter, by its index."""
    by_param: dict[int, list[Piece]] = {}
    for part in parts:
        by_param.setdefault(part.param, []).append(part)
    return by_param


@torch.no_grad()
def gather(
    states: Sequence[State], keep: bool, params: Iterable[Any] | None = None, names: Iterable[str] | None = None
) -> dict[Tensor, dict[str, Tensor]]:
    """Return the whole state of every parameter in host memory, by name; an empty dict unless `keep`.

    `params` and `names` select parameters and state names; None means all. All processes must call it.
    """
    gathered: dict[Tensor, dict[str, Tensor]] = {}
    selected = None if params is None else set(params)
    for state in states:
        arena = state.arena
        wanted = [selected is None or param in selected for param in arena.params]
        for name in _names(state) if any(wanted) else ():
            if names is not None and name not in names:
                continue
            values = state.read(name)
            if keep:
                for param in (param for param, asked in zip(arena.params, wanted, strict=True) if asked):
                    gathered.setdefault(param, {})[name] = torch.empty_like(param, dtype=values.dtype, device="cpu")
            for number, all_pieces in enumerate(arena.layout.pieces):
                pieces = [piece for piece in all_pieces if wanted[piece.param]]
                if not pieces:
                    continue
                bucket = arena.shard(values, number)
                if arena.groups.ranks > 1:
                    whole = bucket.new_empty(arena.layout.bucket_sizes[number])
                    # NCCL gets a copy on the device of state that is in the host's memory.
                    bucket = bucket if arena.host is None else bucket.clone()
                    all_gather(whole, bucket, arena.groups.distributed, _GATHERING).wait()
                    bucket = whole
                for piece in pieces if keep else ():
                    target = flat(gathered[arena.params[piece.param]][name])
                    target[piece.start : piece.stop] = bucket[piece.offset : piece.offset + piece.size]
    return gathered


def own_slices(states: Sequence[State]) -> list[StateSlice]:
    """Return this rank's part of every parameter's state, as views of the state if possible."""
    return [
        (state.arena.params[part.param], name, part.start, values)
        for state in states
        for name in _names(state)
        for part, values in zip(state.arena.parts, pick(state.read(name), state.arena.parts), strict=True)
    ]


@torch.no_grad()
def write_slices(states: Sequence[State], slices: Iterable[StateSlice], optional: Sequence[str] = ()) -> None:
    """Write the elements of the slices that this rank owns to the states.

    Raise an error, before anything changes, if elements are missing. State whose name is `optional` may be missing as a
    whole.
    """
    locations = {
        param: (number, index) for number, state in enumerate(states) for index, param in enumerate(state.arena.params)
    }
    parts = [_by_param(state.arena.parts) for state in states]
    loaded: dict[tuple[int, str], Tensor] = {}
    sizes: Counter[tuple[int, str]] = Counter()
    for param, name, start, saved in slices:
        number, index = locations[param]
        key = number, name
        if key not in loaded:
            loaded[key] = states[number].arena.new_state(states[number].read(name).dtype)
        for part in parts[number].get(index, ()):
            begin, end = max(part.start, start), min(part.stop, start + len(saved))
            if begin < end:
                at = part.flat + begin - part.start
                loaded[key][at : at + end - begin].copy_(saved[begin - start : end - start])
                sizes[key] += end - begin
    for number, state in enumerate(states):
        wanted = sum(part.size for part in state.arena.parts)
        for name in _names(state):
            size = sizes[number, name]
            if size != wanted and not (name in optional and not size):
                raise ValueError(
                    f"the state dict has {size} of the {wanted} elements of {name} that rank "
                    f"{state.arena.groups.rank} of {state.arena.groups.ranks} needs: it lacks parameters, or is "
                    "that of one rank among others"
                )
    for (number, name), values in loaded.items():
        states[number].write(name, values)


@contextlib.contextmanager
def edited(states: Sequence[State]) -> Iterator[dict[Tensor, dict[str, Tensor]]]:
    """Yield the whole state of every parameter in host memory, by name, and write the changed values back.

    All processes must enter the context and make the same changes.
    """
    gathered = gather(states, keep=True)
    yield gathered
    slices = ((param, name, 0, flat(value)) for param, named in gathered.items() for name, value in named.items())
    write_slices(states, slices)


def load_slices(
    optimizer: Any,
    slices: Iterable[StateSlice],
    groups: Sequence[dict[str, Any]],
    step: int,
    optional: Sequence[str] = (),
) -> None:
    """Load state, options of the parameter groups and step counts; parameters get their loaded values.

    A group that lacks its step count has counted all of the optimizer's steps: earlier versions saved no other count.
    """
    write_slices(optimizer._states, slices, optional)
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for name, value in options.items():
            if name in ("params", "step"):
                continue
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = value
    optimizer._steps.set(step, [int(options.get("step", step)) for options in groups])
    optimizer._parameters.updated()
    optimizer.param_sync()


def _keys(optimizer: Any) -> dict[Tensor, int]:
    return {param: index for index, param in enumerate(optimizer.parameters())}


def packed_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups, with indices instead of parameters and without step counts."""
    packed, first = [], 0
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in ("params", "step")}
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in options.items()}
        packed.append({**plain, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return packed


def _check_groups(optimizer: Any, saved: Sequence[dict[str, Any]]) -> None:
    """Raise an error if the groups do not have as many parameters as the saved ones."""
    sizes = [[len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the state dict has groups of {sizes[1]} parameters, the optimizer of {sizes[0]}")


def whole_tensors(optimizer: Any, on_root: bool) -> dict[str, Any] | None:
    """Return format 2, whole tensors of every parameter; with `on_root`, None in all but the first process."""
    keeps = not on_root or dist.get_rank() == optimizer.process_group_root
    gathered = gather(optimizer._states, keeps)
    if not keeps:
        return None
    keys = _keys(optimizer)
    state: dict[Any, Any] = {"step": optimizer._steps.settle()}
    state.update({keys[param]: gathered[param] for param in keys if param in gathered})
    return {"state": state, "param_groups": optimizer._counted_groups(), "format": 2}


def shards_of_ranks(optimizer: Any, on_root: bool) -> dict[str, Any] | None:
    """Return format 1: this rank's state in buckets.

    With `on_root`, return the pickled states of all ranks in the first process, and None in the others.
    """
    numbers, keys = optimizer._numbers(), _keys(optimizer)
    state: dict[Any, Any] = {"buckets": [], "step": optimizer._steps.settle()}
    for arena_state in optimizer._states:
        shards = arena_state.shards()
        shards.update({f"{name}_shard": arena_state.read(name) for name in arena_state.names})
        if "param_remainders_shard" not in shards:
            shards["params_shard"] = arena_state.read(PARAM)
        for bucket in optimizer._buckets_of(arena_state.arena, shards, numbers, len(state["buckets"])):
            state["buckets"].append(bucket)
            for fragment in bucket.fragments:
                key = keys[optimizer.parameter(fragment)]
                state.setdefault(key, {}).setdefault("fragments", []).append(fragment)
    local = {"state": state, "param_groups": optimizer._counted_groups()}
    if not on_root:
        return {**local, "format": 1}
    for bucket in state["buckets"]:
        for name, value in vars(bucket).items():
            if isinstance(value, Tensor):
                setattr(bucket, name, value.cpu().clone())  # a view would be saved with its whole storage
    stream = io.BytesIO()
    torch.save(local, stream)
    groups = optimizer._groups
    pickles: list[Any] | None = [stream.getvalue()]
    if groups.ranks > 1:
        pickles = [None] * groups.ranks if groups.rank == 0 else None
        with explained(_GATHERING):
            first = dist.get_global_rank(groups.distributed, 0)
            dist.gather_object(stream.getvalue(), pickles, dst=first, group=groups.distributed)
    if pickles is None or (not groups.is_one and dist.get_rank() != groups.root):
        return None
    states = [torch.frombuffer(bytearray(pickled), dtype=torch.uint8) for pickled in pickles]
    return {"gathered_states": states, "format": 1}


def _unpacked(optimizer: Any, packed: Tensor) -> dict[str, Any]:
    """Unpickle the state of a rank from bytes without running code in them.

    A pickle names the classes of buckets and fragments, which are nested in a class, as attributes of that class.
    """
    parts = {part.__name__: part for part in (optimizer.StateBucket, optimizer.ParameterFragment)}
    owners = {part.__qualname__.rpartition(".")[0]: part.__module__ for part in parts.values()}

    def part_of(_: Any, name: str) -> type:
        if name not in parts:
            raise pickle.UnpicklingError(f"{name} is no part of the state of {type(optimizer).__name__}")
        return parts[name]

    def owner() -> None:
        raise pickle.UnpicklingError("an optimizer is no part of its state")

    known: list[Any] = [(part_of, "builtins.getattr"), *parts.values()]
    known += [(owner, f"{module}.{name}") for name, module in owners.items()]
    with torch.serialization.safe_globals(known):
        return torch.load(io.BytesIO(packed.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)


def load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Load a state dict of either format; nothing changes if it does not fit."""
    ranks = [state_dict]
    if "gathered_states" in state_dict:
        ranks = [_unpacked(optimizer, packed) for packed in state_dict["gathered_states"]]
    for saved in ranks:
        _check_groups(optimizer, saved["param_groups"])
    slices = chain.from_iterable(
        (_bucket_slices if "buckets" in saved["state"] else _whole_slices)(optimizer, saved) for saved in ranks
    )
    load_slices(optimizer, slices, *_counted(ranks[0]), optional=(PARAM, SQUARES))


def _whole_slices(optimizer: Any, saved: dict[str, Any]) -> Iterator[StateSlice]:
    indices = chain.from_iterable(group["params"] for group in saved["param_groups"])
    for param, index in zip(optimizer.parameters(), indices, strict=True):
        if param not in optimizer._locations:
            continue
        known = _names(optimizer._states[optimizer._locations[param][0]])
        for saved_name, value in saved["state"].get(index, {}).items():
            if saved_name == "step":
                continue
            name = PARAM if saved_name == MASTER else saved_name  # as other optimizers of apex call it
            if name not in known:
                cause = "it is of another algorithm, or encoded (then save it with state_dict(decoded=True))"
                if name == SQUARES:
                    cause = "it is of NorMuon, so give the parameter groups of DistributedFusedMuon the option beta2"
                raise ValueError(
                    f"the state dict has {saved_name!r} for a parameter of shape {tuple(param.shape)}, which "
                    f"{type(optimizer).__name__} does not keep: {cause}"
                )
            if name == SQUARES and value.numel() in (math.prod(param.shape[:-1]), param.shape[0]):
                rows = param.shape[:-1] if value.numel() == math.prod(param.shape[:-1]) else param.shape[:1]
                value = value.reshape(*rows, *(1 for _ in param.shape[len(rows) :])).expand(param.shape)
            if value.shape != param.shape:
                raise ValueError(
                    f"the state of a parameter of shape {tuple(param.shape)} has shape {tuple(value.shape)}"
                )
            yield param, name, 0, flat(with_strides_of(param, value))


def _bucket_slices(optimizer: Any, saved: dict[str, Any]) -> Iterator[StateSlice]:
    names = dict.fromkeys(chain.from_iterable(map(_names, optimizer._states)))
    for bucket in saved["state"]["buckets"]:
        for fragment in bucket.fragments:
            if not fragment.in_local_shard:
                continue
            param = optimizer.parameter(fragment)
            at = slice(*fragment.shard_range)
            start, stop = fragment.shard_param_range
            for name in names:
                shard = getattr(bucket, "params_shard" if name == PARAM else f"{name}_shard", None)
                if shard is not None:
                    yield param, name, start, shard[at]
                elif name == PARAM and bucket.param_remainders_shard is not None:
                    lower = bucket.param_remainders_shard[at].to(param.device)
                    yield param, name, start, join_remainders(flat(param.detach())[start:stop], lower)


def _counted(state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Return the parameter groups with their step counts, and the optimizer's step count.

    Other optimizers save counts in their parameter groups or with their parameters.
    """
    step = int(state_dict["state"].get("step", 0))
    counts = [step if count is None else int(count) for count in step_counts(state_dict)]
    groups = [{**group, "step": count} for group, count in zip(state_dict["param_groups"], counts, strict=True)]
    return groups, max(step, *counts)


def sharded_tensors(optimizer: Any) -> dict[str, Any]:
    """Return the state of every parameter, by its index, as 1-D sharded tensors: each rank has the slices it owns.

    Elements are in the order of the parameter's memory. Shards are views of the state if possible.
    """
    keys = _keys(optimizer)
    state: dict[str, dict[str, Any]] = {}
    for arena_state in optimizer._states:
        arena = arena_state.arena
        everywhere = [_by_param(merge_adjacent(arena.layout.owned_by(rank))) for rank in range(arena.groups.ranks)]
        for name in _names(arena_state):
            values = arena_state.read(name)
            for index, param in enumerate(arena.params):
                of_param = [parts.get(index, []) for parts in everywhere]
                state.setdefault(str(keys[param]), {})[name] = _sharded_tensor(arena, index, of_param, values)
    return {
        "state": state,
        "step": optimizer._steps.settle(),
        # Tuples, because torch.distributed.checkpoint saves a tuple as one value. It splits lists, but
        # differently on a rank that has no part of some tensor, which then finds nothing to load.
        "param_groups": tuple(optimizer._counted_groups()),
        "strides": tuple(param.stride() for param in optimizer.parameters()),
    }


def _sharded_tensor(arena: Arena, index: int, parts: Sequence[Sequence[Piece]], values: Tensor) -> Any:
    size, groups = arena.layout.sizes[index], arena.groups
    mine = parts[groups.rank]
    if not size:
        return values[:0]
    if groups.ranks == 1:
        return values[mine[0].flat : mine[0].flat + size]
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharding_spec import ShardMetadata

    device = "cpu" if arena.device.type == "cpu" else f"{arena.device.type}:{arena.device.index or 0}"
    ranks = dist.get_process_group_ranks(groups.distributed)
    shards = [
        [ShardMetadata([part.start], [part.size], f"rank:{ranks[rank]}/{device}") for part in of_rank]
        for rank, of_rank in enumerate(parts)
    ]
    local = [Shard(part, where) for part, where in zip(pick(values, mine), shards[groups.rank], strict=True)]
    properties = TensorProperties(dtype=values.dtype, layout=torch.strided, requires_grad=False)
    metadata = ShardedTensorMetadata(list(chain.from_iterable(shards)), torch.Size([size]), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, process_group=groups.distributed)


def load_sharded(optimizer: Any, saved: dict[str, Any]) -> None:
    """Load the state from the dict of `sharded_tensors`, after a checkpoint was loaded into it."""
    _check_groups(optimizer, saved["param_groups"])
    for index, (param, strides) in enumerate(zip(optimizer.parameters(), saved["strides"], strict=True)):
        if param.stride() != tuple(strides):
            raise ValueError(
                f"parameter {index} has strides {param.stride()}, its state was saved with {tuple(strides)}; give it "
                "the memory format that it had"
            )
    load_slices(optimizer, _loaded_slices(optimizer, saved), saved["param_groups"], int(saved["step"]))


def _loaded_slices(optimizer: Any, saved: dict[str, Any]) -> Iterator[StateSlice]:
    keys = _keys(optimizer)
    for state in optimizer._states:
        for param in state.arena.params:
            for name in _names(state):
                tensor = saved["state"][str(keys[param])][name]
                if isinstance(tensor, Tensor) and not hasattr(tensor, "local_shards"):
                    yield param, name, 0, tensor
                else:
                    for shard in tensor.local_shards():
                        yield param, name, shard.metadata.shard_offsets[0], shard.tensor
