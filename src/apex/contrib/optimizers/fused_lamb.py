"""FusedLAMB, of which upstream has a second form here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ... import optimizers


class FusedLAMB(optimizers.FusedLAMB):
    """`apex.optimizers.FusedLAMB`; upstream's form here lacks `use_nvlamb`, the last argument."""

    @property
    def multi_tensor_lamb(self) -> Callable[..., Any]:
        """`fused_lamb_cuda.lamb`, for subclasses written for the original."""
        return importlib.import_module("fused_lamb_cuda").lamb
