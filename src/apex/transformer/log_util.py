"""Loggers of apex.transformer."""

from __future__ import annotations

import logging
import os.path

from .._arguments import checked


@checked
def get_transformer_logger(name: str) -> logging.Logger:
    """The logger of a module's package, or of a file without its ending: the last dotted part of `name` is dropped."""
    return logging.getLogger(os.path.splitext(name)[0])


@checked
def set_logging_level(verbosity: int | str) -> None:
    """Sets the level of all loggers of the library."""
    from .. import _library_root_logger

    try:
        _library_root_logger.setLevel(verbosity)
    except ValueError as error:
        raise ValueError(f"verbosity={verbosity!r} is no level of the logging module") from error
