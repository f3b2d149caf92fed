"""Formats of optimizer state: how moments and master weights are stored in fewer bytes.

State `name` in a format with scales is two tensors, `name::quantized` (codes, shaped like the parameter) and
`name::scales`. With `master_bits`, `master_param::remainder` holds the bits of the float32 master that its bfloat16
parameter lacks. `ops/multi_tensor/codecs.py` has the codecs.

Every shard of a parameter (DTensor) is encoded by itself. Its codes and remainders are distributed like the parameter,
and so are its scales if no shard cuts a group of 64 elements. Other scales belong to one shard, and state dicts have
decoded numbers in place of their codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.shards import cut_dimensions, distributed_like, is_sharded, local
from ..ops.multi_tensor import codecs
from ..ops.multi_tensor.flat import flat, is_dense, laid_out_alike
from ._buckets import MASTER, SlotCodecs

FORMATS = ("float32", "bfloat16", "int8", "float8")
# Codecs of each format, for signed numbers and for squares; None: plain numbers of that dtype.
CODECS: dict[str, dict[str, str | None]] = {
    "float32": {"signed": None, "root": None},
    "bfloat16": {"signed": None, "root": "bfloat16"},
    "int8": {"signed": "signed8", "root": "root8"},
    "float8": {"signed": "float8", "root": "root8"},
}
REMAINDER = f"{MASTER}::remainder"
_REMAINDER_CODECS = {24: "remainder8", 32: "remainder16"}
# The slot of the first state tensor of a rule.
_FIRST = 2


def check_format(format: Any) -> None:
    """Raise an error if `format` is not the name of a format."""
    if format not in FORMATS:
        raise ValueError(f"state_format={format!r} is none of {', '.join(FORMATS)}")


def check_formats(optimizer: Any) -> None:
    """Raise an error if the optimizer's `state_format` or `master_bits` is invalid, or not available for its class."""
    name, format, bits = type(optimizer).__name__, optimizer.state_format, optimizer.master_bits
    check_format(format)
    if bits not in (None, *_REMAINDER_CODECS):
        raise ValueError(f"master_bits={bits!r} is none of None, 24 and 32")
    if not optimizer._encodable and (format != "float32" or bits is not None):
        raise ValueError(f"{name} keeps float32 state: state_format={format!r}, master_bits={bits!r} are not available")
    if bits is not None and optimizer.stochastic_rounding:
        raise ValueError("stochastic_rounding rounds parameters that have no master copy; master_bits makes one")


def _codec(optimizer: Any, name: str) -> str | None:
    """Return the codec of a state tensor; None if it is stored as plain numbers."""
    return CODECS[optimizer.state_format][optimizer._encodable[name]] if name in optimizer._encodable else None


def _stored_name(name: str, codec: str | None) -> str:
    return f"{name}::quantized" if codec is not None and codecs.has_scales(codec) else name


def stored_names(optimizer: Any, group: dict[str, Any]) -> tuple[str, ...]:
    """Return the names under which a parameter's state is stored, in the order of the rule's slots."""
    return tuple(_stored_name(name, _codec(optimizer, name)) for name in optimizer._state_names(group))


def slot_codecs(optimizer: Any, param: Tensor, group: dict[str, Any]) -> SlotCodecs:
    """Return by slot the codec, if it has one, and the name of the state with the codec's scales or remainders."""
    by_slot: SlotCodecs = {}
    if optimizer.master_bits is not None and param.dtype == torch.bfloat16:
        by_slot[0] = _REMAINDER_CODECS[optimizer.master_bits], REMAINDER
    for slot, name in enumerate(optimizer._state_names(group), _FIRST):
        codec = _codec(optimizer, name)
        if codec is not None:
            by_slot[slot] = codec, f"{name}::scales" if codecs.has_scales(codec) else None
    return by_slot


