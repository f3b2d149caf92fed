"""The contributed FusedAdam, FusedSGD and FusedLAMB, against their formulas in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apex
from apex.contrib.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex.ops import implementation
from tests.optimizers.helpers import (
    Reference,
    check_resume,
    check_training,
    exact_copy,
    parameters,
    relative_error,
    same_copy,
    set_gradients,
)
from tests.support.harness import Route, assert_equal_bits, routes


class EarlyAdam(Reference):
    """Adam's first form, with eps beside or under the root and gradients clipped by group."""

    def __init__(self, params: Any, inside: bool = False, **defaults: Any) -> None:
        self.inside = inside
        options = {"bias_correction": True, "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.0}
        super().__init__(params, **{**options, **defaults})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            limit = group["max_grad_norm"]
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            norm = sum(g.square().sum().item() for g in gradients) ** 0.5
            if limit and (norm + 1e-6) / limit > 1:
                for g in gradients:
                    g.div_((norm + 1e-6) / limit)
        super().step()

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state["count"] = state.get("count", 0) + 1  # of this parameter, not of its group
        m = state["m"] = beta1 * state.get("m", torch.zeros_like(p)) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", torch.zeros_like(p)) + (1 - beta2) * g * g
        size = group["lr"]
        if group["bias_correction"]:
            size *= (1 - beta2 ** state["count"]) ** 0.5 / (1 - beta1 ** state["count"])
        deviation = (v + group["eps"]).sqrt() if self.inside else v.sqrt() + group["eps"]
        p.sub_(size * (m / deviation + group["weight_decay"] * p))


ADAM = {"lr": 0.01, "betas": (0.9, 0.99)}


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    ("inside", "options"),
    [
        (False, {}),
        (True, {"eps": 1e-4, "weight_decay": 0.1}),
        (False, {"bias_correction": False, "weight_decay": 0.1}),
        (False, {"max_grad_norm": 0.7}),
        (False, {"max_grad_norm": 1e4}),
        (False, {"max_grad_norm": None}),
    ],
)
def test_adam_alone(inside: bool, options: dict[str, Any], route: Route) -> None:
    """Without anything given to `step` it takes the parameters' own gradients; some appear and vanish."""
    check_training(
        lambda params: FusedAdam(params, **ADAM, **options, eps_inside_sqrt=inside, use_mt=inside),
        lambda params: EarlyAdam(params, inside, **ADAM, **options),
        route,
        groups=({}, {"lr": 0.03}),
        absent=lambda step: [1] if step % 3 == 1 else [],
    )


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "dampening": 0.2}, {"nesterov": True}])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_alone(momentum: float, options: dict[str, Any], route: Route) -> None:
    if options.get("nesterov") and not momentum:
        pytest.skip("Nesterov's momentum needs one")
    check_training(
        lambda params: FusedSGD(params, lr=0.1, momentum=momentum, **options),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=momentum, **options),
        route,
        groups=({}, {"lr": 0.03}),
        absent=lambda step: [1] if step < 3 else [],
    )


class DecayAfterMomentum(Reference):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state["m"] = 0.9 * state["m"] + g if "m" in state else g.clone()
        p.sub_(group["lr"] * (m + 0.1 * p))


@pytest.mark.parametrize("route", routes())
def test_sgd_with_decay_after_the_momentum(route: Route) -> None:
    check_training(
        lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True),
        lambda params: DecayAfterMomentum(params, lr=0.1),
        route,
    )


def given(params: list[nn.Parameter], step: int, dtype: torch.dtype, scale: float) -> tuple[list[Tensor], list[Tensor]]:
    """Scaled half-precision gradients of this step, and the same in float64, unscaled."""
    generator = torch.Generator().manual_seed(step)
    gradients = [(torch.randn(p.shape, generator=generator) * scale).to(dtype) for p in params]
    return [g.to(params[0].device) for g in gradients], [g.double() / scale for g in gradients]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("make", "make_exact"),
    [
        (lambda p: FusedAdam(p, **ADAM, weight_decay=0.1), lambda p: EarlyAdam(p, **ADAM, weight_decay=0.1)),
        (lambda p: FusedAdam(p, **ADAM, max_grad_norm=0.5), lambda p: EarlyAdam(p, **ADAM, max_grad_norm=0.5)),
        (lambda p: FusedSGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    ],
)
def test_gradients_and_copies_are_given(make, make_exact, dtype: torch.dtype, route: Route) -> None:
    masters = parameters(route.device)
    exact = exact_copy(masters)
    outputs = [torch.zeros_like(p, dtype=dtype) for p in masters]
    scale = 8.0
    with implementation(route.implementation):
        optimizer, reference = make(masters), make_exact(exact)
        for step in range(10):
            gradients, unscaled = given(masters, step, dtype, scale)
            kept = [g.clone() for g in gradients]
            norms = None
            if step % 2:
                norms = [torch.cat([g.float().reshape(-1) for g in gradients]).norm().reshape(1)]
            optimizer.step(grads=gradients, output_params=outputs, scale=scale, grad_norms=norms)
            assert_equal_bits(gradients, kept)
            for p, g in zip(exact, unscaled, strict=True):
                p.grad = g.clone()
            reference.step()
    assert relative_error(masters, exact) <= 1e-6
    for output, master in zip(outputs, masters, strict=True):
        torch.testing.assert_close(output, master.detach().to(dtype))


