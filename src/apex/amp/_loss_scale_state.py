"""`amp.state_dict` and `amp.load_state_dict`: the loss scales of a session."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ._amp_state import _amp_state
from ._checks import checked_number, checked_scale
from .scaler import LossScaler

_KEYS = {"loss_scale", "unskipped"}
# What the count of steps is kept in.
_LARGEST_COUNT = 2**31 - 1


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Every loss scaler's scale and count of steps since it changed: `loss_scaler0`, `loss_scaler1`, ..."""
    result: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_amp_state.loss_scalers):
        result[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Loads what `state_dict` returned; changes nothing if it does not fit.

    A scale that comes from another opt level is not taken where it would do harm: a static scale stays as `initialize`
    was told, and a dynamic one does not start from 1, the scale of levels without loss scaling. A warning says so.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError("amp.load_state_dict was called before amp.initialize; initialize first, then load")
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"amp.load_state_dict takes what amp.state_dict() returned, not {type(state_dict).__name__}")
    names = [name for name in state_dict if str(name).startswith("loss_scaler")]
    unexpected = [name for name in state_dict if name not in names]
    if unexpected:
        raise RuntimeError(f"error in loading amp's state_dict: unexpected key(s) {', '.join(map(repr, unexpected))}")
    if len(names) != len(_amp_state.loss_scalers):
        raise RuntimeError(
            f"the state_dict has {len(names)} loss scaler(s), this session {len(_amp_state.loss_scalers)}: call "
            f"amp.initialize with num_losses={len(names)} to load it"
        )
    scalers = {f"loss_scaler{index}": scaler for index, scaler in enumerate(_amp_state.loss_scalers)}
    saved = {name: _checked(name, state_dict[name], list(scalers)) for name in names}
    for name, (scale, count) in saved.items():
        scalers[name]._loss_scale = _chosen_scale(name, scale, scalers[name])
        # A count beyond the window, of a static scale or a longer window, would keep the scale from ever growing.
        beyond = scalers[name].dynamic and count >= scalers[name]._scale_seq_len
        scalers[name]._unskipped = 0 if beyond else min(count, _LARGEST_COUNT)


def _checked(name: str, entry: Any, known: list[str]) -> tuple[float, int]:
    """Scale and count of one entry; raises for what no scaler could have saved."""
    if name not in known or not isinstance(entry, Mapping) or set(entry) != _KEYS:
        raise RuntimeError(
            f"error in loading amp's state_dict: {name!r} holds {entry!r}; expected are 'loss_scale' and 'unskipped' "
            f"for each of {', '.join(known)}"
        )
    scale = checked_scale(f"loss_scale of {name!r}", entry["loss_scale"])
    count = checked_number(f"unskipped of {name!r}", entry["unskipped"], 0, math.inf, "an integer of at least 0")
    if not count.is_integer():
        raise TypeError(f"unskipped of {name!r} must be an integer of at least 0, not {entry['unskipped']!r}")
    return scale, int(count)


def _chosen_scale(name: str, saved: float, scaler: LossScaler) -> float:
    present = scaler.loss_scale()
    if not scaler.dynamic and saved != present:
        warnings.warn(
            f"{name!r} was saved with loss scale {saved}, but this session has a static scale, which stays {present}; "
            f"for the saved one call amp.initialize with loss_scale={saved}",
            stacklevel=3,
        )
        return present
    if scaler.dynamic and saved == 1.0 and present > 1.0:
        warnings.warn(
            f"{name!r} was saved with loss scale 1.0, as by a run without loss scaling; from there gradients in "
            f"float16 would be lost for thousands of steps, so the dynamic scale stays {present}",
            stacklevel=3,
        )
        return present
    return saved
