"""Lists of the functions that O1 and O4 cast, by dtype: PyTorch's autocast with the rules of `apex.ops.autocast`.

A script may change the lists before `amp.initialize`. A name moved to another list is then cast like a function
registered with `amp.register_half_function` and its siblings. A name removed from all lists runs in the widest dtype of
its arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]

_MODULES = (functional_overrides, tensor_overrides, torch_overrides)


def _casts(overrides: ModuleType, half: str) -> dict[str, str]:
    """Return the cast of every name on a module's lists; `half` is the half-precision type of the session."""
    kinds = {f"{'FP16' if half == 'half' else 'BFLOAT16'}_FUNCS": half, "FP32_FUNCS": "float"}
    kinds |= {"CASTS": "promote", "SEQUENCE_CASTS": "promote"}
    return {name: cast for kind, cast in kinds.items() for name in getattr(overrides, kind, ())}


_SHIPPED = {half: [_casts(overrides, half) for overrides in _MODULES] for half in ("half", "bfloat16")}


def changes(dtype: torch.dtype) -> Iterator[tuple[Any, str, str]]:
    """Yield (module, name, cast) of every function that was moved, for a session in `dtype`."""
    half = "half" if dtype == torch.float16 else "bfloat16"
    for overrides, shipped in zip(_MODULES, _SHIPPED[half], strict=True):
        current = _casts(overrides, half)
        for name in {**shipped, **current}:
            cast = current.get(name, "promote")
            if cast != shipped.get(name):
                yield overrides.MODULE, name, cast
