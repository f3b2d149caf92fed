"""Checkpoint folders, which are replaced as a whole and read as of one moment.

    manifest.json       {name: [length, CRC-32]} of the files that this package wrote to the folder
    ...                 those files; other files belong to the user and are never replaced or deleted

A folder is never changed in place. A save fills a new folder beside it, adds hard links to the files that stay, and
swaps the two folders by renaming.
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
# In a sharded checkpoint: the index of tensor parts and their files.
METADATA = ".metadata"
Manifest = dict[str, tuple[int, int]]
# Number of attempts to replace or open a folder while other processes do the same.
_ATTEMPTS = 100
# Number of files that a reader holds open. Linux allows a process 1024 by default.
_MAX_OPEN_FILES = 256
_BINARY = getattr(os, "O_BINARY", 0)  # Windows would open files in text mode


def is_plain_name(name: Any) -> bool:
    """Return True if `name` is a plain file name on every system: no path, no drive."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def size_and_checksum(path: Path) -> tuple[int, int]:
    """Return the length and the CRC-32 of a file."""
    with open(path, "rb") as file:
        return size_and_checksum_of(file)


def manifest_of(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if it has none; raise DamagedCheckpoint if it is not valid."""
    try:
        text = (folder / MANIFEST).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"the checkpoint {folder} is damaged: {MANIFEST} cannot be read: {error}") from error
    try:
        manifest = {name: (int(size), int(checksum)) for name, (size, checksum) in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"the checkpoint {folder} is damaged: {MANIFEST}: {error}") from error
    for name in manifest:
        if not is_plain_name(name):
            raise DamagedCheckpoint(
                f"the checkpoint {folder} is damaged: {MANIFEST} in it lists {name}, which is not in it"
            )
    return manifest


def backup_of(path: Path) -> Path:
    """Return the name of the folder at `path` while a new one replaces it."""
    return path.with_name(f".{path.name}.replaced")


def path_or_backup(path: Path) -> Path:
    """Return `path`, or its backup if a process was killed before the new folder was in place."""
    backup = backup_of(path)
    return backup if not path.exists() and backup.exists() else path


def restore_backup(path: Path) -> None:
    """Clean up after a killed process: rename its backup to `path`, or delete it if `path` exists."""
    if backup_of(path).exists():
        with locked_folder(path.parent):  # another thread may be about to put a new folder there
            _restore(path)


def _restore(path: Path) -> None:
    backup = backup_of(path)
    if path.exists():
        discard(backup, path)
    elif backup.exists():
        with contextlib.suppress(OSError):  # without locks, another thread may put a new folder there
            os.rename(backup, path)


def prepare(path: Path, names: Iterable[str], only_checkpoints: bool = False) -> None:
    """Clean up after a killed process, and raise FileExistsError if a save to `path` would replace files of the user.

    The folder must have no user files with these names. With `only_checkpoints` it must be empty or have a manifest.
    """
    with locked_folder(path.parent):  # while a folder is being replaced it would seem to have no manifest
        _restore(path)
        _check_target(path, names, only_checkpoints)


def _check_target(path: Path, names: Iterable[str], only_checkpoints: bool) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        kind = "a link" if path.is_symlink() else "a file"
        raise FileExistsError(errno.EEXIST, f"{path} is {kind}, which no folder can replace; choose another path")
    if only_checkpoints:
        check_is_checkpoint(path)
    check_names(path, names)


def check_names(path: Path, names: Iterable[str]) -> None:
    """Raise FileExistsError if the folder has user files with these names."""
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
    """Return True if a folder has a manifest."""
    return bool(_listed(path))


def has_user_files(path: Path) -> bool:
    """Return True if a folder has files that no save wrote."""
    return bool({entry.name for entry in path.iterdir()} - _listed(path))


def check_is_checkpoint(path: Path) -> None:
    """Raise FileExistsError if `path` is a folder that has files but no manifest."""
    if path.is_dir() and not is_checkpoint(path) and any(path.iterdir()):
        raise FileExistsError(
            errno.EEXIST, f"{path} holds files and is no checkpoint (it has no {MANIFEST}); choose another folder"
        )


def _listed(folder: Path) -> set[str]:
    """Return the names of the files that a save wrote: the manifest and the files that it lists.

    Raise an OSError if the manifest cannot be read.
    """
    try:
        manifest = manifest_of(folder)
    except DamagedCheckpoint as error:
        if isinstance(error.__cause__, OSError):  # the manifest may be intact
            raise error.__cause__ from None
        return set()
    return set() if manifest is None else {*manifest, MANIFEST}


def publish(
    temporary: Path, path: Path, written: Manifest, ours: Callable[[str], bool], only_checkpoints: bool = False
) -> None:
    """Replace the folder at `path` by a new one, unless `prepare` would raise an error.

    Files of earlier saves with names that are `ours` are deleted. All other files and folders, the user's and other
    saves', are carried over to the new folder. Folders and files keep their permissions.
    """
    with locked_folder(path.parent):
        _restore(path)
        _check_target(path, written, only_checkpoints)
        old_manifest = (manifest_of(path) if path.is_dir() else None) or {}
        carried_over = {
            name for name in old_manifest if name not in written and not ours(name) and os.path.lexists(path / name)
        }
        if path.is_dir():
            for entry in path.iterdir():
                if entry.name in carried_over or entry.name not in {*old_manifest, MANIFEST}:
                    _link(entry, temporary / entry.name)
            _keep_modes(path, temporary, written)
        with atomic_file(temporary / MANIFEST, "w") as file:
            json.dump({**{name: old_manifest[name] for name in carried_over}, **written}, file)
        _keep_modes(path, temporary, [MANIFEST])
        if path.is_dir():
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        sync_folder(temporary)
        _exchange(temporary, path)
        discard(backup_of(path), path)
        sync_folder(path.parent)


def _keep_modes(old_folder: Path, new_folder: Path, names: Iterable[str]) -> None:
    """Give files the permissions of the files that they replace; new files get the old manifest's."""
    for name in names:
        for old in (old_folder / name, old_folder / MANIFEST):
            if old.is_file():
                os.chmod(new_folder / name, stat.S_IMODE(old.stat().st_mode))
                break


def _exchange(temporary: Path, path: Path) -> None:
    """Rename the new folder to `path`, after moving an old folder to its backup."""
    for _ in range(_ATTEMPTS):
        try:
            os.rename(temporary, path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                _restore(path)
                raise
        # A rename cannot replace a folder that is not empty. Without locks, others may do the same at this moment.
        discard(backup_of(path), path)
        with contextlib.suppress(OSError):
            os.rename(path, backup_of(path))
    raise OSError(errno.EEXIST, f"{path} could not be moved to {backup_of(path)} for the new one")


def _link(source: Path, target: Path) -> None:
    """Link a file, symbolic link or folder to a second name; keep files that a folder of that name already has."""
    if source.is_symlink():
        os.symlink(os.readlink(source), target)
    elif source.is_dir():
        shutil.copytree(source, target, symlinks=True, copy_function=_link_file, dirs_exist_ok=True)
    else:
        _link_file(source, target)


def _link_file(source: Any, target: Any) -> Any:
    """Link a file to a second name, or copy it if the disk has no hard links."""
    try:
        os.link(source, target)
    except FileExistsError:
        return target
    except OSError:
        shutil.copy2(source, target)
    return target


def discard(folder: Path, successor: Path | None) -> None:
    """Remove a folder's checkpoint files, and move the user's files to its successor unless it has newer ones.

    Without a successor the user's files stay. Files that cannot be removed are left for a later save.
    """
    with contextlib.suppress(OSError):
        # The manifest is removed last, because it lists the checkpoint's files.
        for name in sorted(_listed(folder), key=MANIFEST.__eq__):
            (folder / name).unlink(missing_ok=True)
        if successor is not None:
            _move(folder, successor)
        folder.rmdir()


def _move(folder: Path, successor: Path) -> None:
    for entry in folder.iterdir():
        target = successor / entry.name
        if entry.is_dir() and not entry.is_symlink() and target.is_dir():
            _move(entry, target)
            entry.rmdir()
        elif not os.path.lexists(target) or os.lstat(entry).st_mtime_ns > os.lstat(target).st_mtime_ns:
            os.replace(entry, target)
        else:
            entry.unlink()


class Generation:
    """A snapshot of a folder, held open: a save that replaces the folder does not affect it.

    `names` are all names in the folder. `manifest` is None for folders of other programs. At most 256 files are held
    open. Others are opened when they are read, which raises an error if the folder has been replaced.
    """

    def __init__(self, path: Path, hold: Callable[[str], bool] = lambda name: True) -> None:
        self.path = path
        self._open_files: dict[str, IO[bytes]] = {}
        self._descriptor = -1
        self.names: list[str] = []
        for _ in range(_ATTEMPTS):
            if self._open(hold):
                return
            self.close()
        raise FileNotFoundError(f"there is no checkpoint {path}")

    def _open(self, hold: Callable[[str], bool]) -> bool:
        """Open the folder and its files; return True if the folder was not replaced meanwhile."""
        self.folder = path_or_backup(self.path)
        with contextlib.suppress(OSError):  # fails on Windows; elsewhere it prevents reuse of the folder's inode number
            self._descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            self._identity = _identity(self.folder)
            self.manifest = manifest_of(self.folder)
            self.names = sorted(os.listdir(self.folder))
            candidates = self.names if self.manifest is None else sorted(self.manifest)
            for name in [name for name in candidates if hold(name)][:_MAX_OPEN_FILES]:
                if (self.folder / name).is_file():
                    with contextlib.suppress(OSError):  # raises when it is read
                        self._open_files[name] = os.fdopen(os.open(self.folder / name, os.O_RDONLY | _BINARY), "rb")
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self._is_current()

    def _is_current(self) -> bool:
        """Return True unless the folder was replaced; a backup is being deleted as soon as there is a new folder."""
        try:
            return path_or_backup(self.path) == self.folder and _identity(self.folder) == self._identity
        except OSError:
            return False

    def hold(self, names: Iterable[str]) -> None:
        """Hold more files open, up to the limit; raise an error if the folder has been replaced."""
        for name in names:
            if name not in self._open_files and len(self._open_files) < _MAX_OPEN_FILES:
                with self.reading(name) as file:
                    # `reading` closes its own descriptor.
                    self._open_files[name] = os.fdopen(os.dup(file.fileno()), "rb")

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file of the folder at its beginning."""
        with contextlib.ExitStack() as opened:
            file = self._open_files.get(name)
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
        """Raise DamagedCheckpoint unless the given files, or all of the manifest, have the bytes that were written."""
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
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()
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
    status = os.stat(folder)
    return status.st_dev, status.st_ino
