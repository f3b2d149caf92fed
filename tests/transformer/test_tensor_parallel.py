"""Split layers, losses and random numbers in two and four processes, and helpers that need no processes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from apex.transformer.tensor_parallel import (
    RingMemBuffer,
    VocabUtility,
    cross_entropy,
    memory,
    random,
    split_tensor_along_last_dim,
    vocab_parallel_cross_entropy,
)
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


def test_one_class_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "get_tensor_model_parallel_world_size", lambda: 1)
    loss = vocab_parallel_cross_entropy(torch.randn(3, 1), torch.zeros(3, dtype=torch.int64), label_smoothing=0.1)
    torch.testing.assert_close(loss, torch.zeros(3))


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
    assert not memory.MemoryBuffer("own", 6, torch.float32, False).add(tensor.requires_grad_()).requires_grad
    assert copy.untyped_storage().data_ptr() == first.data.untyped_storage().data_ptr()
    assert (first.is_in_use(), first.numel_in_use(), first.get_data().tolist()) == (
        True,
        6,
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
    )
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
    with pytest.raises(KeyError, match="name='circle': no memory buffer is called so; there are ring 0, ring 1"):
        memory.get_mem_buff("circle")


def test_refused_memory_buffers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_buffers", {})
    ring = RingMemBuffer("ring", 2, 8, torch.float32, track_usage=False)
    for _ in range(2):
        ring.get_next_buffer().add(torch.zeros(1))
    ring.buffers[1].reset()
    for _ in range(2):
        with pytest.raises(AssertionError, match="already in use"):
            ring.get_next_buffer()
    memory.allocate_mem_buff("other 1", 8, torch.float32, track_usage=False)
    with pytest.raises(AssertionError, match="other 1 already allocated"):
        RingMemBuffer("other", 2, 8, torch.float32, track_usage=False)
    assert list(memory._buffers) == ["ring 0", "ring 1", "other 1"]


def test_refused_seeds_change_no_random_numbers() -> None:
    tracker = random.CudaRNGStatesTracker()
    tracker.add("one", 1)
    before, states = torch.get_rng_state(), dict(tracker.states_)
    for name, seed, error in (("two", 2**80, ValueError), ("two", "text", TypeError), (None, 3, TypeError)):
        with pytest.raises(error, match=r"name|seed"):
            tracker.add(name, seed)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="states must be"):
        tracker.set_states("text")  # type: ignore[arg-type]
    assert (tracker.seeds_, tracker.states_) == ({1}, states)
    tracker.add("two", 2)
    random.get_cuda_rng_tracker().add("kept", 5)
    try:
        for seed in (7, 2**80):  # there are no groups, and no such seed
            with pytest.raises((AssertionError, ValueError)):
                random.model_parallel_cuda_manual_seed(seed)
        assert list(random.get_cuda_rng_tracker().states_) == ["kept"]
    finally:
        random.get_cuda_rng_tracker().reset()
    assert torch.equal(torch.get_rng_state(), before)


def test_checkpoints_without_gradients_are_reported() -> None:
    """Parameters get no gradients if no argument requires one, or if outputs are hidden in a list."""
    layer, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    with pytest.warns(UserWarning, match="no argument of a checkpointed function requires a gradient") as caught:
        assert not random.checkpoint(layer, False, x).requires_grad
    assert caught[0].filename == __file__
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        random.checkpoint(layer, False, x)
    x.requires_grad_()
    for function in (lambda x: [layer(x)], lambda x: {"hidden": layer(x)}, lambda x: (layer(x), [x])):
        with pytest.raises(TypeError, match=r"must return a tensor or a tuple of tensors; tensors in a (list|dict)"):
            random.checkpoint(function, False, x)
    output, number = random.checkpoint(lambda x: (layer(x), 3), False, x)
    output.sum().backward()
    assert number == 3
    assert layer.weight.grad is not None
