"""The one function about torch.fx that Colossal-AI's tests call."""

from __future__ import annotations

from .._lazy import lazy_subpackages

__all__ = ["is_compatible_with_meta"]


def is_compatible_with_meta() -> bool:
    """Return True: every supported PyTorch has the meta device."""
    return True


__getattr__, __dir__ = lazy_subpackages(__name__, ())
