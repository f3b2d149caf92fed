"""DistributedFusedLAMB in one, two and four processes."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from apex._distributed.groups import timeout_of
from apex.contrib.optimizers._zero.groups import processes_that_divide
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from tests.contrib import lamb_checks, lamb_four_checks, lamb_resharding
from tests.contrib.lamb_problem import STEPS, assert_solved, averaged, backward, distributed_step, made, parameters
from tests.optimizers.references import Lamb
from tests.parallel.processes import run_checks
from tests.support.drawn import given, settings, st

PATIENCE = timedelta(seconds=41)
ALONE = (
    "default",
    "unclipped",
    "l2_regularization",
    "nvlamb_uncorrected",
    "full_ar",
    "clips_before",
    "clips_before_fused",
    "views",
    "skips_allgather",
    "e5m2",
    "mixed_dtypes",
    "overflow_before_clipping",
    "scaler_alone",
    "accumulation",
    "unused",
    "as_clients_do",
    "early_zero_grad",
    "closure_and_schedule",
    "norm",
    "saved",
    "saved_views",
)


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory, in_four: dict[str, str]) -> dict[str, str]:
    """After four, whose checkpoints they read."""
    return run_checks(lamb_checks.__name__, Path(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(lamb_four_checks.__name__, Path(tmp_path_factory.mktemp("four")), processes=4)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=PATIENCE)
    yield
    time.sleep(0.01)  # PyTorch 2.6 waits forever when a thread of the group still frees a tensor
    dist.destroy_process_group()


@pytest.mark.parametrize("name", lamb_checks.CHECKS)
def test_two_processes(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]


@pytest.mark.parametrize("name", lamb_four_checks.CHECKS)
def test_four_processes(name: str, in_four: dict[str, str]) -> None:
    assert not in_four[name], in_four[name]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop:FutureWarning")
def test_one_process(name: str) -> None:
    torch.manual_seed(0)
    lamb_checks.CHECKS[name](0)


@pytest.mark.usefixtures("process_group")
def test_one_process_after_two(
    in_two: dict[str, str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not in_two["resumes"]
    monkeypatch.chdir(tmp_path_factory.mktemp("one"))
    lamb_resharding.resumes("two", None, 3)(0)


def test_no_process_group() -> None:
    params = parameters()
    optimizer = made(params)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(params, averaged(step, params))
        optimizer.step()
    exact = lamb_checks.solved(lamb_checks.FusedLAMB, torch.float32, STEPS)
    for found, truth in zip(params, exact, strict=True):
        torch.testing.assert_close(found.detach(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("process_group")
def test_an_optimizer_that_is_replaced_is_let_go() -> None:
    """Its hooks do nothing as soon as another has its parameters, and nothing keeps it alive."""
    params = parameters()
    first = made(params)
    distributed_step(first, params, 0)
    before = first.state_dict()
    gone = weakref.ref(first)
    with torch.no_grad():
        for param, value in zip(params, parameters(), strict=True):
            param.copy_(value)
    second = made(params)
    for step in range(STEPS):
        distributed_step(second, params, step)
    assert_solved(params, STEPS)
    assert torch.equal(first.state_dict()["fp32_m"], before["fp32_m"])
    assert all(gradient is None for arena in first._gradients.arenas for gradient in arena.gradients)
    gc.collect()
    gc.disable()  # nothing refers to itself, so that memory is free at once
    try:
        del first
        assert gone() is None
        del second
    finally:
        gc.enable()
    assert not any(param._post_accumulate_grad_hooks for param in params)


@pytest.mark.usefixtures("process_group")
def test_groups_are_as_patient_as_the_world() -> None:
    optimizer = made(parameters())
    assert optimizer._groups.distributed is not dist.group.WORLD
    assert timeout_of(optimizer._groups.distributed) == timeout_of(dist.group.WORLD) == PATIENCE


@pytest.mark.usefixtures("process_group")
def test_a_group_that_comes_late() -> None:
    params = parameters()
    optimizer = DistributedFusedLAMB(params[:4], weight_decay=0.1, **lamb_checks.HYPER)
    optimizer.add_param_group({"params": params[4:], "weight_decay": 0.0})
    for step in range(STEPS):
        distributed_step(optimizer, params, step)
    assert_solved(params, STEPS)
    with pytest.raises(RuntimeError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.usefixtures("process_group")
def test_a_parameter_that_leaves_the_buffer_is_noticed() -> None:
    params = parameters()
    optimizer = made(params, set_param_views_to_flat_buffer=True)
    distributed_step(optimizer, params, 0)
    before = optimizer.state_dict()
    params[2].data = params[2].data.clone()
    backward(params, averaged(1, params))
    with pytest.raises(RuntimeError, match=r"\(3, 4, 2\) is no view"):
        optimizer.step()
    assert torch.equal(optimizer.state_dict()["fp32_p"], before["fp32_p"])


@pytest.mark.usefixtures("process_group")
def test_gradients_that_change_after_their_reduction_are_reduced_again() -> None:
    params = parameters()
    optimizer = made(params)
    for step in range(STEPS):
        optimizer.zero_grad()
        gradients = averaged(step, params)
        backward(params, [gradient * 0.25 for gradient in gradients])
        optimizer.complete_reductions()
        optimizer.set_is_accumulation_step(step % 2 == 0)
        backward(params, [gradient * 0.75 for gradient in gradients])
        optimizer.set_is_accumulation_step(False)
        optimizer.step()
    assert_solved(params, STEPS)


@pytest.mark.usefixtures("process_group")
def test_a_saved_state_is_a_copy() -> None:
    params = parameters()
    optimizer = made(params)
    distributed_step(optimizer, params, 0)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    distributed_step(optimizer, params, 1)
    assert torch.equal(saved["fp32_m"], before["fp32_m"])
    assert torch.equal(saved["step"], before["step"])
    assert not torch.equal(optimizer.state_dict()["fp32_m"], before["fp32_m"])


@pytest.mark.usefixtures("process_group")
def test_double_precision() -> None:
    params = parameters(torch.float64)
    optimizer = made(params, max_grad_norm=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for param, gradient in zip(params, averaged(step, params), strict=True):
            param.grad = gradient.double()
        optimizer.step()
    exact = lamb_checks.solved(Lamb, torch.float64, STEPS, max_grad_norm=0.0)
    for found, truth in zip(params, exact, strict=True):
        torch.testing.assert_close(found.detach(), truth, rtol=1e-7, atol=1e-7)


@pytest.mark.usefixtures("process_group")
def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="parameter 1 is torch"):
        made([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, dtype=torch.complex64))])._lazy_init_stage1()


@pytest.mark.usefixtures("process_group")
def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = DistributedFusedLAMB(embedding.parameters())
    with pytest.raises(RuntimeError, match="sparse"):
        embedding(torch.tensor([1, 2])).sum().backward()
    assert not optimizer.has_overflow


@settings(max_examples=100, deadline=None)
@given(world=st.integers(1, 64), on_machine=st.integers(0, 16))
def test_processes_of_a_machine_divide_the_state(world: int, on_machine: int) -> None:
    size = processes_that_divide(0, world, on_machine)
    assert world % size == 0
    assert size == (on_machine if on_machine > 1 and world % on_machine == 0 else world)
    for asked in range(1, world + 1):
        if world % asked:
            with pytest.raises(ValueError, match=f"dwu_group_size={asked}"):
                processes_that_divide(asked, world, on_machine)
        else:
            assert processes_that_divide(asked, world, on_machine) == asked
