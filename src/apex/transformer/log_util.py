"""Loggers of apex.transformer."""

from __future__ import annotations

import logging
import os.path

from .._arguments import checked


@checked
def get_transformer_logger(name: str) -> logging.Logger:
    """Return the logger named `name` without its last dotted part: a module's package, or a file without its suffix."""
    return logging.getLogger(os.path.splitext(name)[0])


@checked
def set_logging_level(verbosity: int | str) -> None:
    """Set the level of all loggers of the library."""
    from .. import _library_root_logger

    try:
        _library_root_logger.setLevel(verbosity)
    except ValueError as error:
        raise ValueError(f"verbosity={verbosity!r} is no level of the logging module") from error
