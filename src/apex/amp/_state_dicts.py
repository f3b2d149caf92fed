"""State dicts of models in half precision: saved in float32, from the masters where there are any.

So a checkpoint of O2 holds what the optimizer really updates, loads into a float32 model, and continues to the bit;
loading one gives the masters their exact values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


def keep_state_dict_in_float32(model: nn.Module, optimizers: list[Any]) -> None:
    """Hooks into saving and loading of the model and of every module in it."""
    masters: dict[Tensor, Tensor] = {}
    for optimizer in optimizers:
        stash = optimizer._amp_stash
        masters.update(zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True))

    def saving(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            key = prefix + name
            if value is not None and key in state and value.dtype in HALF:
                exact = masters.get(value)
                state[key] = value.detach().float() if exact is None else exact.detach().clone()

    def loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, value in module._parameters.items():
            incoming = state.get(prefix + name)
            master = None if value is None else masters.get(value)
            if master is not None and isinstance(incoming, Tensor) and incoming.shape == master.shape:
                with torch.no_grad():
                    master.copy_(incoming)

    handles = []
    for module in model.modules():
        handles.append(module._register_state_dict_hook(saving))
        handles.append(module._register_load_state_dict_pre_hook(loading, with_module=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    model._amp_undo.append(undo)  # type: ignore[operator, union-attr]
