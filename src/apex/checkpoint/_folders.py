"""Folders of checkpoints: replaced as a whole, and read as they were at one moment.

    manifest.json       {name: [length, CRC-32]} of the files that this package wrote to the folder
    ...                 those files; anything else belongs to the user, and is neither replaced nor deleted

A folder is never changed in place. A save fills a new folder beside it, gives that second names (hard links) of the
files that are to stay, and exchanges the two by renaming.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .._atomic import atomic_file, locked_folder, sync_folder
from ._damage import DamagedCheckpoint, size_and_checksum_of

MANIFEST = "manifest.json"
# In a sharded checkpoint: which part of which tensor is in which file.
METADATA = ".metadata"
Manifest = dict[str, tuple[int, int]]
# How often a folder is moved away for a new one, or opened, before others that do the same are given way to.
_TRIES = 100
# How many files of a folder a reader holds open. Linux allows a process 1024 by default.
_HELD = 256
_BINARY = getattr(os, "O_BINARY", 0)  # Windows has text files as well


def is_plain_name(name: Any) -> bool:
    """Return whether `name` is that of a file in a folder itself, on every system: no path, no drive."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def size_and_checksum(path: Path) -> tuple[int, int]:
    """Return the length and the CRC-32 of a file."""
    with open(path, "rb") as file:
        return size_and_checksum_of(file)


