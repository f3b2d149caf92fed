"""Warnings that name the line of the user's script."""

from __future__ import annotations

import sys
import warnings

from ..checkpoint._ranks import is_first

_SKIPPED = ("apex.", "torch._compile", "torch._dynamo.")


def warn_user(message: str) -> None:
    """Issue a warning in the first process, for the innermost line outside of this package.

    Frames of PyTorch's compiler are skipped, too: methods that it does not trace are wrapped by it.
    """
    if not is_first():
        return
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_SKIPPED):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
