"""Series of checkpoints of a run: a folder with the last few checkpoints."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from .._atomic import TEMPORARY, remove_if_left_behind, temporary_beside
from ..ops._checks import integer
from ._background import check_options, wait
from ._damage import DamagedCheckpoint
from ._files import load, save, verify
from ._folders import backup_of, discard, has_user_files, is_checkpoint, path_or_backup, restore_backup
from ._ranks import from_first, is_first
from ._sharded import start_save

# Names that `Series.path_of` makes; other files in the folder are not touched.
_NAME = re.compile(r"step-(\d{8,})(\.pt)?")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest intact checkpoint of a `Series`, or None.

    Reads that checkpoint completely, and any newer damaged ones. Processes may find different checkpoints: in several
    processes use `Series.latest`.
    """
    return _latest(Path(folder), None)


def _latest(folder: Path, sharded: bool | None) -> Path | None:
    for _, path in reversed(_steps(folder, sharded)):
        try:
            verify(path)
        except (DamagedCheckpoint, FileNotFoundError):
            continue
        return path
    return None


def _steps(folder: Path, sharded: bool | None) -> list[tuple[int, Path]]:
    """Return (step, path) of each checkpoint: files, or folders if `sharded`, or both if it is None."""
    if not folder.is_dir():
        return []
    paths = {path: path for path in folder.iterdir()} | {path: path_or_backup(path) for path in _replaced(folder)}
    matches = [(match, path) for name, path in paths.items() if (match := _NAME.fullmatch(name.name))]
    return sorted((int(match[1]), path) for match, path in matches if sharded in (None, match[2] is None))


def _replaced(folder: Path) -> list[Path]:
    """Return the paths of checkpoints that new checkpoints of the same step are replacing."""
    ending = backup_of(folder / "step-").name.removeprefix(".step-")
    return [path.with_name(path.name[1:].removesuffix(ending)) for path in folder.glob(f".step-*{ending}")]


class Series:
    """Checkpoints of one run in a folder, by step. A save keeps the newest `keep` up to its own step (None: all).

    A checkpoint is a file that rank 0 writes or, with `sharded`, a folder that all processes write their parts into.
    Several threads may save at the same time. If several runs share a folder, each removes old checkpoints by its own
    `keep`.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3, sharded: bool = False) -> None:
        keep = None if keep is None else integer("keep", keep)
        if keep is True or (keep is not None and keep < 1):
            raise ValueError(f"keep must be at least 1, or None to keep all checkpoints, not {keep}")
        self.folder = Path(folder).absolute()  # the working directory may change between saves
        self.keep = keep
        self.sharded = sharded

    def path_of(self, step: int) -> Path:
        """Return the path of the checkpoint of a step, whether or not it exists."""
        return self.folder / f"step-{integer('step', step):08d}{'' if self.sharded else '.pt'}"

    def step_of(self, path: str | os.PathLike[str]) -> int:
        """Return the step of a checkpoint from its path, which `latest` or `path_of` returned."""
        match = _NAME.match(Path(path).name.removeprefix("."))  # a folder that is being replaced has another name
        if match is None:
            raise ValueError(f"{os.fspath(path)} is not the path of a checkpoint of a series")
        return int(match[1])

    def save(
        self,
        state: Any,
        step: int,
        *,
        wait: bool = False,
        use_async: bool = False,
        staging: Literal["host", "device"] = "host",
        if_busy: Literal["wait", "raise"] = "wait",
    ) -> Path:
        """Write the checkpoint of a step, then remove old ones; all processes call it.

        Processes other than rank 0 continue at once unless `wait` is given. For a sharded checkpoint all processes
        wait, unless it is written beside the training with `use_async`: see `save_sharded`.
        """
        step = integer("step", step)
        if step < 0:
            raise ValueError(f"step must not be negative, but is {step}")
        path = self.path_of(step)
        if self.sharded:
            start_save(state, path, use_async, staging, if_busy, tidying(self, step))
            return path
        check_options(staging, if_busy)
        if use_async:
            raise ValueError("use_async=True needs a sharded series: Series(folder, sharded=True)")
        save(state, path, wait=wait)
        if is_first():
            self._tidy(step)
        return path

    def latest(self) -> Path | None:
        """Return the newest intact checkpoint that rank 0 finds, or None; all processes must call it."""
        wait()
        newest: Path | None = None
        failure: Exception | None = None
        if is_first():
            try:
                newest = _latest(self.folder, self.sharded)
            except Exception as error:  # for example a folder that may not be read; the other processes would wait
                failure = error
        newest, failure = from_first((newest, failure))
        if failure is not None:
            raise failure
        return newest

    def load(self, *, map_location: Any = None, weights_only: bool = True) -> Any:
        """Return the content of the newest intact checkpoint, or None.

        If sharded, use `load_sharded(state, latest())` instead.
        """
        if self.sharded:
            raise TypeError("a sharded checkpoint is loaded into tensors that exist: load_sharded(state, latest())")
        path = self.latest()
        return None if path is None else load(path, map_location=map_location, weights_only=weights_only)

    def _tidy(self, step: int) -> None:
        """Remove old checkpoints; keep checkpoints that are newer than `step` or being written."""
        for path in _replaced(self.folder):
            restore_backup(path)
        for path in self.folder.glob(f".step-*{TEMPORARY}"):
            remove_if_left_behind(path)
        if self.keep is not None:
            steps = [item for item in _steps(self.folder, self.sharded) if item[0] <= step]
            for _, path in steps[: -self.keep]:
                _remove(path)


def tidying(series: Series, step: int) -> Callable[[], None]:
    """Return a function, which can be pickled, that removes old checkpoints after a save of `step`."""
    return functools.partial(series._tidy, step)


def _remove(path: Path) -> None:
    """Remove a checkpoint; files in its folder that no save wrote stay there."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not is_checkpoint(path):
        return
    # Removal takes several steps, so the folder is renamed first: under its own name it is complete or absent.
    removed = temporary_beside(path)
    with contextlib.suppress(FileNotFoundError):  # another thread was faster
        if has_user_files(path):
            discard(path, None)
            return
        os.rename(path, removed)
    discard(removed, None)
