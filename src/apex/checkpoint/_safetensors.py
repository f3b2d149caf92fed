"""Files in the safetensors format, with a checksum of their whole content.

    8 bytes             the length of the header, little-endian
    header              JSON: {"__metadata__": {...}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    data                the bytes of all tensors, one after the other

This module does not use the safetensors package. That package writes to a file of its own and renames it, so neither a
lock on the file nor a flush would reach the data. It also reads files only by name, and the name may belong to a newer
checkpoint a moment later.

`__metadata__` holds the CRC-32 of the header, with zeros in place of the checksum, followed by the data. Files of other
programs have no checksum; only their structure is checked.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from typing import IO, Any

import torch
from torch import Tensor

from ..ops._host import HOST
from ._damage import DamagedCheckpoint

ENDING = ".safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Two entries of `__metadata__`: if a bit flips in one name, the other entry reveals that its partner is missing.
_WRITER, _CHECKSUM = "apex_format", "apex_crc32"
_NO_CHECKSUM = "00000000"
# The safetensors package also refuses longer headers.
_LONGEST_HEADER = 100_000_000
_BLOCK = 1 << 22


def write(file: IO[bytes], state: dict[str, Tensor]) -> None:
    """Write tensors by name to an open file."""
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in _NAMES:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} is of {kind}, which safetensors cannot hold; use use_safetensors=False")
    # Larger elements first: every tensor then starts at a multiple of its element size, which memory-mapping needs.
    names = sorted(state, key=lambda name: (-state[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _WRITER: "1", _CHECKSUM: _NO_CHECKSUM}}
    start = 0
    for name in names:
        tensor = state[name]
        stop = start + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = zlib.crc32(text)
    for name in names:
        for block in _bytes_of(state[name]):
            checksum = zlib.crc32(block, checksum)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text.replace(_NO_CHECKSUM.encode(), f"{checksum:08x}".encode(), 1))
    for name in names:
        for block in _bytes_of(state[name]):
            file.write(block)
    file.flush()


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a host tensor in blocks."""
    if tensor.numel():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), _BLOCK):
            yield flat[start : start + _BLOCK].data


def is_safetensors(file: IO[bytes]) -> bool:
    """Return True if a file has this format: a length, then a brace."""
    file.seek(0)
    return file.read(9)[8:] == b"{"


def check(file: IO[bytes], name: str) -> None:
    """Raise DamagedCheckpoint unless the file, called `name` in errors, has the bytes that were written."""
    text, header = _header(file, name)
    notes = header.get("__metadata__") or {}
    if _WRITER not in notes and _CHECKSUM not in notes:
        return
    expected = str(notes.get(_CHECKSUM))
    if _WRITER not in notes or not re.fullmatch("[0-9a-f]{8}", expected):
        raise DamagedCheckpoint(f"{name} is damaged: its checksum is not readable")
    checksum = zlib.crc32(text.replace(expected.encode(), _NO_CHECKSUM.encode(), 1))
    while block := file.read(_BLOCK):
        checksum = zlib.crc32(block, checksum)
    if f"{checksum:08x}" != expected:
        raise DamagedCheckpoint(f"{name} is damaged: it has another checksum")


def shapes(file: IO[bytes], name: str) -> dict[str, torch.Size]:
    """Return the shapes of the tensors in the file called `name`."""
    return {key: torch.Size(entry["shape"]) for key, entry in _entries(_header(file, name)[1])}


def read(file: IO[bytes], name: str) -> dict[str, Tensor]:
    """Return the tensors of the file called `name`, in host memory."""
    text, header = _header(file, name)
    tensors = {}
    for key, entry in _entries(header):
        start, stop = entry["data_offsets"]
        content = torch.empty(stop - start, dtype=torch.uint8, device=HOST)
        file.seek(8 + len(text) + start)
        if stop > start and file.readinto(content.numpy()) != stop - start:  # type: ignore[attr-defined]
            raise DamagedCheckpoint(f"{name} is damaged: it ends in the middle of {key}")
        tensors[key] = content.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def _entries(header: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(key, entry) for key, entry in header.items() if key != "__metadata__"]


def _header(file: IO[bytes], name: str) -> tuple[bytes, dict[str, Any]]:
    """Return the header as bytes and parsed; the file position is then the start of the data."""
    try:
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if length > min(_LONGEST_HEADER, size - 8):
            raise ValueError(f"its header has {length} bytes")
        text = file.read(length)
        header = json.loads(text, object_pairs_hook=_unique)
        notes = header.get("__metadata__")
        if notes is not None and not all(isinstance(number, str) for number in notes.values()):
            raise ValueError("__metadata__ in it holds something other than strings")
        end = 0
        for key, entry in sorted(_entries(header), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            start, stop = entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)) or start != end:
                raise ValueError(f"{key} in it has shape {shape} and bytes {start} to {stop} after {end}")
            if stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{key} in it has shape {shape} and {stop - start} bytes")
            end = stop
        if end != size - 8 - length:
            raise ValueError(f"it has {size - 8 - length} bytes of data, and its header tells of {end}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedCheckpoint(f"{name} is damaged: {type(error).__name__}: {error}") from error
    return text, header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of the pairs; raise ValueError if a name occurs twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice in its header")
    return entries
