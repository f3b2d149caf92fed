"""Files that are there whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

# What begins with "." and ends so is unfinished: left behind by a process that was killed.
TEMPORARY = ".tmp"


def temporary_beside(path: Path) -> Path:
    """Where what is to become `path` is written: in the same folder, so that it can be renamed."""
    return path.with_name(f".{path.name}{TEMPORARY}")


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


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, where they are missing, and waits until their names are on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write a file that takes the place of `path`, flushed, when the block ends; if it fails, `path` stays."""
    path = Path(path)
    # With a number, so that two writers never share a file.
    temporary = temporary_beside(path.with_name(f"{path.name}.{os.getpid()}"))
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    _remove_leftovers(path)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """The same, with the file opened."""
    with replacing(path) as temporary, open(temporary, mode) as file:
        yield file


def _remove_leftovers(path: Path) -> None:
    """What processes that were killed had begun to write."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY}"):
        writer = writer_of(leftover)
        if writer is not None and not is_alive(writer):
            leftover.unlink(missing_ok=True)


def writer_of(temporary: Path) -> int | None:
    """The process that writes, or wrote, a file of `replacing`; None where it is something else."""
    number = temporary.name.removesuffix(TEMPORARY).rpartition(".")[2]
    return int(number) if number.isdigit() else None


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True
