"""A split GPT block in two processes that share one GPU. NCCL refuses that, so Gloo exchanges through the host."""

from __future__ import annotations

from pathlib import Path

import torch

from apex.ops import _library
from apex.transformer import parallel_state, tensor_parallel
from tests.transformer import block
from tests.transformer.small_gpt import Run, parts, split, whole

# Relative to a tensor's largest number. Kernels and matrix products of other sizes add up in other orders.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.1}


def block_equals_one_process(rank: int) -> None:
    """Run the Triton kernels, even where PyTorch would be faster."""
    torch.cuda.set_device(0)
    with _library.implementation("triton"):
        for dtype, tolerance in TOLERANCES.items():
            alone = block.train_alone(dtype, "cuda")
            parallel_state.initialize_model_parallel(2)
            for sequence in (False, True):
                found = block.train(sequence, dtype, "cuda")
                block.assert_equals_alone(found, alone, tolerance)
            block.assert_bit_equal(found, block.train(sequence, dtype, "cuda"))
            parallel_state.destroy_model_parallel()


def batches_and_random_numbers(rank: int) -> None:
    parallel_state.initialize_model_parallel(2)
    tensor_parallel.model_parallel_cuda_manual_seed(3)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    shared = torch.rand(8, device="cuda")
    with tracker.fork():
        own = torch.rand(8, device="cuda")
    sent = tensor_parallel.broadcast_data(["x"], {"x": torch.full((3,), float(rank))}, torch.float32)["x"]
    assert sent.is_cuda
    assert sent.tolist() == [0.0] * 3
    for drawn, same in ((shared, True), (own, False)):
        everywhere = tensor_parallel.gather_from_tensor_model_parallel_region(drawn.view(1, -1)).view(2, -1)
        assert everywhere.is_cuda
        assert torch.equal(everywhere[0], everywhere[1]) == same
    parallel_state.destroy_model_parallel()


def checkpoints(rank: int) -> None:
    """Two halves of every layer become two stages, with the same bits."""
    torch.cuda.set_device(0)
    with split(2, 1):
        run = Run(2)
        for name in ("one", "two"):
            loss = run.train()
            run.save(Path(name))
    one, two = whole(Path("one")), whole(Path("two"))
    with split(1, 2):
        run = Run(2)
        run.load(Path("one"))
        for key, view, place in parts(run):
            assert torch.equal(view.cpu(), one[key][place]), key
        found = run.train()
        torch.distributed.all_reduce(found)
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
        for key, view, place in parts(run):
            torch.testing.assert_close(view.cpu(), two[key][place], rtol=1e-4, atol=1e-4, msg=key)


CHECKS = {check.__name__: check for check in (batches_and_random_numbers, block_equals_one_process, checkpoints)}
