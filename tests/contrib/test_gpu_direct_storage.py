"""apex.contrib.gpu_direct_storage: raw bytes, files that are too short, cuFile that fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from apex.contrib import gpu_direct_storage
from apex.contrib.gpu_direct_storage import GDSFile

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool)


def round_trips(path: Path, device: str) -> None:
    for dtype in DTYPES:
        tensor = (torch.randn(37, 11) * 4).to(device, dtype)
        for suffix, name in (("", "data"), ("n", "data"), ("", "data_no_gds")):
            with GDSFile(str(path), "w" + suffix) as file:
                getattr(file, f"save_{name}")(torch.zeros(10_000, device=device))  # longer than what follows
                getattr(file, f"save_{name}")(tensor)
            assert path.read_bytes() == bytes(tensor.cpu().reshape(-1).view(torch.uint8).tolist())
            found = torch.zeros(11, 74, dtype=dtype, device=device)[:, ::2].t()  # strided, with strangers in between
            with GDSFile(str(path), "r" + suffix) as file:
                getattr(file, f"load_{name}")(found)
            assert torch.equal(found, tensor)


def test_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    round_trips(tmp_path / "file", "cpu")
    # The system may read and write less than it is asked for.
    read, write = os.readv, os.writev
    monkeypatch.setattr(os, "readv", lambda descriptor, buffers: read(descriptor, [buffers[0][:100]]))
    monkeypatch.setattr(os, "writev", lambda descriptor, buffers: write(descriptor, [buffers[0][:100]]))
    round_trips(tmp_path / "file", "cpu")


@pytest.mark.gpu
def test_round_trips_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_direct_storage, "_BUFFER", 1000)
    round_trips(tmp_path / "file", "cuda")


@pytest.mark.gpu
def test_without_cufile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("no cuFile here")

    monkeypatch.setattr(torch.cuda.gds, "GdsFile", refuse)
    with GDSFile(str(tmp_path / "file"), "w") as file:
        file.save_data(torch.ones(3, device="cuda"))
    assert file.reason == "RuntimeError: no cuFile here"
    assert (tmp_path / "file").stat().st_size == 12


def test_short_files_and_wrong_modes_raise(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    with GDSFile(path, "w") as file:
        file.save_data(torch.ones(3))
        with pytest.raises(ValueError, match="cannot be read from"):
            file.load_data(torch.ones(3))
    untouched = torch.full((4,), 7.0)
    with GDSFile(path, "r") as file:
        with pytest.raises(EOFError, match=r"has 12 bytes, the tensor \[4\] needs 16"):
            file.load_data(untouched)
        with pytest.raises(ValueError, match="cannot be written to"):
            file.save_data(untouched)
    assert bool((untouched == 7).all())
    with pytest.raises(ValueError, match="is closed"):
        file.load_data(torch.ones(3))
    with pytest.raises(ValueError, match="mode='x'"):
        GDSFile(path, "x")
    with pytest.raises(FileNotFoundError):
        GDSFile(str(tmp_path / "none"), "r")
