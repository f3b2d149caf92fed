"""A checkpoint that is one file, in the format of `torch.save` or of safetensors."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from .._atomic import make_folder, replacing
from . import _safetensors
from ._damage import DamagedCheckpoint
from ._folders import Generation
from ._ranks import is_first, raise_everywhere

# Bytes that are written to find out whether a disk is full.
_PROBE = 1 << 20
_SWITCHING = threading.Lock()


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
            with replacing(path) as temporary:
                put(state, temporary)
        except Exception as error:
            failure = error
    if wait or failure is not None:
        raise_everywhere(failure, f"the checkpoint {os.fspath(path)} could not be written", alone=not wait)


def put(state: Any, path: Path, use_safetensors: bool = False) -> None:
    """Write `state` to a file, with checksums; raise the system's error if the disk takes no more."""
    if use_safetensors:
        with open(path, "wb") as file:
            _safetensors.write(file, state)
        return
    with _with_checksums():
        try:
            # By its name, not opened: PyTorch then writes without Python in between.
            torch.save(state, path)
        except RuntimeError as error:
            raise disk_error(path) or error from None


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


def disk_error(path: Path) -> OSError | None:
    """Return why a disk takes no more for a file or folder, if so; PyTorch's writer says only that it failed.

    A file is made longer, because it may be as long as the system lets it be, on a disk with room.
    """
    try:
        if path.is_file():
            with open(path, "ab") as file:
                _probe(file)
        with tempfile.TemporaryFile(dir=path if path.is_dir() else path.parent) as file:
            _probe(file)
    except OSError as error:
        return error
    return None


def _probe(file: IO[bytes]) -> None:
    file.write(bytes(_PROBE))
    file.flush()
    os.fsync(file.fileno())


def load(path: str | os.PathLike[str], *, map_location: Any = None, weights_only: bool = True) -> Any:
    """Return what `save` wrote. Raises `DamagedCheckpoint` if the file is not whole.

    Arguments are those of `torch.load`.
    """
    with opened(Path(path)) as file:
        check_file(file, f"the checkpoint {path}")
        return read(file, f"the checkpoint {path}", map_location, weights_only)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file; raise FileNotFoundError, which calls it a checkpoint, if it is not there."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    with open(path, "rb") as file:
        yield file


def verify(path: str | os.PathLike[str]) -> None:
    """Raises `DamagedCheckpoint` unless all bytes of a file or folder of this package are those that were written."""
    path = Path(path)
    if path.is_file():
        with opened(path) as file:
            check_file(file, f"the checkpoint {path}")
    else:
        with Generation(path) as generation:
            generation.check()


def check_file(file: IO[bytes], name: str) -> None:
    """Raise DamagedCheckpoint unless the bytes of an open file, to be called `name`, are those that were written."""
    if _safetensors.is_one(file):
        _safetensors.check(file, name)
        return
    try:
        file.seek(0)
        with zipfile.ZipFile(file) as archive:  # torch.save writes an archive, which has a checksum for all in it
            broken = archive.testzip()
        file.seek(0)
        torch._C.PyTorchFileReader(file)  # its list of contents as PyTorch reads it, which is stricter
    except Exception as error:  # of many kinds, by what was hit: names, versions, flags; some have no message
        raise DamagedCheckpoint(f"{name} is damaged: {type(error).__name__}: {error}") from error
    if broken:
        raise DamagedCheckpoint(f"{name} is damaged: {broken} in it has another checksum")


def read(file: IO[bytes], name: str, map_location: Any = None, weights_only: bool = True) -> Any:
    """Return what an open file, to be called `name`, holds."""
    if _safetensors.is_one(file):
        return _safetensors.read(file, name)
    file.seek(0)
    return torch.load(file, map_location=map_location, weights_only=weights_only)


def shapes_in(file: IO[bytes], name: str) -> dict[Any, torch.Size | None]:
    """Return the shapes of the tensors in an open file that holds a dict; None for values that are no tensors."""
    if _safetensors.is_one(file):
        return dict(_safetensors.shapes(file, name))
    found = read(file, name, map_location="meta")
    if not isinstance(found, dict):
        raise DamagedCheckpoint(f"{name} holds a {type(found).__name__}, not tensors by name")
    return {key: getattr(value, "shape", None) for key, value in found.items()}