def add_state(optimizer: Any, state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
    """Add missing state tensors of a parameter."""
    if optimizer.master_bits is not None and param.dtype == torch.float16 and not optimizer.master_weights:
        raise ValueError(
            f"master_bits={optimizer.master_bits} is for bfloat16 parameters, and one is float16; master_weights=True "
            "also gives float16 parameters float32 masters"
        )
    by_slot = slot_codecs(optimizer, param, group)
    if by_slot:
        _check_parameter(optimizer, param)
    for slot, name in enumerate(optimizer._state_names(group), _FIRST):
        codec, companions = by_slot.get(slot, (None, None))
        stored = _stored_name(name, codec)
        if stored in state:
            continue
        if codec is not None:
            state[stored] = codecs.new_codes(codec, param.detach())
            if companions is not None:
                scales = codecs.new_companions(codec, local(param))
                assert scales is not None
                state[companions] = _distributed_scales(param, scales)
        else:
            state[name] = optimizer._initial_state(name, param, group)
            if optimizer.state_format == "bfloat16" and name in optimizer._encodable:
                state[name] = state[name].to(torch.bfloat16)
    if 0 in by_slot and REMAINDER not in state:
        state[REMAINDER] = codecs.new_companions(by_slot[0][0], param.detach())


def _check_parameter(optimizer: Any, param: Tensor) -> None:
    options = f"state_format={optimizer.state_format!r}, master_bits={optimizer.master_bits!r}"
    if not is_dense(local(param)):
        raise ValueError(
            f"{options} need parameters whose elements fill their memory, not one of shape {tuple(param.shape)} with "
            f"strides {param.stride()}"
        )
    if param in optimizer._model_params:
        raise ValueError(f"{options} need the model's own parameters, not masters that apex.amp made")


def _distributed_scales(param: Tensor, scales: Tensor) -> Tensor:
    """Return the scales of a shard, distributed like the parameter; unchanged if they belong to this shard alone."""
    shape = _shape_of_scales(param, local(param))
    return scales if shape is None else distributed_like(param, scales.view(shape), _shape_of_scales(param, param))


def _shape_of_scales(param: Tensor, part: Tensor) -> torch.Size | None:
    """Return the shape of the scales of `part`, a distributed parameter or a shard of it; None if shards cut groups.

    Scales have the dimensions of `part`, except that its last ones, as few as have a multiple of 64 elements, become
    one dimension of groups. The first dimension always stays, so that any number of processes may cut it.
    """
    if not is_sharded(param) or not param.is_contiguous():
        return None
    widths = {first: math.prod(param.shape[first:]) for first in range(1, param.dim())}
    first = max((first for first, width in widths.items() if width % codecs.GROUP == 0), default=0)
    cut = cut_dimensions(param)
    parts = math.prod(dist.get_world_size(group) for group, dimension in cut if dimension == first)
    if not first or any(dimension > first for _, dimension in cut):
        return None
    if param.shape[first] % parts or widths[first] // codecs.GROUP % parts:
        return None
    return torch.Size((*part.shape[:first], math.prod(part.shape[first:]) // codecs.GROUP))


def master_of(state: dict[str, Any], param: Tensor) -> Tensor:
    """Return the master of a parameter: its float32 copy, a new one made of its remainder, or the parameter itself."""
    if REMAINDER in state:
        return distributed_like(param, codecs.join(local(param), local(state[REMAINDER])))
    return state.get(MASTER, param)


def has_master(state: Mapping[str, Any]) -> bool:
    """Return whether a parameter's state has its master, as a float32 copy or as a remainder."""
    return MASTER in state or REMAINDER in state


def set_master(optimizer: Any, state: dict[str, Any], param: Tensor, value: Tensor) -> None:
    """Set the master of a half-precision parameter, in the optimizer's format, and round it to the parameter."""
    name, stored = MASTER, value.to(torch.float32)
    if optimizer.master_bits is not None and param.dtype == torch.bfloat16:
        pair = codecs.split(local(stored), _REMAINDER_CODECS[optimizer.master_bits])
        value, stored = (distributed_like(param, each) for each in pair)
        name = REMAINDER
    param.copy_(value)
    if name in state:
        state[name].copy_(stored)
    else:
        state[name] = torch.empty_like(param, dtype=stored.dtype).copy_(stored)


def _decoded(state: dict[str, Any], name: str, kind: str) -> Tensor | None:
    """Return saved state of any format as float32 numbers; None if there is none of this name."""
    if name in state:
        value = state[name]
        return value.to(torch.float32) if value.dtype == torch.bfloat16 else value
    codes = state.get(f"{name}::quantized")
    if codes is None:
        return None
    codec = "root8" if kind == "root" else "float8" if codes.dtype == torch.float8_e4m3fn else "signed8"
    values = torch.empty_like(codes, dtype=torch.float32)
    scales = local(state[f"{name}::scales"]).reshape(-1)
    flat(local(values)).copy_(codecs.decode(codec, flat(local(codes)), scales))
    return values


def decoded_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's saved state for an optimizer without codecs: codes decoded, no remainder of a master."""
    values = {name: value for name, value in state.items() if "::" not in name}
    for name in state:
        if name.endswith("::quantized"):
            plain = name.removesuffix("::quantized")
            values[plain] = _decoded(dict(state), plain, "root" if state[name].dtype == torch.uint8 else "signed")
    return values


def decoded_state(optimizer: Any, state_dict: dict[str, Any], *, everything: bool) -> dict[str, Any]:
    """Return a state dict whose moments and masters are float32 tensors, as of an optimizer with float32 state.

    Without `everything`, only two kinds of moments are decoded: scales belong to one shard alone, or strides differ
    from the parameter's, so that groups have other elements.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    states = dict(state_dict["state"])
    for key, param in zip(keys, params, strict=False):
        plain = dict(states.get(key) or {})
        for stored, value in list(plain.items()):
            name, _, part = stored.partition("::")
            if part == "quantized":
                own = is_sharded(value) != is_sharded(plain[f"{name}::scales"])
                if everything or own or not laid_out_alike([local(value), local(param)]):
                    plain[name] = _decoded(plain, name, "root" if value.dtype == torch.uint8 else "signed")
                    del plain[stored], plain[f"{name}::scales"]
            elif everything and name in optimizer._encodable and not part:
                plain[name] = _decoded(plain, name, optimizer._encodable[name])
        if everything and REMAINDER in plain:
            if param.dtype == torch.bfloat16:
                plain[MASTER] = master_of(plain, param)
            del plain[REMAINDER]
        if plain:
            states[key] = plain
    return {**state_dict, "state": states}


def saved_in_any_format(name: str, state: Any) -> bool:
    """Return whether saved state of a parameter has this name, in any format."""
    return name in state or (f"{name}::quantized" in state and f"{name}::scales" in state)


def check_codes(optimizer: Any, param: Tensor, source: str, state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise an error if codes, scales or a remainder in the saved state of a parameter do not fit; see `source`."""
    encodable = getattr(optimizer, "_encodable", {})
    signed, root = (torch.int8, torch.float8_e4m3fn), (torch.uint8,)
    kinds = {"signed": signed, "root": root, "": signed + root}
    expected: dict[str, tuple[tuple[torch.dtype, ...], torch.Size]] = {
        REMAINDER: ((torch.int8, torch.int16), param.shape)
    }
    for name in names:
        if name not in state and f"{name}::quantized" in state:
            groups = _shape_of_scales(param, param) or torch.Size([-(-local(param).numel() // codecs.GROUP)])
            scales: Any = state.get(f"{name}::scales")
            if not is_sharded(param) and isinstance(scales, Tensor) and scales.numel() == groups[0]:
                groups = scales.shape  # gathered from shards
            expected[f"{name}::quantized"] = kinds[encodable.get(name, "")], param.shape
            expected[f"{name}::scales"] = (torch.float32,), groups
    for key, (dtypes, shape) in expected.items():
        value = state.get(key)
        if key in state and not (isinstance(value, Tensor) and value.dtype in dtypes and value.shape == shape):
            actual = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            wanted = " or ".join(map(str, dtypes))
            raise ValueError(f"{key} in {source} is {actual}; a {wanted} tensor of shape {tuple(shape)} is expected")


def encode_loaded(optimizer: Any) -> None:
    """Convert state that was loaded in another format to the optimizer's own."""
    if not optimizer._encodable:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param)
            if not state:
                continue
            for name in optimizer._state_names(group):
                _convert(optimizer, state, param, name)
            _convert_master(optimizer, state, param)


def _convert(optimizer: Any, state: dict[str, Any], param: Tensor, name: str) -> None:
    kind, codec = optimizer._encodable.get(name), _codec(optimizer, name)
    if kind is None:
        return
    stored, scales = _stored_name(name, codec), f"{name}::scales"
    if scales in state and not is_sharded(param):
        state[scales] = state[scales].reshape(-1)
    is_half = optimizer.state_format == "bfloat16"
    current = state.get(stored)
    if current is not None:
        expected = codecs.DTYPES.get(codec or "")
        right = current.dtype == expected if expected else (current.dtype == torch.bfloat16) == is_half
        if right:
            return
    values = _decoded(state, name, kind)
    if values is None:
        return
    for key in (name, f"{name}::quantized", scales):
        state.pop(key, None)
    if codec is None or not codecs.has_scales(codec):
        state[name] = values.to(torch.bfloat16) if is_half else values
        return
    codes = torch.empty_like(values, dtype=codecs.DTYPES[codec])
    encoded, new_scales = codecs.encode(codec, flat(local(values)))
    assert new_scales is not None
    flat(local(codes)).copy_(encoded)
    state[stored], state[scales] = codes, _distributed_scales(param, new_scales)


def _convert_master(optimizer: Any, state: dict[str, Any], param: Tensor) -> None:
    """Convert a master copy to remainders, or remainders to a master copy or to remainders of other bits.

    Remainders are dropped if the parameter is not bfloat16 in this optimizer: then it has these bits itself.
    """
    if param.dtype != torch.bfloat16:
        state.pop(REMAINDER, None)
    wanted = optimizer.master_bits if param.dtype == torch.bfloat16 else None
    current = {torch.int8: 24, torch.int16: 32}.get(state[REMAINDER].dtype) if REMAINDER in state else None
    if current == wanted and (wanted is None or MASTER not in state):
        return
    master = master_of(state, param)
    state.pop(REMAINDER, None)
    if wanted is not None:
        state.pop(MASTER, None)
        remainders = codecs.remainders_of(local(master).to(torch.float32), local(param), _REMAINDER_CODECS[wanted])
        state[REMAINDER] = distributed_like(param, remainders)
    elif current is not None and optimizer.master_weights:
        state[MASTER] = master
