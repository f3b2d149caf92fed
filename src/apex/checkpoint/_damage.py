"""The error for damaged checkpoints, and the checksum that detects damage."""

from __future__ import annotations

import zlib
from typing import IO

_BLOCK = 1 << 22


class DamagedCheckpoint(RuntimeError):
    """Raised if the bytes of a checkpoint are not the bytes that were written."""


def size_and_checksum_of(file: IO[bytes]) -> tuple[int, int]:
    """Return the length and the CRC-32 of an open file, read from its beginning."""
    size = checksum = 0
    file.seek(0)
    while block := file.read(_BLOCK):
        size += len(block)
        checksum = zlib.crc32(block, checksum)
    return size, checksum
