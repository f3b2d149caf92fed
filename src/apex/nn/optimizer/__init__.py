"""Optimizers with Colossal-AI's names and arguments. Each is imported at first use."""

from __future__ import annotations

from ..._lazy import lazy_subpackages

_MODULES = {
    "CPUAdam": "cpu_adam",
    "FusedAdam": "fused_adam",
    "FusedLAMB": "fused_adam",
    "FusedSGD": "fused_adam",
    "HybridAdam": "hybrid_adam",
    "Lamb": "lamb",
    "Lars": "lars",
}

__all__ = [*_MODULES]

__getattr__, __dir__ = lazy_subpackages(__name__, (), _MODULES)
