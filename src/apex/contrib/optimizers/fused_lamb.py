"""FusedLAMB at upstream's second import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ... import optimizers


class FusedLAMB(optimizers.FusedLAMB):
    """`apex.optimizers.FusedLAMB`; upstream's class of this path lacks the last argument, `use_nvlamb`."""

    @property
    def multi_tensor_lamb(self) -> Callable[..., Any]:
        """Return `fused_lamb_cuda.lamb`, for subclasses written for upstream."""
        return importlib.import_module("fused_lamb_cuda").lamb
