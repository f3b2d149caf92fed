"""Parameters and gradients of Ascend's optimizers share memory with combined buffers; and when they do not."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.nn import Parameter

import apex.optimizers
from apex.contrib.combine_tensors import is_combined_tensor_valid
from apex.ops import implementation
from apex.optimizers import NpuFusedAdam, NpuFusedAdamW, NpuFusedSGD
from tests.optimizers import helpers
from tests.optimizers.helpers import exact_copy, parameters, relative_error, same_copy, set_gradients
from tests.support.harness import Route, routes

NAMES = [name for name in apex.optimizers.__all__ if name.startswith("Npu") or name == "Lamb"]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def make(name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    return getattr(apex.optimizers, name)(params, lr=0.01, **options)


def assert_shared(optimizer: Any) -> None:
    """Every parameter and gradient lies in one of the buffers, at a multiple of 16 bytes."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for buffers, tensors in (
        (optimizer.get_optimizer_combined_params(), params),
        (optimizer.get_optimizer_combined_grads(), [p.grad for p in params if p.grad is not None]),
    ):
        for tensor in tensors:
            assert tensor.data_ptr() % 16 == 0
            assert any(is_combined_tensor_valid(buffer, [tensor]) for buffer in buffers)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("name", NAMES)
def test_memory_is_shared_after_a_step(name: str, route: Route) -> None:
    params = parameters(route.device)
    optimizer = make(name, [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}])
    assert optimizer.is_npu_fused_optimizer
    for step in range(2):
        set_gradients(params, step)
        gradients = [p.grad.clone() for p in params]
        with implementation(route.implementation):
            optimizer.step()
        (combined,), (combined_grads,) = (
            optimizer.get_optimizer_combined_params(),
            optimizer.get_optimizer_combined_grads(),
        )
        assert_shared(optimizer)
        assert all(map(torch.equal, gradients, [p.grad for p in params]))
        torch.testing.assert_close(combined.norm(), torch.cat([p.detach().flatten() for p in params]).norm())
        torch.testing.assert_close(combined_grads.norm(), torch.cat([p.grad.flatten() for p in params]).norm())


@pytest.mark.parametrize("device", DEVICES)
def test_the_step_works_on_the_buffers(device: str) -> None:
    """What is done to a buffer before the step is what the step sees."""
    params, expected = parameters(device), parameters(device)
    optimizer, plain = NpuFusedSGD(params, 0.1), torch.optim.SGD(expected, 0.1)
    for step in range(3):
        for tensors in (params, expected):
            set_gradients(tensors, step)
        optimizer.get_optimizer_combined_grads()[0].mul_(0.5)
        optimizer.get_optimizer_combined_params()[0].mul_(0.9)
        for p in expected:
            p.grad.mul_(0.5)
            p.data.mul_(0.9)
        optimizer.step()
        plain.step()
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p, e)


@pytest.mark.parametrize("device", DEVICES)
def test_zero_grad_zeroes_the_buffer_and_keeps_sharing(device: str) -> None:
    params = parameters(device)
    optimizer = NpuFusedAdam(params)
    optimizer.zero_grad()  # nothing to zero yet
    for p in params:
        p.sum().backward()
    optimizer.zero_grad()  # before the first step: PyTorch's way
    assert not any(p.grad.any() for p in params)
    set_gradients(params, 0)
    optimizer.step()
    addresses = [p.grad.data_ptr() for p in params]
    buffer = optimizer.get_optimizer_combined_grads()[0]
    assert buffer.any()
    optimizer.zero_grad()
    assert not buffer.any()
    assert [p.grad.data_ptr() for p in params] == addresses
    sum(p.square().sum() for p in params).backward()
    assert [p.grad.data_ptr() for p in params] == addresses
    assert torch.equal(buffer[: params[0].numel()], 2 * params[0].detach().flatten())
    params[1].grad = torch.ones_like(params[1])
    optimizer.zero_grad()
    assert [p.grad.data_ptr() for p in params] == addresses
    assert not params[1].grad.any()
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
    assert not optimizer.get_optimizer_combined_grads()[0].any()
    assert_shared(optimizer)


