"""State dicts of models in half precision: saved in float32, from the masters where there are any.

So a checkpoint of O2 holds what the optimizer really updates, loads into a float32 model, and continues to the bit;
loading one gives the masters their exact values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._amp_state import HALF, _amp_state, float32_values


def keep_state_dict_in_float32(model: nn.Module) -> Callable[[nn.Module], None]:
    """Hooks into saving and loading of the model and of every module in it; the result removes the hooks."""
    handles: list[Any] = []
    for module in model.modules():
        handles.append(module._register_state_dict_hook(_saving))
        handles.append(module.register_load_state_dict_pre_hook(_loading))

    def undo(model: nn.Module) -> None:
        for handle in handles:
            handle.remove()

    return undo


# Functions of the module, not closures, so that a model can be pickled.


def _saving(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, value in (*module._parameters.items(), *module._buffers.items()):
        key = prefix + name
        if value is not None and key in state and value.dtype in HALF:
            master = _amp_state.masters.get(value)
            if isinstance(master, nn.Parameter):
                state[key] = master.detach().clone()
            else:
                state[key] = value.detach().float() if master is None else float32_values(value.detach(), master)


def _loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, value in module._parameters.items():
        incoming = state.get(prefix + name)
        if (
            value is None
            or value.dtype not in HALF
            or not isinstance(incoming, Tensor)
            or incoming.shape != value.shape
        ):
            continue
        master = _amp_state.masters.get(value)
        with torch.no_grad():
            if isinstance(master, nn.Parameter):
                master.copy_(incoming)
                continue
            # Frozen for now, or not in an optimizer yet. What rounding would lose comes from a run that trained it.
            exact = incoming.to(value.device, torch.float32, copy=True)
            if torch.equal(exact.to(value.dtype).float(), exact):
                _amp_state.masters.pop(value, None)
            else:
                _amp_state.masters[value] = exact
