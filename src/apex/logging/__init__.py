"""Loggers that know ranks: `get_dist_logger().info("...", ranks=[0])` logs in the first process only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from .._logging import RankInfoFormatter

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]

_FORMAT = "%(asctime)s {} %(rank_info)s %(levelname)s: %(message)s"


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class DistributedLogger:
    """A logger with one instance per name; `ranks` of its methods are the ranks that log, None for all."""

    _known: dict[str, DistributedLogger] = {}  # noqa: RUF012

    def __init__(self, name: str) -> None:
        if name in self._known:
            raise ValueError(f"there is a logger called {name!r} already; DistributedLogger.get_instance gives it")
        self._format = RankInfoFormatter(_FORMAT.format(name.replace("%", "%%")))
        # Python's logger of the same name belongs to the package, and its level and handlers to the user.
        self._logger = logging.getLogger(f"ranks of {name}")
        self._logger.setLevel(logging.INFO)
        self._add(logging.StreamHandler())
        self._known[name] = self

    @classmethod
    def get_instance(cls, name: str) -> DistributedLogger:
        """Return the logger of this name."""
        return cls._known[name] if name in cls._known else cls(name)

    def set_level(self, level: str) -> None:
        """Log records from level "DEBUG", "INFO", "WARNING" or "ERROR" on."""
        if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError(f"level={level!r} is not known; use DEBUG, INFO, WARNING or ERROR")
        self._logger.setLevel(level)

    def log_to_file(self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Also write records to a file in the folder `path`: `rank_N.log` or `rank_N_SUFFIX.log`."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{_rank()}" + (f"_{suffix}" if suffix else "")
        handler = logging.FileHandler(folder / f"{name}.log", mode)
        handler.setLevel(level)
        self._add(handler)

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(self._format)
        self._logger.addHandler(handler)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or _rank() in ranks:
            self._logger.log(level, message)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        self._log(logging.WARNING, message, ranks)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        self._log(logging.DEBUG, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        self._log(logging.ERROR, message, ranks)


def get_dist_logger(name: str = "apex") -> DistributedLogger:
    """Return the logger of this name; the same name gives the same object."""
    return DistributedLogger.get_instance(name)


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = ("apex",)) -> None:
    """Make loggers of other packages, or the loggers in `include`, log errors only."""
    names = (
        include
        if include is not None
        else [n for n in logging.root.manager.loggerDict if n.split(".")[0] not in exclude]
    )
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
