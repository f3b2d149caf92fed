"""Split layers, losses and random numbers in two and four processes, and helpers that need no processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apex.transformer.tensor_parallel import RingMemBuffer, VocabUtility, memory, split_tensor_along_last_dim
from apex.transformer.utils import divide
from tests.parallel.processes import run_checks
from tests.transformer import tensor_parallel_checks


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = Path(tmp_path_factory.mktemp("tensor"))
    return run_checks(tensor_parallel_checks.__name__, folder, processes=request.param)


@pytest.mark.parametrize("name", tensor_parallel_checks.CHECKS)
def test_processes(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]


def test_split_along_last_dim() -> None:
    tensor = torch.arange(12).view(2, 6)
    views = split_tensor_along_last_dim(tensor, 3)
    copies = split_tensor_along_last_dim(tensor, 3, contiguous_split_chunks=True)
    assert (
        [part.tolist() for part in views]
        == [part.tolist() for part in copies]
        == [
            [[0, 1], [6, 7]],
            [[2, 3], [8, 9]],
            [[4, 5], [10, 11]],
        ]
    )
    assert all(part.is_contiguous() for part in copies)
    with pytest.raises(AssertionError, match="6 is not divisible by 4"):
        split_tensor_along_last_dim(tensor, 4)


def test_parts_of_a_vocabulary() -> None:
    assert VocabUtility.vocab_range_from_global_vocab_size(12, 1, 4) == (3, 6)
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(5, 2, 4) == (10, 15)
    with pytest.raises(AssertionError, match="13 is not divisible by 4"):
        divide(13, 4)


def test_memory_buffers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(memory, "_buffers", {})
    ring = RingMemBuffer("ring", 2, 8, torch.float32, track_usage=True)
    first = ring.get_next_buffer()
    tensor = torch.arange(6.0).view(2, 3)
    copy = first.add(tensor)
    assert torch.equal(copy, tensor)
    assert copy.untyped_storage().data_ptr() == first.data.untyped_storage().data_ptr()
    assert (first.is_in_use(), first.numel_in_use(), first.get_data().tolist()) == (True, 6, tensor.flatten().tolist())
    with pytest.raises(AssertionError, match="2 elements left, not 3"):
        first.add(torch.zeros(3))
    with pytest.raises(AssertionError, match=r"has torch\.float32"):
        first.add(torch.zeros(1, dtype=torch.float64))
    assert ring.get_next_buffer() is not first
    with pytest.raises(AssertionError, match="already in use"):
        ring.get_next_buffer()
    first.reset()
    with caplog.at_level("INFO"):
        first.print_average_usage()
    assert "75.00 %" in caplog.text
    with pytest.raises(AssertionError, match="already allocated"):
        memory.allocate_mem_buff("ring 0", 1, torch.float32, track_usage=False)
    assert memory.get_mem_buff("ring 0") is first
