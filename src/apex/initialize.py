"""The launch functions at Colossal-AI's path."""

from __future__ import annotations

import sys
import types
from typing import Any

from ._process_launch import get_default_parser, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch

__all__ = ["get_default_parser", "launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"]


class _Module(types.ModuleType):
    """A module that says what to use instead if a script calls it: `initialize` was a function of the old engine."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise ModuleNotFoundError(
            "colossalai.initialize() has no counterpart in apex: the legacy engine is not here. Use Booster.",
            name=__name__,
        )


sys.modules[__name__].__class__ = _Module
