"""The state dicts of DistributedFusedAdam: whole tensors (format 2), shards of ranks (format 1), sharded tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ....ops.multi_tensor.packed_floats import join_remainders
from .saved import StateLoader, Stretch, gather, gather_objects, like_param, names_of
from .sharded import restore, sharded
from .state import PARAM


def packed_groups(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups, with numbers in the place of parameters."""
    found, first = [], 0
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in options.items()}
        found.append({**plain, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return found


def _keys(optimizer: Any) -> dict[Tensor, int]:
    return {param: index for index, param in enumerate(optimizer.parameters())}


def _load_groups(optimizer: Any, saved: Sequence[dict[str, Any]]) -> None:
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for name, value in options.items():
            if name in ("params", "step"):
                continue
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = value


def _check_groups(optimizer: Any, saved: Sequence[dict[str, Any]]) -> None:
    """Raises unless there are as many parameters as were saved."""
    sizes = [[len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the state dict has groups of {sizes[1]} parameters, the optimizer of {sizes[0]}")


# Format 2 -------------------------------------------------------------------------------------------------------------


def whole(optimizer: Any, on_root: bool) -> dict[str, Any] | None:
    """Whole tensors of every parameter; None where they are not wanted."""
    keeps = not on_root or torch.distributed.get_rank() == optimizer.process_group_root
    found = gather(optimizer._states, keeps)
    if not keeps:
        return None
    keys = _keys(optimizer)
    state: dict[Any, Any] = {"step": optimizer._steps.settle()}
    state.update({keys[param]: found[param] for param in keys if param in found})
    return {"state": state, "param_groups": packed_groups(optimizer), "format": 2}


def _whole_stretches(optimizer: Any, state: dict[Any, Any], indices: list[int]) -> Iterator[Stretch]:
    for param, index in zip(optimizer.parameters(), indices, strict=True):
        if param in optimizer._places:
            for name, saved in state.get(index, {}).items():
                if name != "step":
                    yield param, name, 0, like_param(saved, param)


def _steps_of(state_dict: dict[str, Any]) -> int:
    """The count of steps: the optimizer's, or that of the groups or parameters of another optimizer."""
    state = state_dict["state"]
    if "step" in state:
        return int(state["step"])
    counts = [group["step"] for group in state_dict["param_groups"] if "step" in group]
    counts += [each["step"] for each in state.values() if isinstance(each, dict) and "step" in each]
    return max(map(int, counts), default=0)


# Format 1 -------------------------------------------------------------------------------------------------------------


def shards_of_ranks(optimizer: Any, on_root: bool) -> dict[str, Any] | None:
    """The state of this rank in buckets; or that of every rank, as bytes, on the first one, None elsewhere."""
    numbers, keys = optimizer._numbers(), _keys(optimizer)
    state: dict[Any, Any] = {"buckets": [], "step": optimizer._steps.settle()}
    for each in optimizer._states:
        shards = each.shards()
        shards.update({f"{name}_shard": each.read(name) for name in each.names})
        if "param_remainders_shard" not in shards:
            shards["params_shard"] = each.read(PARAM)
        for bucket in optimizer._buckets_of(each.arena, shards, numbers, len(state["buckets"])):
            state["buckets"].append(bucket)
            for fragment in bucket.fragments:
                key = keys[optimizer.parameter(fragment)]
                state.setdefault(key, {}).setdefault("fragments", []).append(fragment)
    local = {"state": state, "param_groups": packed_groups(optimizer)}
    if not on_root:
        return {**local, "format": 1}
    _own_memory(state["buckets"])
    stream = io.BytesIO()
    torch.save(local, stream)
    groups = optimizer._groups
    found = gather_objects(stream.getvalue(), groups.distributed, groups.ranks)
    if found is None or (not groups.is_one and torch.distributed.get_rank() != groups.root):
        return None
    return {"gathered_states": [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in found], "format": 1}


def _unpacked(optimizer: Any, packed: Tensor) -> dict[str, Any]:
    """The state of a rank out of its bytes, in which nothing is run.

    Buckets and fragments in it are objects of classes inside a class: pickles name these as attributes of that class.
    """
    parts = {each.__name__: each for each in (optimizer.StateBucket, optimizer.ParameterFragment)}
    owners = {each.__qualname__.rpartition(".")[0]: each.__module__ for each in parts.values()}

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


def _own_memory(buckets: list[Any]) -> None:
    """Copies of what are views of larger tensors, which would be saved whole."""
    for bucket in buckets:
        for name, value in vars(bucket).items():
            if isinstance(value, Tensor):
                setattr(bucket, name, value.cpu().clone())


def _bucket_stretches(optimizer: Any, state: dict[Any, Any], names: tuple[str, ...]) -> Iterator[Stretch]:
    for bucket in state["buckets"]:
        for fragment in bucket.fragments:
            if not fragment.in_local_shard:
                continue
            param = optimizer.param_groups[fragment.param_group_id]["params"][fragment.param_id]
            at = slice(*fragment.shard_range)
            start, stop = fragment.shard_param_range
            for name in names:
                shard = getattr(bucket, "params_shard" if name == PARAM else f"{name}_shard", None)
                if shard is not None:
                    yield param, name, start, shard[at]
                elif name == PARAM and bucket.param_remainders_shard is not None:
                    lower = bucket.param_remainders_shard[at].to(param.device)
                    yield param, name, start, join_remainders(_elements(param, start, stop), lower)


def _elements(param: Tensor, start: int, stop: int) -> Tensor:
    return like_param(param.detach(), param)[start:stop]


# Loading --------------------------------------------------------------------------------------------------------------


def load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Loads a state dict of either format; nothing changes if it does not fit."""
    ranks = [state_dict]
    if "gathered_states" in state_dict:
        ranks = [_unpacked(optimizer, each) for each in state_dict["gathered_states"]]
    for each in ranks:
        _check_groups(optimizer, each["param_groups"])
    names = tuple(dict.fromkeys(chain.from_iterable(map(names_of, optimizer._states))))
    loader = StateLoader(optimizer._states)
    for each in ranks:
        state = each["state"]
        if "buckets" in state:
            loader.add(_bucket_stretches(optimizer, state, names))
        else:
            indices = list(chain.from_iterable(group["params"] for group in each["param_groups"]))
            loader.add(_whole_stretches(optimizer, state, indices))
    loader.finish(optional=(PARAM,))
    _load_groups(optimizer, ranks[0]["param_groups"])
    _go_on(optimizer, _steps_of(ranks[0]))


def _go_on(optimizer: Any, step: int) -> None:
    """Sets the step count after loading, and gives the parameters their loaded values."""
    optimizer._steps.set(step)
    optimizer._parameters.updated()
    optimizer.param_sync()


# Sharded --------------------------------------------------------------------------------------------------------------


def sharded_dict(optimizer: Any) -> dict[str, Any]:
    """Sharded tensors of every parameter, by its number."""
    keys = _keys(optimizer)
    return {
        "state": sharded(optimizer._states, lambda param: str(keys[param])),
        "step": optimizer._steps.settle(),
        # Tuples, which torch.distributed.checkpoint takes as one value each. It takes lists apart in another way where
        # a rank has no part of some tensor, and does not find them then.
        "param_groups": tuple(packed_groups(optimizer)),
        # Elements are saved in the order in which they lie in memory.
        "strides": tuple(param.stride() for param in optimizer.parameters()),
    }


def load_sharded(optimizer: Any, saved: dict[str, Any]) -> None:
    """Takes the state from the dict of `sharded_dict`, after a checkpoint was loaded into it."""
    _check_groups(optimizer, saved["param_groups"])
    keys = _keys(optimizer)
    for index, (param, strides) in enumerate(zip(optimizer.parameters(), saved["strides"], strict=True)):
        if param.stride() != tuple(strides):
            raise ValueError(
                f"parameter {index} has strides {param.stride()}, its state was saved with {tuple(strides)}; give it "
                "the memory format that it had"
            )
    restore(optimizer._states, saved["state"], lambda param: str(keys[param]))
    _load_groups(optimizer, saved["param_groups"])
    _go_on(optimizer, int(saved["step"]))


def load_stretches(optimizer: Any, stretches: Sequence[Stretch], groups: Sequence[dict[str, Any]], step: int) -> None:
    """Loads the parts of the state that `own_stretches` lists, and the options of the parameter groups."""
    loader = StateLoader(optimizer._states)
    loader.add(stretches)
    loader.finish()
    _load_groups(optimizer, groups)
    _go_on(optimizer, step)