def manifest_of(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if it has none; raise DamagedCheckpoint if it is not one of ours."""
    try:
        text = (folder / MANIFEST).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"the checkpoint {folder} is damaged: {MANIFEST} cannot be read: {error}") from error
    try:
        found = {name: (int(size), int(checksum)) for name, (size, checksum) in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"the checkpoint {folder} is damaged: {MANIFEST}: {error}") from error
    for name in found:
        if not is_plain_name(name):
            raise DamagedCheckpoint(
                f"the checkpoint {folder} is damaged: {MANIFEST} in it lists {name}, which is not in it"
            )
    return found


# Folders that are replaced --------------------------------------------------------------------------------------------


def backup_of(path: Path) -> Path:
    """Return the name that the folder at `path` has while a new one takes its place."""
    return path.with_name(f".{path.name}.replaced")


def path_or_backup(path: Path) -> Path:
    """Return `path`, or the name of its backup if a process was killed before the new folder was in place."""
    before = backup_of(path)
    return before if not path.exists() and before.exists() else path


def restore_backup(path: Path) -> None:
    """Clean up after a process that was killed: its backup becomes `path`, or goes if there is a `path`."""
    if backup_of(path).exists():
        with locked_folder(path.parent):  # another thread may be about to put a new one there
            _restore(path)


def _restore(path: Path) -> None:
    before = backup_of(path)
    if path.exists():
        discard(before, path)
    elif before.exists():
        with contextlib.suppress(OSError):  # where there are no locks, another thread may put a new one there
            os.rename(before, path)


def prepare(path: Path, names: Iterable[str], only_checkpoints: bool = False) -> None:
    """Clean up after a process that was killed, and raise FileExistsError if `path` may not be saved to.

    That is so if the user has files of these names there. With `only_checkpoints` it is also so if there are files, and
    no manifest of ours.
    """
    with locked_folder(path.parent):  # or a folder that is being replaced would seem to have no manifest
        _restore(path)
        _check_target(path, names, only_checkpoints)


def _check_target(path: Path, names: Iterable[str], only_checkpoints: bool) -> None:
    if only_checkpoints:
        check_is_checkpoint(path)
    check_names(path, names)


def check_names(path: Path, names: Iterable[str]) -> None:
    """Raise FileExistsError if files of these names are to be written to a folder where the user has such files."""
    if not path.is_dir():
        return
    listed = _listed(path)
    for name in (*names, MANIFEST):
        if os.path.lexists(path / name) and name not in listed:
            raise FileExistsError(
                errno.EEXIST,
                f"{path / name} was not written by a save to this folder, and is not replaced; move it away, or "
                "choose another folder",
            )


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has a manifest of ours."""
    return bool(_listed(path))


def holds_others(path: Path) -> bool:
    """Return whether a folder holds anything that no save wrote."""
    return bool({each.name for each in path.iterdir()} - _listed(path))


def check_is_checkpoint(path: Path) -> None:
    """Raise FileExistsError if `path` is a folder with files in it, and without a manifest of ours."""
    if path.is_dir() and not is_checkpoint(path) and any(path.iterdir()):
        raise FileExistsError(
            errno.EEXIST, f"{path} holds files and is no checkpoint (it has no {MANIFEST}); choose another folder"
        )


def _listed(folder: Path) -> set[str]:
    """Return the names of the files in a folder that are ours: those that its manifest lists, and the manifest."""
    try:
        manifest = manifest_of(folder)
    except DamagedCheckpoint:
        return set()
    return set() if manifest is None else {*manifest, MANIFEST}


def publish(
    temporary: Path, path: Path, written: Manifest, ours: Callable[[str], bool], only_checkpoints: bool = False
) -> None:
    """Put a new folder in the place of `path`, unless `prepare` would raise an error.

    Files of earlier saves whose names are `ours` go. All other files and folders, those of the user and those of other
    saves, are in the new folder too. Folders and files keep their permissions.
    """
    with locked_folder(path.parent):
        _restore(path)
        _check_target(path, written, only_checkpoints)
        before = (manifest_of(path) if path.is_dir() else None) or {}
        kept = {name for name in before if name not in written and not ours(name) and os.path.lexists(path / name)}
        if path.is_dir():
            for each in path.iterdir():
                if each.name in kept or each.name not in {*before, MANIFEST}:
                    _link(each, temporary / each.name)
            _keep_modes(path, temporary, written)
        with atomic_file(temporary / MANIFEST, "w") as file:
            json.dump({**{name: before[name] for name in kept}, **written}, file)
        _keep_modes(path, temporary, [MANIFEST])
        if path.is_dir():
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        sync_folder(temporary)
        _exchange(temporary, path)
        discard(backup_of(path), path)
        sync_folder(path.parent)


def _keep_modes(before: Path, after: Path, names: Iterable[str]) -> None:
    """Give files the permissions of the files that they replace; new names get those of the old manifest."""
    for name in names:
        for old in (before / name, before / MANIFEST):
            if old.is_file():
                os.chmod(after / name, stat.S_IMODE(old.stat().st_mode))
                break


def _exchange(temporary: Path, path: Path) -> None:
    for _ in range(_TRIES):
        try:
            os.rename(temporary, path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                _restore(path)
                raise
        # A folder with something in it cannot be renamed to. Where there are no locks, others may do this as well.
        discard(backup_of(path), path)
        with contextlib.suppress(OSError):
            os.rename(path, backup_of(path))
    raise OSError(errno.EEXIST, f"{path} could not be moved to {backup_of(path)} for the new one")


def _link(source: Path, target: Path) -> None:
    """Give a file, a symbolic link or a folder a second name; what a new folder of that name has is not replaced."""
    if source.is_symlink():
        os.symlink(os.readlink(source), target)
    elif source.is_dir():
        shutil.copytree(source, target, symlinks=True, copy_function=_link_file, dirs_exist_ok=True)
    else:
        _link_file(source, target)


def _link_file(source: Any, target: Any) -> Any:
    """Give a file a second name, or copy it where the disk has no hard links."""
    try:
        os.link(source, target)
    except FileExistsError:
        return target
    except OSError:
        shutil.copy2(source, target)
    return target


def discard(folder: Path, successor: Path | None) -> None:
    """Remove a folder's files that are ours, and move the user's to its successor unless they are there already.

    Without a successor the user's files stay. What cannot be removed is left for a later save.
    """
    with contextlib.suppress(OSError):
        # The manifest last: without it nobody would know which of the other files are ours.
        for name in sorted(_listed(folder), key=MANIFEST.__eq__):
            (folder / name).unlink(missing_ok=True)
        if successor is not None:
            _move(folder, successor)
        folder.rmdir()


def _move(folder: Path, successor: Path) -> None:
    for each in folder.iterdir():
        target = successor / each.name
        if each.is_dir() and not each.is_symlink() and target.is_dir():
            _move(each, target)
            each.rmdir()
        elif not os.path.lexists(target) or os.lstat(each).st_mtime_ns > os.lstat(target).st_mtime_ns:
            os.replace(each, target)
        else:
            each.unlink()


# Folders that are read ------------------------------------------------------------------------------------------------


class Generation:
    """A folder as it is at one moment, held open: a save that replaces it meanwhile changes nothing here.

    `names` are all names in it. `manifest` is None for folders of other programs. At most 256 files
    are held. Further ones are opened when they are read, which raises an error if the folder has been replaced.
    """

    def __init__(self, path: Path, hold: Callable[[str], bool] = lambda name: True) -> None:
        self.path = path
        self._held: dict[str, IO[bytes]] = {}
        self._descriptor = -1
        self.names: list[str] = []
        for _ in range(_TRIES):
            if self._open(hold):
                return
            self.close()
        raise FileNotFoundError(f"there is no checkpoint {path}")

    def _open(self, hold: Callable[[str], bool]) -> bool:
        """Open a folder and its files; return whether it is still the same folder then."""
        self.folder = path_or_backup(self.path)
        with contextlib.suppress(OSError):  # not on Windows; elsewhere it keeps the folder's number from being reused
            self._descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            self._identity = _identity(self.folder)
            self.manifest = manifest_of(self.folder)
            self.names = sorted(os.listdir(self.folder))
            wanted = self.names if self.manifest is None else sorted(self.manifest)
            for name in [name for name in wanted if hold(name)][:_HELD]:
                if (self.folder / name).is_file():
                    with contextlib.suppress(OSError):  # an error when it is read
                        self._held[name] = os.fdopen(os.open(self.folder / name, os.O_RDONLY | _BINARY), "rb")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self._is_current()

    def _is_current(self) -> bool:
        try:
            return _identity(self.folder) == self._identity
        except OSError:
            return False

    def hold(self, names: Iterable[str]) -> None:
        """Open more files, to stay open, up to the limit; raise an error if the folder has been replaced."""
        for name in names:
            if name not in self._held and len(self._held) < _HELD:
                with self.reading(name) as file:
                    # Another descriptor: `reading` closes its own.
                    self._held[name] = os.fdopen(os.dup(file.fileno()), "rb")

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file of the folder, at its beginning."""
        with contextlib.ExitStack() as opened:
            file = self._held.get(name)
            if file is None:
                try:
                    file = opened.enter_context(open(self.folder / name, "rb"))
                except FileNotFoundError:
                    if self._is_current():
                        raise DamagedCheckpoint(f"the checkpoint {self.path} is damaged: {name} is missing") from None
                if file is None or not self._is_current():
                    raise RuntimeError(f"the checkpoint {self.path} was replaced while it was read; load it again")
            file.seek(0)
            yield file

    def check(self, names: Iterable[str] | None = None) -> None:
        """Raise DamagedCheckpoint unless files, or all that the manifest lists, are those that were written."""
        damaged = f"the checkpoint {self.path} is damaged"
        if self.manifest is None:
            raise DamagedCheckpoint(f"{damaged}: there is no {MANIFEST} in it")
        for name in self.manifest if names is None else names:
            if name not in self.manifest:
                raise DamagedCheckpoint(f"{damaged}: {MANIFEST} in it does not list {name}")
            with self.reading(name) as file:
                size, checksum = size_and_checksum_of(file)
            if size != self.manifest[name][0]:
                raise DamagedCheckpoint(f"{damaged}: {name} in it has another length")
            if checksum != self.manifest[name][1]:
                raise DamagedCheckpoint(f"{damaged}: {name} in it has another checksum")

    def close(self) -> None:
        """Close all files."""
        for file in self._held.values():
            file.close()
        self._held.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _identity(folder: Path) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino
