"""State dicts of other libraries' small optimizer state, decoded to float32 tensors under PyTorch's names.

- bitsandbytes: `state1` and `state2` are codes of blocks of 256 elements: indices of `qmap1` and `qmap2`, whose numbers
  are multiplied by `absmax1` and `absmax2`; small tensors are float32.
- torchao: tensors of a subclass with `codes` and `scale`, which decode themselves.
- FlashOptim: `name::quantized` and `name::scales` as here, but with groups of 32 elements and float16 scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.multi_tensor.codecs import GROUP, decode

_FLASH_GROUP = 32
# Options of bitsandbytes' groups that belong to another algorithm.
_OF_BITSANDBYTES = ("alpha", "t_alpha", "t_beta3")


def decoded_foreign(state_dict: Any) -> Any:
    """Return a state dict with other libraries' codes decoded; return any other state dict unchanged."""
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("state"), Mapping):
        return state_dict
    states, is_changed, is_bitsandbytes = {}, False, False
    for key, state in state_dict["state"].items():
        new = _decoded(state) if isinstance(state, Mapping) else state
        is_changed = is_changed or new is not state
        is_bitsandbytes = is_bitsandbytes or (isinstance(state, Mapping) and "state1" in state)
        states[key] = new
    if not is_changed:
        return state_dict
    dropped = _OF_BITSANDBYTES if is_bitsandbytes else ()
    groups = [
        {name: value for name, value in group.items() if name not in dropped} for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": states, "param_groups": groups}


def _decoded(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parameter's state with its codes decoded; the same object if it has no codes of another library."""
    if "state1" in state:
        kept = {name: value for name, value in state.items() if name in ("step", "master_param")}
        for name, number in (("exp_avg", 1), ("exp_avg_sq", 2)):
            if f"state{number}" in state:
                kept[name] = _looked_up(state, number)
        return kept
    new: dict[str, Any] = {}
    for name, value in state.items():
        if hasattr(value, "codes") and hasattr(value, "scale") and hasattr(value, "dequantize"):
            new[name] = value.dequantize().to(torch.float32)
        elif name.endswith("::quantized"):
            plain = name.removesuffix("::quantized")
            scales: Any = state.get(f"{plain}::scales")
            if _is_flash(value, scales):
                codec = "root8" if value.dtype == torch.uint8 else "signed8"
                new[plain] = _by_groups(codec, value, scales)
    if not new:
        return state
    gone = {f"{name}::{part}" for name in new for part in ("quantized", "scales")}
    return {**{name: value for name, value in state.items() if name not in gone}, **new}


def _looked_up(state: Mapping[str, Any], number: int) -> Tensor:
    """Return a moment of bitsandbytes, decoded: a code is an index of 256 numbers, a block has a largest magnitude."""
    codes, scales, numbers = (state.get(f"{name}{number}") for name in ("state", "absmax", "qmap"))
    assert isinstance(codes, Tensor)
    if codes.dtype != torch.uint8 or scales is None or numbers is None:
        return codes
    values = numbers.to(torch.float32)[codes.reshape(-1).long()]
    size = 256 if scales.numel() == -(-values.numel() // 256) else -(-values.numel() // scales.numel())
    scales = scales.to(torch.float32).reshape(-1).repeat_interleave(size)[: values.numel()]
    return (values * scales).view(codes.shape)


def _is_flash(codes: Any, scales: Any) -> bool:
    if not isinstance(codes, Tensor) or not isinstance(scales, Tensor):
        return False
    groups = scales.numel()
    return groups == -(-codes.numel() // _FLASH_GROUP) and (
        scales.dtype == torch.float16 or groups != -(-codes.numel() // GROUP)
    )


def _by_groups(codec: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Decode codes in groups of 32 elements, by padding each to a group of 64."""
    pad = torch.nn.functional.pad
    groups = pad(codes.reshape(-1), (0, -codes.numel() % _FLASH_GROUP)).view(-1, _FLASH_GROUP)
    values = decode(codec, pad(groups, (0, GROUP - _FLASH_GROUP)).reshape(-1), scales.to(torch.float32).reshape(-1))
    return values.view(-1, GROUP)[:, :_FLASH_GROUP].reshape(-1)[: codes.numel()].view(codes.shape)
