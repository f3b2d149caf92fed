"""What may happen between two steps, and what a step may cost: of every optimizer that there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from apex import optimizers
from apex.ops import implementation
from apex.ops.newton_schulz import config
from tests.optimizers import helpers
from tests.optimizers.helpers import Factory, parameters, set_gradients
from tests.support.harness import Route, routes

LR = {"lr": 0.01}
OPTIONS: dict[str, dict[str, Any]] = {
    "FusedAdagrad": LR,
    "FusedAdam": LR,
    "FusedAdEMAMix": LR,
    "FusedLAMB": LR,
    "FusedLARS": {"lr": 0.1, "momentum": 0.9},
    "FusedLion": LR,
    "FusedMixedPrecisionLamb": {},
    "FusedMuon": {"lr": 0.1, "ns_dtype": torch.float64},
    "FusedNAdam": LR,
    "FusedNovoGrad": LR,
    "FusedRAdam": LR,
    "FusedSGD": {"lr": 0.1, "momentum": 0.9},
    "FusedScheduleFreeAdamW": LR,
    "Lamb": LR,
    "NpuFusedAdadelta": {},
    "NpuFusedAdam": LR,
    "NpuFusedAdamP": LR,
    "NpuFusedAdamW": LR,
    "NpuFusedBertAdam": {"lr": 0.01, "max_grad_norm": 1.0},
    "NpuFusedLamb": {"lr": 0.01, "use_global_grad_norm": True},
    "NpuFusedRMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "NpuFusedRMSpropTF": {"lr": 0.01, "momentum": 0.9},
    "NpuFusedSGD": {"lr": 0.1, "momentum": 0.9},
    "OffloadedOptimizer": {"lr": 0.01, "minimal_size": 0},
}
# On a combined buffer gradients have one memory order.
NOT_COMBINED = [name for name in OPTIONS if name.startswith(("Fused", "Offloaded"))]


def maker(name: str) -> Factory:
    return lambda params: getattr(optimizers, name)(params, **OPTIONS[name])


def test_no_optimizer_is_left_out() -> None:
    classes = {name: getattr(optimizers, name) for name in optimizers.__all__}
    assert set(OPTIONS) == {name for name, each in classes.items() if issubclass(each, torch.optim.Optimizer)}


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("name", NOT_COMBINED)
def test_gradients_replaced_by_others_at_their_addresses(name: str, route: Route) -> None:
    """Freed memory comes back as the gradients of the next step, which may lie in another order."""
    params = parameters(route.device, shapes=[(6, 4), (5,)])
    memory = [torch.zeros(p.numel(), device=route.device) for p in params]
    exact = helpers.exact_copy(params)
    reference = maker(name)(exact)
    optimizer = maker(name)(params)
    for step in range(4):
        set_gradients(exact, step)
        reference.step()
        ordered = memory[0].view(6, 4) if step % 2 else memory[0].view(4, 6).t()
        for param, view, true in zip(params, (ordered, memory[1]), exact, strict=True):
            param.grad = view
            view.copy_(true.grad)
        with implementation(route.implementation):
            optimizer.step()
    assert helpers.relative_error(params, exact) <= helpers.LIMIT


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("name", OPTIONS)
def test_state_and_parameters_that_a_user_replaces(name: str, route: Route) -> None:
    """They are followed, and what was replaced is left alone; but combined parameters go back to their buffer."""
    params = parameters(route.device, shapes=[(6, 4), (5,)])
    twins = helpers.same_copy(params)
    with implementation(route.implementation):
        optimizer, plain = maker(name)(params), maker(name)(twins)
        for step in range(3):
            if step == 2:
                old = _replace(optimizer, of_params=name in NOT_COMBINED)
                kept = [tensor.clone() for tensor in old]
            for each, tensors in ((optimizer, params), (plain, twins)):
                set_gradients(tensors, step)
                each.step()
    assert all(map(torch.equal, params, twins))
    assert all(map(torch.equal, helpers.state_tensors(optimizer), helpers.state_tensors(plain)))
    assert all(map(torch.equal, old, kept))


def _replace(optimizer: torch.optim.Optimizer, of_params: bool) -> list[Tensor]:
    """Gives everything new memory; returns the old tensors, those of parameters if asked for."""
    old = []
    for param, state in optimizer.state.items():
        old += [param.data] if of_params else []
        param.data = param.data.clone()
        for key, value in state.items():
            if isinstance(value, Tensor):
                old.append(value)
                state[key] = value.clone()
    return old


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_of_other_sizes_at_their_addresses(name: str, route: Route) -> None:
    """State that does not fit is not used, nor is memory touched beyond a parameter's, or its gradient's, end."""
    params = parameters(route.device, shapes=[(24,), (5,)])
    with implementation(route.implementation):
        optimizer = maker(name)(params)
        set_gradients(params, 0)
        optimizer.step()
        for size in (8, 100):
            params[0].grad = None
            whole = params[0].data
            params[0].data = whole[:size] if size < len(whole) else torch.ones(size, device=route.device)
            set_gradients(params, 1)
            before = whole.clone()
            with pytest.raises(
                RuntimeError, match=rf"state '\w+' of parameter 0 has shape \(24,\), the .* \({size},\)"
            ):
                optimizer.step()
            assert torch.equal(whole, before)
            params[0].data = whole


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("name", NOT_COMBINED)
def test_parameters_of_another_dtype_at_their_addresses(name: str, route: Route) -> None:
    """Memory that was freed comes back as anything, after `model.half()` and `model.bfloat16()` say."""
    params = parameters(route.device, torch.float16, shapes=[(24,), (5,)])
    twins = parameters(route.device, torch.bfloat16, shapes=[(24,), (5,)])
    with implementation(route.implementation):
        optimizer, plain = maker(name)(params), maker(name)(twins)
        set_gradients(params, 0)
        optimizer.step()
        for param, twin in zip(params, twins, strict=True):
            param.grad = None
            param.data = param.data.view(torch.bfloat16).copy_(twin.data)
        plain.load_state_dict(optimizer.state_dict())
        for each, tensors in ((optimizer, params), (plain, twins)):
            set_gradients(tensors, 1)
            each.step()
    assert all(map(torch.equal, params, twins))


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="gradients have the dtype of their parameters")
@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_gradients_of_two_dtypes(name: str, route: Route) -> None:
    params = parameters(route.device, torch.bfloat16, shapes=[(24,), (5,), (6, 4)])
    twins = helpers.same_copy(params)
    set_gradients(params, 0)
    set_gradients(twins, 0)
    values, params[1].grad = params[1].grad, None
    params[1].grad_dtype = torch.float32
    params[1].grad = values.float()
    with implementation(route.implementation):
        for tensors in (params, twins):
            maker(name)(tensors).step()
    assert all(map(torch.equal, params, twins))


def _refuse_bfloat16(gradients: list[Tensor], *_: Tensor) -> None:
    """Stand in for PyTorch's operator on a GPU, which takes no bfloat16."""
    assert all(gradient.dtype != torch.bfloat16 for gradient in gradients)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_are_unscaled_in_every_dtype(
    dtype: torch.dtype, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float64 and route.implementation == "triton":
        pytest.skip("kernels take no float64")
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", _refuse_bfloat16)
    params = parameters(route.device, dtype, shapes=[(24,), (5, 3), (0,)])
    optimizer: Any = optimizers.FusedAdam(params, lr=0.01)
    optimizer.grad_scale = torch.full((1,), 12.0, device=route.device)
    for overflows in (False, True):
        set_gradients(params, int(overflows))
        params[1].grad = params[1].grad.mT.contiguous().mT  # gradients need not be contiguous
        gradients = [param.grad.clone() for param in params]
        optimizer.found_inf = torch.full((1,), float(overflows), device=route.device)
        with implementation(route.implementation):
            optimizer.step()
        if not overflows:
            factor = torch.tensor(1 / 12, dtype=torch.float32).item()
            wide = [gradient.to(torch.promote_types(dtype, torch.float32)) for gradient in gradients]
            gradients = [(gradient * factor).to(dtype) for gradient in wide]
        torch.testing.assert_close([param.grad for param in params], gradients)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_gradient_from_before_a_change_of_shape(name: str) -> None:
    params = parameters(shapes=[(24,), (5,)])
    optimizer = maker(name)(params)
    set_gradients(params, 0)
    params[0].data = params[0].data[:8]
    with pytest.raises(RuntimeError, match=r"gradient of parameter 0 has shape \(24,\), the parameter \(8,\)"):
        optimizer.step()


@pytest.mark.parametrize("route", helpers.INTERPRETER)
@pytest.mark.parametrize("name", OPTIONS)
def test_only_what_moved_is_uploaded(name: str, route: Route) -> None:
    params = parameters(route.device)
    set_gradients(params, 0)
    with implementation(route.implementation):
        optimizer = maker(name)(params)
        optimizer.step()
        (bucket,) = optimizer._group_buckets[0].buckets
        table = bucket.lists.table
        fixed, moving = table.fixed, table.moving
        optimizer.step()
        assert table.fixed is fixed
        assert table.moving is moving
        for param in params:
            param.grad = param.grad.clone()
        optimizer.step()
    assert optimizer._group_buckets[0].buckets == [bucket], "made anew"
    assert table.fixed is fixed
    # Combined gradients are copied back to where they were.
    assert (table.moving is not moving) == (name in NOT_COMBINED)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_grad_scaler_does_not_wait_for_the_gpu(name: str) -> None:
    params = parameters("cuda")
    optimizer = maker(name)(params)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    for step in range(4):
        set_gradients(params, step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            scaler.step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.update()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_memory_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under 1 MiB beyond parameters, gradients and state; tables are made by the first step.

    Muon's iteration may take its stated workspace, here that of four matrices.
    """
    budget = 1 << 20
    if name == "FusedMuon":
        budget = 4 * 8 * config.peak_elements(1 << 10, 1 << 10)
        monkeypatch.setattr(config, "WORKSPACE", budget)
        budget = budget * 5 // 4 + (1 << 20)  # frames of callers may hold the normalised matrices
    params = [torch.nn.Parameter(torch.randn(1 << 10, 1 << 10, device="cuda")) for _ in range(16)]
    optimizer = maker(name)(params)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < budget
