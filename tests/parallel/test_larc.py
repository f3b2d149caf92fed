"""LARC around any optimizer, against its formula in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn

import apex
import apex.parallel
from apex.ops import implementation
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel import LARC
from tests.optimizers.helpers import exact_copy, in_groups, parameters, relative_error, set_gradients
from tests.support.harness import Route, assert_equal_bits, routes


class ExactLARC:
    """The formula, one parameter after the other."""

    def __init__(self, optimizer: torch.optim.Optimizer, trust: float, clip: bool, eps: float) -> None:
        self.optimizer, self.trust, self.clip, self.eps = optimizer, trust, clip, eps

    @torch.no_grad()
    def step(self) -> None:
        decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = 0
            for p in group["params"]:
                if p.grad is None:
                    continue
                length, slope = p.norm().item(), p.grad.norm().item()
                if length and slope:
                    rate = self.trust * length / (slope + length * decay + self.eps)
                    rate = min(rate / group["lr"], 1.0) if self.clip else rate
                    p.grad.add_(p, alpha=decay).mul_(rate)
        self.optimizer.step()
        for group, decay in zip(self.optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay


SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}
ADAM = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.05}


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(
    ("make", "make_exact", "options"),
    [
        (torch.optim.SGD, torch.optim.SGD, SGD),
        (FusedSGD, torch.optim.SGD, SGD),
        (FusedAdam, torch.optim.AdamW, ADAM),
        (torch.optim.Adam, torch.optim.Adam, ADAM),
    ],
)
def test_against_the_formula(make, make_exact, options: dict, clip: bool, route: Route) -> None:
    params = parameters(route.device)
    nn.init.zeros_(params[1])  # a parameter without length, at first
    exact = exact_copy(params)
    groups = ({}, {"lr": 0.02, "weight_decay": 0.0})
    with implementation(route.implementation):
        larc = LARC(make(in_groups(params, *groups), **options), trust_coefficient=0.02, clip=clip, eps=1e-8)
        reference = ExactLARC(make_exact(in_groups(exact, *groups), **options), 0.02, clip, 1e-8)
        for step in range(5 if route == Route("cpu", "triton") else 20):
            for each, tensors in ((larc, params), (reference, exact)):
                set_gradients(tensors, step, absent=[3] if step == 2 else [])
                each.step()
            assert [group["weight_decay"] for group in larc.param_groups] == [0.05, 0.0]
    assert relative_error(params, exact) <= 1e-6


@pytest.mark.parametrize("route", routes())
def test_gradients_without_length_are_left_alone(route: Route) -> None:
    params = parameters(route.device)
    with implementation(route.implementation):
        larc = LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.1))
        for p in params:
            p.grad = torch.zeros_like(p)
        before = [p.detach().clone() for p in params]
        larc.step()
    assert_equal_bits(params, before)
    assert not any(p.grad.any() for p in params)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    exact = exact_copy(params)
    for tensors in (params, exact):
        set_gradients(tensors, 0, rounded_to=dtype)
    LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.1)).step()
    ExactLARC(torch.optim.SGD(exact, lr=0.1, weight_decay=0.1), 0.02, True, 1e-8).step()
    assert relative_error(params, exact) <= 1e-2


def test_it_passes_for_the_optimizer() -> None:
    params = parameters()
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)
    larc = LARC(optimizer=optimizer, clip=False, eps=1e-6, trust_coefficient=0.01)
    assert larc.optim is optimizer
    assert larc.state is optimizer.state
    assert larc.param_groups is optimizer.param_groups
    assert larc.defaults is optimizer.defaults
    assert repr(larc) == repr(optimizer)
    larc.param_groups = optimizer.param_groups[:]
    assert larc.param_groups is optimizer.param_groups
    set_gradients(params, 0)
    larc.step()
    saved = larc.state_dict()
    assert saved["param_groups"][0]["weight_decay"] == 0.1
    twin_params = [nn.Parameter(p.detach().clone()) for p in params]
    twin = LARC(FusedSGD(twin_params, lr=0.5, momentum=0.9), clip=False, eps=1e-6, trust_coefficient=0.01)
    twin.load_state_dict(saved)
    for each, tensors in ((larc, params), (twin, twin_params)):
        set_gradients(tensors, 1)
        each.step()
    assert_equal_bits(params, twin_params)
    larc.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 2


def test_zero_grad_takes_the_optimizers_arguments() -> None:
    params = parameters()
    larc = LARC(torch.optim.SGD(params, lr=0.1))
    set_gradients(params, 0)
    larc.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    larc.zero_grad()
    assert all(p.grad is None for p in params)


def test_closures() -> None:
    (p,) = params = [nn.Parameter(torch.ones(3))]
    larc = LARC(torch.optim.SGD(params, lr=0.1))

    def closure() -> Tensor:
        larc.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert larc.step(closure).item() == 3
    assert (p < 1).all()


def test_decay_comes_back_when_the_step_fails() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            assert [group["weight_decay"] for group in self.param_groups] == [0]
            raise RuntimeError("no step")

    params = parameters()
    larc = LARC(Failing(params, lr=0.1, weight_decay=0.3))
    set_gradients(params, 0)
    with pytest.raises(RuntimeError, match="no step"):
        larc.step()
    assert larc.param_groups[0]["weight_decay"] == 0.3


def test_optimizers_without_decay_get_none() -> None:
    params = parameters()
    larc = LARC(torch.optim.Rprop(params, lr=0.1))
    larc.param_groups[0].pop("weight_decay", None)
    set_gradients(params, 0)
    larc.step()
    assert "weight_decay" not in larc.param_groups[0]


def test_sparse_gradients_are_refused_before_anything_changes() -> None:
    dense, sparse = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    larc = LARC(torch.optim.SGD([{"params": [dense]}, {"params": [sparse]}], lr=0.1))
    dense.grad, sparse.grad = torch.ones(3), torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match=r"gradients\[0\] is sparse"):
        larc.step()
    assert (dense.grad == 1).all()


def test_maximize_with_decay_is_refused_before_anything_changes() -> None:
    param = nn.Parameter(torch.ones(3))
    larc = LARC(torch.optim.SGD([param], lr=0.1, weight_decay=0.5, maximize=True))
    param.grad = torch.full((3,), 2.0)
    with pytest.raises(ValueError, match="maximize=True"):
        larc.step()
    assert param.tolist() == [1] * 3
    assert param.grad.tolist() == [2] * 3
    larc.param_groups[0]["weight_decay"] = 0
    larc.step()
    assert (param > 1).all()


def test_bad_arguments() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    with pytest.raises(TypeError, match="must be an optimizer, got generator"):
        LARC(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"trust_coefficient=-0\.1 must be at least 0"):
        LARC(optimizer, trust_coefficient=-0.1)
    with pytest.raises(ValueError, match="eps=nan"):
        LARC(optimizer, eps=float("nan"))


def test_copies() -> None:
    params = parameters()
    larc = copy.deepcopy(LARC(torch.optim.SGD(params, lr=0.1), clip=False))
    assert larc.clip is False
    assert larc.param_groups[0]["params"][0] is not params[0]


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    params = parameters("cuda")
    larc = LARC(FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1))
    for step in range(2):
        set_gradients(params, step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            larc.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_import_paths() -> None:
    from apex.parallel.LARC import LARC as same

    assert same is LARC
    assert apex.parallel.LARC is LARC
    assert apex.parallel.LARC.LARC is LARC
    import apex.parallel.LARC as module

    assert module.LARC is LARC


def test_names_that_nobody_has_are_attribute_errors() -> None:
    assert not hasattr(apex.parallel, "no_such_thing")