def breakages() -> dict[str, Callable[[list[Parameter], int], None]]:
    def replace_gradients(params: list[Parameter], step: int) -> None:
        params[step % len(params)].grad = params[step % len(params)].grad.clone()

    def drop_gradients(params: list[Parameter], step: int) -> None:
        params[step % len(params)].grad = None

    def replace_parameters(params: list[Parameter], step: int) -> None:
        params[step % len(params)].data = params[step % len(params)].data.clone()

    def swap_parameters(params: list[Parameter], step: int) -> None:
        params[0].data, params[-1].data = params[-1].data, params[0].data

    def swap_gradients(params: list[Parameter], step: int) -> None:
        params[0].grad, params[-1].grad = params[-1].grad, params[0].grad

    def change_layout(params: list[Parameter], step: int) -> None:
        params[0].data = params[0].data.t().contiguous().t() if step % 2 else params[0].data.contiguous()

    def strided_gradient(params: list[Parameter], step: int) -> None:
        params[0].grad = params[0].grad.t().contiguous().t()

    def freeze(params: list[Parameter], step: int) -> None:
        params[1].requires_grad_(step % 2 == 0)

    return {name: function for name, function in locals().items() if callable(function)}


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("breakage", breakages().values(), ids=breakages())
def test_broken_sharing_changes_no_number(breakage: Callable[..., None], route: Route) -> None:
    params = parameters(route.device, shapes=(*helpers.SHAPES, (9, 8)))
    exact = exact_copy(params)
    reference = torch.optim.AdamW(exact, lr=0.01)
    with implementation(route.implementation):
        optimizer = NpuFusedAdamW(params, lr=0.01)
        for step in range(6):
            for each, tensors in ((optimizer, params), (reference, exact)):
                set_gradients(tensors, step)
                if each is optimizer:  # so that there is something to break
                    optimizer.get_optimizer_combined_grads()
                breakage(tensors, step)
                each.step()
            assert_shared(optimizer)
    assert relative_error(params, exact) <= helpers.LIMIT


