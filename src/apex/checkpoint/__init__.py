"""Crash-safe checkpoints: written under a temporary name, flushed and renamed; verified before they are loaded."""

from __future__ import annotations

from ._background import SaveInProgress, wait
from ._damage import DamagedCheckpoint
from ._files import load, save, verify
from ._series import Series, latest
from ._sharded import load_sharded, save_sharded

__all__ = [
    "DamagedCheckpoint",
    "SaveInProgress",
    "Series",
    "latest",
    "load",
    "load_sharded",
    "save",
    "save_sharded",
    "verify",
    "wait",
]
