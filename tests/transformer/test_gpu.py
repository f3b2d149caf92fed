"""apex.transformer on a GPU: two processes that share it, and one with NCCL."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex.optimizers import FusedAdam
from apex.transformer import finalize_model_grads, parallel_state, tensor_parallel
from apex.transformer.amp import GradScaler
from tests.parallel.processes import run_checks
from tests.transformer import block, gpu_checks
from tests.transformer.small_gpt import Run, parts

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(gpu_checks.__name__, Path(tmp_path_factory.mktemp("gpu")), on_gpu=True)


@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_two_processes_on_one_gpu(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]


@pytest.mark.usefixtures("alone")
def test_one_process_with_nccl() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sequence parallelism has no effect
        runs = [block.train(sequence, torch.float32, "cuda") for sequence in (False, True)]
    block.assert_bit_equal(*runs)
    assert all(loss.isfinite().all() for loss in runs[0].losses)
    sent = tensor_parallel.broadcast_data(["x"], {"x": torch.arange(3)}, torch.int64)["x"]
    assert sent.is_cuda
    assert sent.tolist() == [0, 1, 2]
    assert parallel_state.get_device_mesh().mesh.tolist() == [[[0]]]
    buffer = tensor_parallel.MemoryBuffer("gpu", 4, torch.float32, track_usage=False)
    assert buffer.add(torch.ones(2, 2, device="cuda")).is_cuda


@pytest.mark.usefixtures("alone")
def test_random_streams_and_checkpoints() -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    with tracker.fork():
        first = torch.rand(4, device="cuda")
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(4, device="cuda"), first)

    def layer(x: Tensor) -> Tensor:
        with tracker.fork():
            x = F.dropout(x, 0.5)
        return F.dropout(x, 0.3).square()

    results = []
    for recompute in (False, True):
        tensor_parallel.model_parallel_cuda_manual_seed(11)
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        output = tensor_parallel.checkpoint(layer, True, x) if recompute else layer(x)
        output.sum().backward()
        results.append([output, x.grad, torch.rand(4, device="cuda")])
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("alone")
def test_the_scaler_does_not_wait_for_the_device() -> None:
    parameter = nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = FusedAdam([parameter], lr=0.5)
    scaler = GradScaler(init_scale=8.0)
    changed: list[bool] = []
    for factor in (1.0, 1.0, float("inf"), 1.0):
        before = parameter.detach().clone()
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * factor).backward()
        finalize_model_grads(nn.ParameterList([parameter]))
        # Lists of pointers are made at the first step; from then on nothing may wait.
        torch.cuda.set_sync_debug_mode("error" if changed else "default")
        try:
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        changed.append(not torch.equal(before, parameter))
    assert changed == [True, True, False, True]
    assert scaler.get_scale() == 4.0


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_in_place(dtype: torch.dtype) -> None:
    """The fused product adds to float32 sums and allocates no gradient of the weight's size."""
    layer: Any = tensor_parallel.ColumnParallelLinear(
        256, 512, gather_output=False, params_dtype=dtype, gradient_accumulation_fusion=True
    )
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    x = torch.randn(8, 4, 256, device="cuda", dtype=dtype)
    for _ in range(3):
        layer(x)[0].sum().backward()
    assert layer.weight.grad is None
    expected = 3 * x.double().sum((0, 1)).expand(512, 256)
    torch.testing.assert_close(layer.weight.main_grad.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("capturable", [False, True])
def test_a_loaded_checkpoint_continues_bitwise(capturable: bool, tmp_path: Path) -> None:
    """Random numbers of the device and its streams, and step counts on the device, are restored."""
    run = Run(2, training=True, capturable=capturable)
    run.train()
    run.save(tmp_path / "saved")
    expected = run.train()
    torch.cuda.manual_seed(11)
    other = Run(2, training=True, capturable=capturable)
    other.load(tmp_path / "saved")
    assert torch.equal(other.train(), expected)
    for (key, view, _), (_, same, _) in zip(parts(run), parts(other), strict=True):
        assert torch.equal(view, same), key