@pytest.mark.parametrize("device", DEVICES)
def test_changes_of_dtype_are_followed_and_reported(device: str, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 2).to(device)
    optimizer = NpuFusedSGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(4, 3, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        model(x.to(dtype)).sum().backward()
        optimizer.step()
        (combined,) = optimizer.get_optimizer_combined_params()
        assert combined.dtype == dtype
        assert_shared(optimizer)
        optimizer.zero_grad()
    assert len([r for r in caplog.records if "outside of the combined buffer" in r.message]) == 1


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_groups_are_parts_of_the_buffer(route: Route) -> None:
    params = parameters(route.device)
    wide = [Parameter(p.detach().double()) for p in params] if route.implementation == "torch" else []
    optimizer = NpuFusedAdam([{"params": params[:1] + wide[:2]}], lr=0.01)
    set_gradients(params + wide, 0)
    with implementation(route.implementation):
        optimizer.step()
        optimizer.add_param_group({"params": params[1:] + wide[2:], "weight_decay": 0.1})
        set_gradients(params + wide, 1)
        optimizer.step()
    assert_shared(optimizer)
    buffers = optimizer.get_optimizer_combined_params()
    assert [buffer.dtype for buffer in buffers] == ([torch.float32, torch.float64] if wide else [torch.float32])
    for parts, name in (
        (optimizer.combined_params_indexed_by_group, "data"),
        (optimizer.combined_grads_indexed_by_group, "grad"),
    ):
        for part, group in zip(parts, optimizer.param_groups, strict=True):
            assert len(part) == len(buffers)
            for p in group["params"]:
                (index,) = [i for i, buffer in enumerate(buffers) if buffer.dtype == p.dtype]
                assert is_combined_tensor_valid(part[index], [getattr(p, name)])


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_added_later(device: str) -> None:
    params = parameters(device)
    exact = exact_copy(params)
    runs = []
    for kind, tensors in ((NpuFusedAdam, params), (torch.optim.Adam, exact)):
        optimizer = kind(tensors[:2], lr=0.01)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": tensors[2:], "lr": 0.1})
            set_gradients(tensors, step)
            optimizer.step()
        runs.append(optimizer)
    assert relative_error(params, exact) <= helpers.LIMIT
    assert_shared(runs[0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_that_is_none_leaves_zeros(device: str) -> None:
    params = parameters(device)
    optimizer = NpuFusedSGD(params, 0.1, weight_decay=0.1)
    before = params[0].detach().clone()
    set_gradients(params, 0, absent=(0,))
    optimizer.step()
    assert torch.equal(params[0], before)
    assert params[0].grad is None
    size = params[0].numel()
    assert not optimizer.get_optimizer_combined_grads()[0][:size].any()
    set_gradients(params, 1)
    optimizer.step()
    assert optimizer.get_optimizer_combined_grads()[0][:size].all()
    params[0].grad = None
    assert not optimizer.get_optimizer_combined_grads()[0][:size].any()
    before = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_that_share_memory_stay_tied(device: str) -> None:
    base = torch.randn(8, device=device)
    params = [Parameter(base[:5]), Parameter(base[3:]), Parameter(torch.randn(3, device=device))]
    optimizer = NpuFusedSGD(params, 0.1)
    expected = base.clone()
    set_gradients(params, 0)
    expected[:5] -= 0.1 * params[0].grad
    expected[3:] -= 0.1 * params[1].grad
    optimizer.step()
    torch.testing.assert_close(base, expected)
    assert optimizer.get_optimizer_combined_params()[0].numel() == 4
    optimizer.zero_grad()
    assert not any(p.grad.any() for p in params)
    # Tied after they were combined.
    params = [Parameter(torch.ones(4, device=device)) for _ in range(2)]
    optimizer = NpuFusedSGD(params, 0.1)
    set_gradients(params, 0)
    optimizer.step()
    params[1].data = params[0].data
    before = params[0].detach().clone()
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), before - 0.1 * (params[0].grad + params[1].grad))
    assert params[0].data_ptr() == params[1].data_ptr()


def test_frozen_parameters_take_no_memory() -> None:
    params = parameters()
    params[0].requires_grad_(False)
    optimizer = NpuFusedAdam(params)
    set_gradients(params, 0, absent=(0,))
    address = params[0].data_ptr()
    optimizer.step()
    assert params[0].data_ptr() == address
    assert optimizer.get_optimizer_combined_params()[0].numel() < 72
    params[0].requires_grad_()
    set_gradients(params, 1)
    optimizer.step()
    assert_shared(optimizer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("limit", [0.5, 1000.0])
def test_clipping_on_the_buffers(limit: float, norm_type: float, device: str) -> None:
    params, expected = parameters(device), parameters(device)
    optimizer = NpuFusedAdam(params)
    for tensors in (params, expected):
        set_gradients(tensors, 0)
    norm = optimizer.clip_optimizer_grad_norm_fused(limit, norm_type)
    wanted = torch.nn.utils.clip_grad_norm_([p for p in expected if p.numel()], limit, norm_type)
    torch.testing.assert_close(norm, wanted)
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.grad, e.grad)
    assert_shared(optimizer)
    assert NpuFusedAdam(parameters()).clip_optimizer_grad_norm_fused(1.0) == 0


def test_masks_are_one_where_gradients_are() -> None:
    params = parameters(shapes=((3,), (2, 3), (4,)))
    optimizer = NpuFusedAdam(params)
    set_gradients(params, 0)
    optimizer.step()
    (mask,), (combined,) = optimizer.get_optimizer_combined_grad_masks(), optimizer.get_optimizer_combined_grads()
    assert mask.sum() == 13
    assert torch.equal(combined * mask, combined)
    assert mask.tolist() == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]


