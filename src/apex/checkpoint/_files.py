"""A checkpoint that is one file, in the format of `torch.save`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .._atomic import make_folder, replacing
from ._ranks import is_first, raise_everywhere

# In a sharded checkpoint: the length and the checksum of each of its files, and what of which tensor is in which file.
MANIFEST = "manifest.json"
METADATA = ".metadata"
_BLOCK = 1 << 22
# Bytes that are written to find out whether a disk is full.
_PROBE = 1 << 20
_SWITCHING = threading.Lock()


class DamagedCheckpoint(RuntimeError):
    """A checkpoint is not what was written."""


def save(state: Any, path: str | os.PathLike[str], *, wait: bool = False) -> None:
    """Writes `state` to a file as `torch.save` does, but whole or not at all: `path` is the old file until then.

    In several processes rank 0 writes. The others go on at once, or with `wait`, to be given in all of them, when the
    file is there. If it could not be written, rank 0 raises, or with `wait` all of them: an OSError with the system's
    number, else a RuntimeError.
    """
    failure: Exception | None = None
    if is_first():
        try:
            make_folder(Path(path).parent)
            # By its name, not opened: PyTorch then writes without Python in between.
            with replacing(path) as temporary, _with_checksums():
                try:
                    torch.save(state, temporary)
                except RuntimeError as error:
                    raise disk_error(temporary.parent) or error from None
        except Exception as error:
            failure = error
    if wait or failure is not None:
        raise_everywhere(failure, f"the checkpoint {os.fspath(path)} could not be written", alone=not wait)


@contextlib.contextmanager
def _with_checksums() -> Iterator[None]:
    """Switches on the checksums of `torch.save`, which `verify` needs; for all threads up to PyTorch 2.10."""
    with _SWITCHING:  # also to ask: what another thread has switched on goes off when that is done
        are_off = not torch.serialization.get_crc32_options()
        if are_off:
            torch.serialization.set_crc32_options(True)
            try:
                yield
            finally:
                torch.serialization.set_crc32_options(False)
    if not are_off:
        yield


def disk_error(folder: Path) -> OSError | None:
    """Why a disk takes no more, if so; PyTorch's writer says only that it failed."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def load(path: str | os.PathLike[str], *, map_location: Any = None, weights_only: bool = True) -> Any:
    """What `save` wrote. Raises `DamagedCheckpoint` if the file is not whole; arguments are those of `torch.load`."""
    verify(path)
    return torch.load(path, map_location=map_location, weights_only=weights_only)


def verify(path: str | os.PathLike[str]) -> None:
    """Raises `DamagedCheckpoint` unless all bytes of a file or folder of this package are those that were written."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    reason = _damage_of_folder(path) if path.is_dir() else _damage_of_file(path)
    if reason:
        raise DamagedCheckpoint(f"the checkpoint {path} is damaged: {reason}")


def _damage_of_file(path: Path) -> str | None:
    """A file of `torch.save` is a zip archive, which has a checksum for everything in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        torch._C.PyTorchFileReader(os.fspath(path))  # its list of contents as PyTorch reads it, which is stricter
    except Exception as error:  # of many kinds, by what was hit: names, versions, flags; some have no message
        return f"{type(error).__name__}: {error}"
    return f"{broken} in it has another checksum" if broken else None


def _damage_of_folder(path: Path) -> str | None:
    try:
        expected = json.loads((path / MANIFEST).read_text())
        if METADATA not in expected:
            return f"{MANIFEST} in it does not list {METADATA}"
        for name, (size, checksum) in expected.items():
            if Path(name).name != name:
                return f"{MANIFEST} in it lists {name}, which is not in it"
            if (path / name).stat().st_size != size:
                return f"{name} in it has another length"
            if checksum_of(path / name) != checksum:
                return f"{name} in it has another checksum"
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        return str(error)
    return None


def checksum_of(path: Path) -> int:
    """The CRC-32 of a file."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum
