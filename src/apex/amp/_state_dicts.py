"""State dicts of models in half precision: saved in float32, from the masters where there are any.

So a checkpoint of O2 holds what the optimizer really updates, loads into a float32 model, and continues to the bit;
loading one gives the masters their exact values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._amp_state import _amp_state

HALF = (torch.float16, torch.bfloat16)


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
            state[key] = value.detach().float() if master is None else master.detach().clone()


def _loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, value in module._parameters.items():
        incoming = state.get(prefix + name)
        master = None if value is None else _amp_state.masters.get(value)
        if master is not None and isinstance(incoming, Tensor) and incoming.shape == master.shape:
            with torch.no_grad():
                master.copy_(incoming)