def test_copies_and_pickles_have_buffers_of_their_own() -> None:
    params = parameters()
    optimizer = NpuFusedAdam(params, lr=0.01)
    set_gradients(params, 0)
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin_params = twin.param_groups[0]["params"]
        set_gradients(params, 1)
        set_gradients(twin_params, 1)
        before = same_copy(params)
        twin.step()
        assert all(map(torch.equal, params, before))
        assert_shared(twin)
        buffers = optimizer.get_optimizer_combined_params(), twin.get_optimizer_combined_params()
        assert buffers[0][0].data_ptr() != buffers[1][0].data_ptr()


def test_training_with_a_closure_and_hooks() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    losses = []
    for each, kind in ((model, NpuFusedAdamW), (twin, torch.optim.AdamW)):
        optimizer = kind(each.parameters(), lr=0.01)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)

        def closure(each: torch.nn.Module = each, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = (each(x) - y).square().mean()
            loss.backward()
            return loss

        losses.append([])
        for _ in range(10):
            losses[-1].append(optimizer.step(closure).item())
            scheduler.step()
        assert calls == ["before", "after"] * 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_compiled_training_step() -> None:
    ours, expected = parameters(), parameters()

    def run(params: list[Parameter], optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        sum((p.sin() * p).sum() for p in params).backward()
        optimizer.step()

    compiled = torch.compile(run, backend="eager")
    optimizer, plain = NpuFusedAdam(ours, lr=0.01), NpuFusedAdam(expected, lr=0.01)
    for _ in range(3):
        compiled(ours, optimizer)
        run(expected, plain)
    assert relative_error(ours, expected) <= helpers.LIMIT


def test_refusals_change_nothing() -> None:
    params = parameters()
    optimizer = NpuFusedAdam(params)
    set_gradients(params, 0)
    params[0].grad = params[0].grad.to_sparse()
    before = same_copy(params)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    assert optimizer.param_groups[0].get("step", 0) == 0


@pytest.mark.gpu
def test_memory_beyond_parameters_and_state() -> None:
    others = torch.cuda.memory_allocated()
    params = [Parameter(torch.zeros(1 << 20, device="cuda")) for _ in range(16)]
    set_gradients(params, 0)
    optimizer = NpuFusedSGD(params, 0.1, momentum=0.9)
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - others < 3 * 16 * (1 << 22) + (1 << 20)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_distributed_parameters_stay_where_they_are(tmp_path: Path) -> None:
    """Shards are updated, and count in the norm of all gradients, but do not move to the buffer."""
    if not distributed.is_available():
        pytest.skip("needs torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        values = torch.randn(4, 3)
        params = [Parameter(distribute_tensor(values.clone(), mesh, [Shard(0)])), Parameter(torch.ones(3))]
        expected = [Parameter(values.clone()), Parameter(torch.ones(3))]
        optimizer, plain = NpuFusedAdamW(params, lr=0.01), torch.optim.AdamW(expected, lr=0.01)
        for _ in range(3):
            for each, tensors in ((optimizer, params), (plain, expected)):
                each.zero_grad()
                for p in tensors:
                    p.square().sum().backward()
                each.step()
        torch.testing.assert_close(params[0].full_tensor(), expected[0])
        torch.testing.assert_close(params[1], expected[1])
        assert optimizer.get_optimizer_combined_params()[0].numel() == 4
        for each in (optimizer, make("NpuFusedBertAdam", params)):
            for p in params:
                p.grad = torch.full_like(p, 3.0)
            total = 3.0 * (12 + 3) ** 0.5
            torch.testing.assert_close(each.clip_optimizer_grad_norm_fused(1.0).item(), total)
            for p in params:
                found = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                torch.testing.assert_close(found, torch.full_like(found, 3.0 / total))
        torch.testing.assert_close(each.get_global_grad_norm(), torch.ones(1))
    finally:
        distributed.destroy_process_group()
