"""Atomic writes: a file or folder is complete or absent, even if the process stops or other processes write it too."""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import secrets
import shutil
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

if sys.platform != "win32":
    import fcntl

# Names that begin with "." and end with this are unfinished: being written, or left behind by a killed process.
TEMPORARY = ".tmp"
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"
# Seconds after which an unfinished file counts as left behind if its lock cannot be tested, because another machine
# made it or the disk does not support locks.
_LEFT_BEHIND = 24 * 3600
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def temporary_beside(path: Path) -> Path:
    """Return a temporary name in the folder of `path` that no other writer, process or machine uses."""
    return path.with_name(f".{path.name}.{_HOST}-{secrets.token_hex(8)}{TEMPORARY}")


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder, after a rename for example, are on the disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Wait until the bytes of a file are on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and wait until their names are on the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the name of an empty file to write, which replaces `path` when the block ends.

    The file is flushed before, and gets the permissions of the old file. If the block raises, it is removed.
    """
    path = Path(path)
    mode = _mode_of(path)
    temporary, descriptor = _begin(path, 0o666 if mode is None else 0o600)
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, descriptor)
        try:
            yield temporary
            os.fsync(descriptor)
            if mode is not None:
                os.chmod(temporary, mode)
            if sys.platform == "win32":  # Windows cannot rename an open file
                opened.close()
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)
    _remove_leftovers(path)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Yield an open file that replaces `path` when the block ends; see `replacing`."""
    with replacing(path) as temporary, open(temporary, mode) as file:
        yield file


@contextlib.contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`, for the caller to rename to it; remove it at the end if it was not renamed.

    If `path` exists, other users cannot read the new folder until it gets the permissions of the old one.
    """
    _remove_leftovers(path)  # first, because they may fill the disk
    temporary, descriptor = _begin(path, 0o700 if path.is_dir() else 0o777, folder=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(descriptor)


def _mode_of(path: Path) -> int | None:
    """Return the permissions of a regular file, or None if there is none."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(mode) if stat.S_ISREG(mode) else None


def _begin(path: Path, mode: int, folder: bool = False) -> tuple[Path, int]:
    """Make a new file or folder with these permissions; return its name and its descriptor, which holds a lock.

    Fails rather than opening an existing file or following a link.
    """
    while True:
        temporary = temporary_beside(path)
        try:
            if folder:
                temporary.mkdir(mode)
                descriptor = os.open(temporary, os.O_RDONLY | _NO_FOLLOW)
            else:
                descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, mode)
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            continue  # another process removed the folder before it was opened
        _lock(descriptor, wait=True)
        if os.path.lexists(temporary):
            return temporary, descriptor
        os.close(descriptor)  # another process removed it as left behind before it was locked


def _lock(descriptor: int, wait: bool) -> bool | None:
    """Lock a descriptor until it is closed or the process ends; return whether it worked, None without lock support."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # some network disks have no locks, or none for folders
        return None
    return True


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Let one thread of one process at a time into the block, if the disk supports locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        yield
        return
    try:
        locked = _lock(descriptor, wait=True)
        try:
            yield
        finally:
            # Closing is not enough: a process that was forked meanwhile shares the descriptor and its lock.
            if locked and sys.platform != "win32":
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Let one process at a time into the block, if the disk supports locks; a process that ends frees its lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise OSError(error.errno, "the lock is a link, which is not followed; remove it", str(path)) from error
        raise
    try:
        _lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Remove what killed processes have left of earlier writes to `path`."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY}"):
        remove_if_left_behind(leftover)


def remove_if_left_behind(temporary: Path) -> None:
    """Remove an unfinished file or folder unless a process may still be writing to it."""
    is_folder = temporary.is_dir()
    try:
        descriptor = os.open(temporary, (os.O_RDONLY if is_folder else os.O_RDWR) | _NO_FOLLOW)
    except OSError:  # it is gone, a link, or another user's
        return
    try:
        is_ours = temporary.name.rpartition("-")[0].endswith(f".{_HOST}")
        free = _lock(descriptor, wait=False) if is_ours else None
        if free is None:
            free = time.time() - os.fstat(descriptor).st_mtime > _LEFT_BEHIND
        if free and is_folder:
            shutil.rmtree(temporary, ignore_errors=True)
        elif free:
            with contextlib.suppress(OSError):
                temporary.unlink()
    finally:
        os.close(descriptor)
