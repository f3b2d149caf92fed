"""Files that processes share."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from apex._distributed import peer_memory
from apex.contrib.peer_memory import PeerMemoryPool


def test_a_full_memory_folder_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file there would end the process at the first write."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(peer_memory, "_MEMORY_FOLDER", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    reserve = os.posix_fallocate

    def full(descriptor: int, start: int, count: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(memory)):
            raise OSError(errno.ENOSPC, "no room")
        reserve(descriptor, start, count)

    assert Path(peer_memory.new_file(100)).parent == memory
    monkeypatch.setattr(os, "posix_fallocate", full)
    path = Path(peer_memory.new_file(100))
    assert path.parent == disk
    assert path.stat().st_size == 100
    assert len(list(memory.iterdir())) == 1
    monkeypatch.setattr(peer_memory, "_MEMORY_FOLDER", tmp_path / "none")
    assert Path(peer_memory.new_file(100)).parent == disk


def test_sizes_of_a_pool() -> None:
    pool = PeerMemoryPool(1, 0)
    assert (pool.static_size, pool.dynamic_size) == (256, 0)
    assert len(PeerMemoryPool(0, 0).memory.memories) == 1
    with pytest.raises(ValueError, match="static_size=-1"):
        PeerMemoryPool(-1, 0)
