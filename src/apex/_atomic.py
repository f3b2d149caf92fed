"""Files that are there whole or not at all, whenever a process or the machine stops, however many writers there are."""

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

# What begins with "." and ends so is unfinished: being written, or left behind by a process that was killed.
TEMPORARY = ".tmp"
_HOST = f"{zlib.crc32(platform.node().encode()):08x}"
# Seconds after which something unfinished is taken for left behind where its lock says nothing: it is another
# machine's, or the disk knows no locks.
_LEFT_BEHIND = 24 * 3600
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def temporary_beside(path: Path) -> Path:
    """A name that no other writer has, in any process or machine, in the folder of `path`, which it is to become."""
    return path.with_name(f".{path.name}.{_HOST}-{secrets.token_hex(8)}{TEMPORARY}")


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk; a rename is not before."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
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
    """Makes a folder, and those above it, where they are missing, and waits until their names are on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty file to write to, which takes the place of `path`, flushed, when the block ends; if it fails, it goes.

    It has the permissions of the file before.
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
            if sys.platform == "win32":  # which renames no open file
                opened.close()
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY}"):
        remove_if_left_behind(leftover)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """`replacing`, with the file opened in this mode."""
    with replacing(path) as temporary, open(temporary, mode) as file:
        yield file


@contextlib.contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """Make a new folder beside `path`, to be renamed to it; a folder that was not renamed goes when the block ends.

    If there is a folder at `path`, others cannot look into the new one before it has that folder's permissions.
    """
    temporary, descriptor = _begin(path, 0o700 if path.is_dir() else 0o777, folder=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(descriptor)


def _mode_of(path: Path) -> int | None:
    """The permissions of a file; None without one."""
    try:
        found = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(found) if stat.S_ISREG(found) else None


def _begin(path: Path, mode: int, folder: bool = False) -> tuple[Path, int]:
    """Make a new file or folder with these permissions; return its name and its descriptor, which locks it.

    It is not there before, and no link to something else.
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
            continue  # somebody removed the folder before it was opened
        _lock(descriptor, wait=True)
        if os.path.lexists(temporary):
            return temporary, descriptor
        os.close(descriptor)  # somebody found it before it was locked, and took it for left behind


def _lock(descriptor: int, wait: bool) -> bool | None:
    """Whether it could be locked, until it is closed or its process ends; None where that cannot be done."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # network disks that have no locks, or none of folders
        return None
    return True


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Let one thread of one process at a time into the block, where the disk has locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        yield
        return
    try:
        locked = _lock(descriptor, wait=True)
        try:
            yield
        finally:
            # Closing is not enough: a process that was forked meanwhile has the descriptor, and with it the lock.
            if locked and sys.platform != "win32":
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Let one process at a time inside, if the disk knows locks; the lock of a process that ends is free again."""
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


def remove_if_left_behind(temporary: Path) -> None:
    """Removes an unfinished file or folder unless somebody may still be writing to it."""
    is_folder = temporary.is_dir()
    try:
        descriptor = os.open(temporary, (os.O_RDONLY if is_folder else os.O_RDWR) | _NO_FOLLOW)
    except OSError:  # gone, a link, or somebody else's
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
