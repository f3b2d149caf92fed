"""Closures given to `step`, and methods of an optimizer's own, under amp."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp
from apex.optimizers import FusedAdam
from tests.amp.common import assert_same, loss_of, overflow_at, quiet, small_model, train, values

LEVELS = ["O0", "O1", "O2", "O4", "O5"]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, as third parties write it: a step moves the weights, and needs gradients there."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None, "SAM needs a closure"
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            self.state[param]["old"] = param.clone()
            param.add_(param.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for param in params:
            param.copy_(self.state[param]["old"])
        self.base.step()
        return loss


def amp_lines(model: nn.Module, optimizer: Any, step: int, bad: tuple[int, ...] = ()) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, step, overflow_at(*bad)(step))
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    return loss


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, FusedAdam], ids=["SGD", "FusedAdam"])
def test_closures(level: str, kind: Any) -> None:
    """Check that amp's lines in a closure act as before a step, also after an overflow."""
    bad = (1,) if level in ("O1", "O2") else ()
    results = []
    for with_closure in (False, True):
        model = small_model()
        model, optimizer = quiet(model, kind(model.parameters(), lr=0.05), opt_level=level)
        if with_closure:
            for step in range(4):
                returned = optimizer.step(functools.partial(amp_lines, model, optimizer, step, bad))
                assert isinstance(returned, Tensor)
        else:
            train(model, optimizer, 4, overflow_at(*bad))
        results.append(values(amp.master_params(optimizer)))
        amp.shutdown()
    assert_same(*results)


def sam_step(model: nn.Module, optimizer: Any, step: int, bad_first: bool = False, bad_second: bool = False) -> Any:
    amp_lines(model, optimizer, step, (step,) if bad_first else ())
    return optimizer.step(functools.partial(amp_lines, model, optimizer, step, (step,) if bad_second else ()))


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_calls_its_closure_itself(level: str) -> None:
    """The closure sees the weights that the step has changed, the model's and the masters."""
    plain = small_model()
    reference = SAM(plain.parameters(), lr=0.05)
    model = small_model()
    model, optimizer = quiet(model, SAM(model.parameters(), lr=0.05), opt_level=level)
    for step in range(4):

        def lines(step: int = step) -> Tensor:
            reference.zero_grad()
            loss = loss_of(plain, step)
            loss.backward()
            return loss

        start = lines()
        expected = reference.step(lines)
        assert start < expected
        assert sam_step(model, optimizer, step).item() == pytest.approx(expected.item(), rel=0.03)
    tolerance = 0.0 if level == "O0" else 0.03
    for found, expected in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("where", ["first", "second"])
def test_an_overflow_in_either_closure_call_skips_the_step(level: str, where: str) -> None:
    model = small_model()
    model, optimizer = quiet(model, SAM(model.parameters(), lr=0.05), opt_level=level)
    sam_step(model, optimizer, 0)
    before = values([*model.parameters(), *amp.master_params(optimizer)])
    sam_step(model, optimizer, 1, **{f"bad_{where}": True})
    assert_same(before, [*model.parameters(), *amp.master_params(optimizer)])
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
    sam_step(model, optimizer, 2)
    assert not torch.equal(before[0], model[0].weight)
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("third_party", [False, True])
def test_lbfgs(level: str, third_party: bool) -> None:
    """Use masters and a dynamic scale too; an overflow in the first call leaves the weights unchanged."""
    kind = torch.optim.LBFGS
    if third_party:
        kind = type("LBFGS", (kind,), {"step": lambda self, closure: super(kind, self).step(closure)})
    model = small_model()
    model, optimizer = quiet(model, kind(model.parameters(), lr=0.1, max_iter=5), opt_level=level)
    calls, bad = [], level in ("O1", "O2")

    def closure(factor: float = 1.0) -> Tensor:
        calls.append(torch.is_autocast_enabled("cpu"))
        optimizer.zero_grad()
        loss = loss_of(model, 0, factor)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    if bad:
        before = values(model.parameters())
        assert optimizer.step(functools.partial(closure, torch.inf)) == torch.inf
        assert_same(before, model.parameters())
    first = optimizer.step(closure)
    assert len(calls) > 4
    assert set(calls) == {level in ("O1", "O4")}  # cast as outside of the step
    assert optimizer.step(closure) < first
    assert loss_of(model, 0) < first


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("bad", "clears"), [(0, "model"), (1, "optimizer"), (5, "model")])
def test_lbfgs_continues_after_an_overflow(level: str, bad: int, clears: str) -> None:
    """Check that an overflow in any call of the closure undoes the step, so that later steps are unaffected."""
    results = []
    for overflows in (True, False):
        factors = iter([1.0] * bad + [torch.inf] * overflows)
        model = small_model().eval()
        model, optimizer = quiet(
            model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), opt_level=level, dynamic_init_scale=256.0
        )

        def closure(model: nn.Module = model, optimizer: Any = optimizer, factors: Any = factors) -> Tensor:
            (model if clears == "model" else optimizer).zero_grad()
            loss = loss_of(model, 0, next(factors, 1.0))
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            return loss

        for _ in range(4 if overflows else 3):
            optimizer.step(closure)
        assert amp.state_dict()["loss_scaler0"]["loss_scale"] == (128.0 if overflows else 256.0)
        results.append(values(model.parameters()))
        amp.shutdown()
    for found, expected in zip(*results, strict=True):  # computed with another scale, in float16
        torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_optimizers_own_zero_grad(level: str) -> None:
    model = small_model()
    optimizer = SAM(model.parameters(), lr=0.05)
    model, optimizer = quiet(model, optimizer, opt_level=level)
    amp_lines(model, optimizer, 0)
    optimizer.zero_grad()
    assert optimizer.cleared == 2
    assert all(param.grad is None for param in (*model.parameters(), *amp.master_params(optimizer)))
    amp_lines(model, optimizer, 0)
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.cleared == 4
    assert all(not param.grad.any() for param in (*model.parameters(), *amp.master_params(optimizer)))
