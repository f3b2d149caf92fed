"""Checkpoints in a single file, in the format of `torch.save` or of safetensors."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import tempfile
import threading
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from .._atomic import make_folder, replacing
from ..ops._host import HOST
from . import _safetensors
from ._damage import DamagedCheckpoint
from ._folders import Generation
from ._ranks import is_first, raise_everywhere

# Number of bytes that are written to find out whether a disk is full.
_PROBE = 1 << 20
_SWITCHING = threading.Lock()
# The first bytes of a file that torch.save wrote before PyTorch 1.6, or without `_use_new_zipfile_serialization`: the
# pickle of PyTorch's magic number.
_OLD_START = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)


def save(state: Any, path: str | os.PathLike[str], *, wait: bool = False) -> None:
    """Write `state` to a file as `torch.save` does, atomically: `path` is the old file until the new one is complete.

    In several processes only rank 0 writes. The others continue at once; with `wait`, which all processes must pass,
    they wait until the file is complete. If writing fails, rank 0 raises (with `wait` all processes do): an OSError
    with the system's error number, otherwise a RuntimeError.
    """
    if Path(path).suffix == ".safetensors":
        raise ValueError(
            f"{os.fspath(path)}: this function writes the format of torch.save, which readers of .safetensors files do "
            "not take; use another ending, or the Booster's save_model(use_safetensors=True)"
        )
    failure: Exception | None = None
    if is_first():
        try:
            make_folder(Path(path).parent)
            with replacing(path) as temporary:
                write_state(state, temporary)
        except Exception as error:
            failure = error
    if wait or failure is not None:
        raise_everywhere(failure, f"the checkpoint {os.fspath(path)} could not be written", alone=not wait)


def write_state(state: Any, path: Path, use_safetensors: bool = False) -> None:
    """Write `state` to a file with checksums; raise the system's error if the disk is full."""
    if use_safetensors:
        with open(path, "wb") as file:
            _safetensors.write(file, state)
        return
    with _with_checksums():
        try:
            # Passed by name, because PyTorch then writes without calling Python.
            torch.save(state, path)
        except RuntimeError as error:
            # Their variables hold the file open, and an error is often part of a cycle: a removed file would fill the
            # disk until the next garbage collection.
            for failure in (error, error.__context__):
                traceback.clear_frames(failure.__traceback__ if failure else None)
            raise disk_error(path) or error from None


@contextlib.contextmanager
def _with_checksums() -> Iterator[None]:
    """Enable the checksums of `torch.save`, which `verify` needs; up to PyTorch 2.10 the switch affects all threads."""
    with _SWITCHING:  # also for reading, because another thread may have enabled the switch and will disable it
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
    """Return the system's error if a file or folder cannot grow, otherwise None; PyTorch's writer hides the reason.

    A file is extended, because it may have reached the size limit on a disk with free space.
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
    """Return the state that `save` wrote. Raises `DamagedCheckpoint` if the file is damaged.

    `map_location` and `weights_only` are arguments of `torch.load`. Files that PyTorch wrote before release 1.6 are
    read as well, although they have no checksums.
    """
    with opened(Path(path)) as file:
        check_file(file, f"the checkpoint {path}")
        return read(file, f"the checkpoint {path}", map_location, weights_only)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file; raise a FileNotFoundError that calls it a checkpoint if it is missing."""
    if not path.is_file():
        hint = ", but a folder of this name, which load_sharded or the Booster reads" if path.is_dir() else ""
        raise FileNotFoundError(f"there is no checkpoint {path}{hint}")
    with open(path, "rb") as file:
        yield file


def verify(path: str | os.PathLike[str]) -> None:
    """Raise `DamagedCheckpoint` unless a file or folder of this package has exactly the bytes that were written.

    Raises a ValueError for a file in PyTorch's format before release 1.6, which has no checksums.
    """
    path = Path(path)
    if path.is_file():
        with opened(path) as file:
            if _is_old(file):
                raise ValueError(
                    f"the checkpoint {path} is in the format of torch.save before PyTorch 1.6, which has no checksums; "
                    "apex.checkpoint.load reads it, and apex.checkpoint.save writes it with checksums"
                )
            check_file(file, f"the checkpoint {path}")
    else:
        with Generation(path) as generation:
            generation.check()


def check_file(file: IO[bytes], name: str) -> None:
    """Raise DamagedCheckpoint unless an open file, called `name` in errors, has the bytes that were written.

    A file of PyTorch before release 1.6 has no checksums, so nothing is checked.
    """
    if _is_old(file):
        return
    if _safetensors.is_safetensors(file):
        _safetensors.check(file, name)
        return
    try:
        file.seek(0)
        with zipfile.ZipFile(file) as archive:  # torch.save writes a zip archive with a checksum of each entry
            broken = archive.testzip()
        file.seek(0)
        torch._C.PyTorchFileReader(file)  # PyTorch reads the archive's directory more strictly
    except Exception as error:  # many kinds, depending on the damaged byte; some have no message
        raise DamagedCheckpoint(f"{name} is damaged: {type(error).__name__}: {error}") from error
    if broken:
        raise DamagedCheckpoint(f"{name} is damaged: {broken} in it has another checksum")


def _is_old(file: IO[bytes]) -> bool:
    """Return True if an open file has the format of `torch.save` before PyTorch 1.6, which is no zip archive."""
    file.seek(0)
    return file.read(len(_OLD_START)) == _OLD_START


def read(file: IO[bytes], name: str, map_location: Any = None, weights_only: bool = True) -> Any:
    """Return the content of an open file, called `name` in errors."""
    if _safetensors.is_safetensors(file):
        return _safetensors.read(file, name)
    is_old = _is_old(file)
    file.seek(0)
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except (EOFError, IndexError, struct.error, RuntimeError) as error:
        # `check_file` has found other files intact. Other RuntimeErrors are about devices.
        if not is_old or (isinstance(error, RuntimeError) and "unexpected EOF" not in str(error)):
            raise
        raise DamagedCheckpoint(f"{name} is damaged: {type(error).__name__}: {error}") from error


def plain_state(name: str, value: Any) -> Any:
    """Return a copy of an object's state or of a value, after a check that it can be read without running code."""
    file = io.BytesIO()
    state = value.state_dict() if hasattr(value, "state_dict") else value
    try:
        torch.save(state, file)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # Python's errors about functions and handles
        raise TypeError(f"{name} cannot be saved: {error}") from error
    file.seek(0)
    try:
        return torch.load(file, map_location=HOST, weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(f"{name} holds what torch.load(weights_only=True) refuses, and could not be loaded") from error


def shapes_in(file: IO[bytes], name: str) -> dict[Any, torch.Size | None]:
    """Return the shapes of the tensors in an open file that holds a dict; None for values that are not tensors."""
    if _safetensors.is_safetensors(file):
        return dict(_safetensors.shapes(file, name))
    content = read(file, name, map_location="meta")
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{name} holds a {type(content).__name__}, not tensors by name")
    return {key: getattr(value, "shape", None) for key, value in content.items()}
