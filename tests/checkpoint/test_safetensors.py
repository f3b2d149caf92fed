"""Safetensors files: the package reads ours, we read the package's, and all damage is noticed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from apex import checkpoint
from apex.checkpoint import _files, _safetensors
from tests.campaign.saves import damaged


def example() -> dict[str, torch.Tensor]:
    """Return tensors of all kinds: odd sizes before large elements, empty, scalar, and a name that JSON escapes."""
    found = {
        f"of {name}": torch.arange(5).to(dtype) for name, dtype in _safetensors._DTYPES.items() if "F8" not in name
    }
    found["of F8"] = torch.arange(3.0).to(torch.float8_e4m3fn)
    return {**found, 'a "name" 00000000': torch.rand(2, 3).t(), "none": torch.empty(0, 3), "one": torch.tensor(2.5)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert found[name].contiguous().flatten().view(torch.uint8).tolist() == (
            value.contiguous().flatten().view(torch.uint8).tolist()
        )


def test_the_package_reads_ours_and_we_read_the_packages(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.torch")
    state = example()
    _files.write_state(state, tmp_path / "ours", use_safetensors=True)
    assert_same(theirs.load_file(tmp_path / "ours"), state)
    theirs.save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "theirs")
    checkpoint.verify(tmp_path / "theirs")
    assert_same(checkpoint.load(tmp_path / "theirs"), state)


def test_round_trip(tmp_path: Path) -> None:
    state = example()
    _files.write_state(state, tmp_path / "x", use_safetensors=True)
    checkpoint.verify(tmp_path / "x")
    assert_same(checkpoint.load(tmp_path / "x"), state)
    with open(tmp_path / "x", "rb") as file:
        assert _files.shapes_in(file, "x") == {name: value.shape for name, value in state.items()}
    with pytest.raises(TypeError, match=r"steps is of int, which safetensors cannot hold; use use_safetensors=False"):
        _files.write_state({"steps": 3}, tmp_path / "y", use_safetensors=True)


def test_damage_is_noticed(tmp_path: Path) -> None:
    """One bit of any byte is flipped, or the file is damaged otherwise."""
    path, state = tmp_path / "x", {"weights": torch.rand(7), "step": torch.tensor(3)}
    _files.write_state(state, path, use_safetensors=True)
    content, rng = path.read_bytes(), random.Random(5)
    changes = [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in range(len(content))]
    for changed in [*changes, *(damaged(content, rng) for _ in range(200))]:
        if changed != content:
            path.write_bytes(changed)
            with pytest.raises(checkpoint.DamagedCheckpoint, match="is damaged"):
                checkpoint.load(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":null}', "TypeError"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "bytes 4 to 8 after 0"),
        ('{"a":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}', r"shape \[-1, -2\]"),
        ('{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', r"shape \[3\] and 8 bytes"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "8 bytes of data, and its header tells of 4"),
        ('{"a":{"dtype":"F9","shape":[2],"data_offsets":[0,8]}}', "KeyError: 'F9'"),
        ('{"a":1,"a":2}', "occurs twice"),
        ('{"__metadata__":1}', "AttributeError"),
        ('{"__metadata__":{"format":1}}', "something other than strings"),
    ],
)
def test_headers_that_lie(header: str, message: str, tmp_path: Path) -> None:
    """Files of other programs have no checksum, so their headers are checked."""
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(checkpoint.DamagedCheckpoint, match=message):
        checkpoint.load(tmp_path / "x")
