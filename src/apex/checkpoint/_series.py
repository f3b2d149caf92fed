"""The checkpoints of a run: a folder with the last few of them."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from .._atomic import TEMPORARY, remove_if_left_behind, temporary_beside
from ..ops._checks import integer
from ._damage import DamagedCheckpoint
from ._files import load, save, verify
from ._folders import backup_of, discard, holds_others, is_checkpoint, path_or_backup, restore_backup
from ._ranks import from_first, is_first
from ._sharded import save_sharded

# What `Series.path_of` gives: anything else in the folder is somebody else's.
_NAME = re.compile(r"step-(\d{8,})(\.pt)?")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint of a `Series` that is whole, or None.

    Reads all of it, and of damaged ones after it. It looks for itself: in several processes use `Series.latest`.
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
    """Steps and their checkpoints: files, or with `sharded` folders; both if that is None."""
    if not folder.is_dir():
        return []
    paths = {path: path for path in folder.iterdir()} | {path: path_or_backup(path) for path in _replaced(folder)}
    found = [(match, path) for name, path in paths.items() if (match := _NAME.fullmatch(name.name))]
    return sorted((int(match[1]), path) for match, path in found if sharded in (None, match[2] is None))


def _replaced(folder: Path) -> list[Path]:
    """Names of checkpoints that were moved away for new ones of the same step."""
    ending = backup_of(folder / "step-").name.removeprefix(".step-")
    return [path.with_name(path.name[1:].removesuffix(ending)) for path in folder.glob(f".step-*{ending}")]


class Series:
    """Checkpoints of one run in a folder, by step; of those up to the one just saved `keep` stay, all if it is None.

    A checkpoint is a file that rank 0 writes, or with `sharded` a folder to which all processes write their parts.
    Threads may save at once. Of several runs in one folder each removes what is too old by its own count.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3, sharded: bool = False) -> None:
        keep = None if keep is None else integer("keep", keep)
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, or None to keep all checkpoints, not {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self.sharded = sharded

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{integer('step', step):08d}{'' if self.sharded else '.pt'}"

    def save(self, state: Any, step: int, *, wait: bool = False) -> Path:
        """Writes the checkpoint of a step, in all processes alike; then removes those that are too old.

        Processes other than rank 0 go on at once unless told to `wait`; those of a sharded one always wait.
        """
        step = integer("step", step)
        if step < 0:
            raise ValueError(f"step must not be negative, but is {step}")
        path = self.path_of(step)
        if self.sharded:
            save_sharded(state, path)
        else:
            save(state, path, wait=wait)
        if is_first():
            self._tidy(step)
        return path

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole, or None: what rank 0 finds, in all processes, which must all call it."""
        found: Path | None = None
        failure: Exception | None = None
        if is_first():
            try:
                found = _latest(self.folder, self.sharded)
            except Exception as error:  # a folder that may not be read, say; the others would wait
                failure = error
        found, failure = from_first((found, failure))
        if failure is not None:
            raise failure
        return found

    def load(self, *, map_location: Any = None, weights_only: bool = True) -> Any:
        """What the newest whole checkpoint holds, None without one; `load_sharded(state, latest())` if sharded."""
        if self.sharded:
            raise TypeError("a sharded checkpoint is loaded into tensors that exist: load_sharded(state, latest())")
        path = self.latest()
        return None if path is None else load(path, map_location=map_location, weights_only=weights_only)

    def _tidy(self, step: int) -> None:
        """Removes checkpoints that are too old; newer ones than `step`, and those being written, stay."""
        for path in _replaced(self.folder):
            restore_backup(path)
        for path in self.folder.glob(f".step-*{TEMPORARY}"):
            remove_if_left_behind(path)
        if self.keep is not None:
            steps = [each for each in _steps(self.folder, self.sharded) if each[0] <= step]
            for _, path in steps[: -self.keep]:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint; files in its folder that no save wrote stay, under its name."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not is_checkpoint(path):
        return
    if holds_others(path):
        discard(path, None)
        return
    # A folder goes in steps: under its own name it is whole or not there.
    doomed = temporary_beside(path)
    with contextlib.suppress(FileNotFoundError):  # another thread was faster
        os.rename(path, doomed)
    discard(doomed, None)