@pytest.mark.parametrize("make", [FusedAdam, FusedSGD])
def test_lists_may_be_given_in_several_forms(make) -> None:
    """A list or a generator for one group, a list per group, None where there is no gradient."""
    start = parameters(shapes=((9, 8), (5,), (0,), (1,)))
    gradients = [torch.randn_like(p) for p in start]
    results = []
    for form in (gradients, (g for g in gradients), [gradients], [(g for g in gradients)], tuple(gradients)):
        params = same_copy(start)
        make(params, lr=0.1).step(grads=form, scale=torch.tensor(2.0))
        results.append([p.detach() for p in params])
    for result in results[1:]:
        assert_equal_bits(results[0], result)
    params = same_copy(start)
    optimizer = make([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    optimizer.step(grads=[gradients[:2], [None, gradients[3]]], scale=2.0)
    assert_equal_bits(params, [*results[0][:2], start[2].detach(), results[0][3]])
    assert params[2] not in optimizer.state
    optimizer.step(grads=[None, None])  # and none of their own either
    assert_equal_bits(params, [*results[0][:2], start[2].detach(), results[0][3]])


@pytest.mark.parametrize("make", [FusedAdam, FusedSGD])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"grads": [torch.ones(2)]}, ValueError, r"grads has lists of \[1\] tensors, the parameter groups \[2\]"),
        ({"grads": [[torch.ones(2)], [torch.ones(2)]]}, ValueError, "grads has lists"),
        ({"grads": [torch.ones(2), torch.ones(4)]}, ValueError, r"grads\[1\] has 4 elements, params\[1\] has 3"),
        (
            {"grads": [torch.ones(2), torch.ones(3)], "output_params": [torch.ones(2), torch.ones(3).long()]},
            TypeError,
            r"output_params\[1\] is torch.int64",
        ),
        ({"grads": [torch.ones(2), torch.ones(3).to_sparse()]}, RuntimeError, "sparse"),
    ],
)
def test_refusals_change_nothing(make, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = make(params, lr=0.1)
    with pytest.raises(error, match=message):
        optimizer.step(**arguments)
    assert all((p == 1).all() for p in params)
    assert not optimizer.state


def test_constructors_refuse() -> None:
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedAdam(params, amsgrad=True)
    with pytest.raises(ValueError, match="lr=-1"):
        FusedAdam(params, lr=-1)
    with pytest.raises(ValueError, match=r"betas\[1\]=1.0"):
        FusedAdam(params, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="nesterov needs"):
        FusedSGD(params, lr=0.1, nesterov=True)
    with pytest.raises(ValueError, match="required optimization parameter"):
        FusedSGD(params)
    assert FusedSGD([{"params": params, "lr": 0.1}]).param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
        lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
        lambda params: FusedLAMB(params, lr=0.01),
    ],
)
def test_resuming_is_exact(make, dtype: torch.dtype) -> None:
    check_resume(make, Route("cpu", "torch"), dtype=dtype)


def test_state_is_laid_out_as_upstreams() -> None:
    params = parameters()
    optimizer = FusedAdam(params)
    set_gradients(params, 0)
    optimizer.step()
    optimizer.step()
    assert all(set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} for p in params)
    assert {optimizer.state[p]["step"] for p in params} == {2}
    assert (FusedAdam(params, eps_inside_sqrt=True).eps_mode, optimizer.eps_mode) == (0, 1)
    sgd = FusedSGD(params, lr=0.1, momentum=0.9)
    buffers, first = sgd.get_momentums(params)
    assert first
    assert not any(buffer.any() for buffer in buffers)
    assert sgd.get_momentums(params) == (buffers, False)


def test_amp_hands_adam_its_arguments() -> None:
    class Stash:
        grads, output_params, scale, grad_norms = [torch.full((3,), 8.0)], [torch.zeros(3)], 2.0, None

    (p,), (q,) = ([nn.Parameter(torch.ones(3))] for _ in range(2))
    optimizer = FusedAdam([p], lr=0.1, amp_scale_adjustment=2.0)
    optimizer._amp_stash = Stash()
    optimizer.step()
    FusedAdam([q], lr=0.1).step(grads=[torch.full((3,), 2.0)])
    assert_equal_bits([p, Stash.output_params[0]], [q, q])
    sgd = FusedSGD([p], lr=0.1)
    sgd._amp_stash = Stash()
    with pytest.raises(RuntimeError, match="not for amp"):
        sgd.step()


@pytest.mark.parametrize("make", [FusedAdam, FusedSGD, FusedLAMB])
def test_closures_hooks_and_schedules(make) -> None:
    (p,) = params = [nn.Parameter(torch.ones(3))]
    optimizer = make(params, lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert seen == ["before", "after"]


def test_lamb_is_the_other_one_without_nvlamb() -> None:
    assert issubclass(FusedLAMB, apex.optimizers.FusedLAMB)
    start = parameters()
    results = []
    for make in (FusedLAMB, apex.optimizers.FusedLAMB):
        params = same_copy(start)
        optimizer = make(params, lr=0.01, weight_decay=0.1, max_grad_norm=0.5)
        for step in range(3):
            set_gradients(params, step)
            optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in params)
        results.append(params)
    assert_equal_bits(*results)
    assert optimizer.use_nvlamb is False
    import fused_lamb_cuda

    assert FusedLAMB(params).multi_tensor_lamb is fused_lamb_cuda.lamb


def test_found_after_a_bare_import() -> None:
    assert apex.contrib.optimizers.FusedAdam is FusedAdam
    from apex.contrib.optimizers.fused_adam import FusedAdam as same

    assert same is FusedAdam
