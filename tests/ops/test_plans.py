"""Plans: kept under all that they depend on, forgotten when dispatch changes, and never a way round a check."""

import pytest
import torch

from apex.ops import _device, _library, _plans, batch_norm, group_norm, norm
from tests.harness import Route, assert_close, routes


def test_the_oldest_plans_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plans, "MOST", 2)
    monkeypatch.setattr(_plans, "_all", [])
    plans: _plans.Plans[str] = _plans.Plans()
    assert [plans.keep((key,), name) for key, name in enumerate("abc")] == ["a", "b", "c"]
    assert plans == {(2,): "c"}


def test_plans_are_forgotten_when_dispatch_or_device_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plans, "_all", [])
    plans: _plans.Plans[str] = _plans.Plans()
    for change in (_library.implementation("torch"), _device.pretend(_device.INTERPRETER)):
        plans.keep((), "before")
        with change:
            assert not plans
            plans.keep((), "inside")
        assert not plans


def _layer_norm(x, weight, bias):
    return norm.layer_norm(x, [x.shape[1]], weight, bias)


def _group_norm(x, weight, bias):
    return group_norm.group_norm(x, 2, weight, bias)


def _batch_norm(x, weight, bias):
    return batch_norm.batch_norm(x, None, None, weight, bias, relu=True)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("function", [_layer_norm, _group_norm, _batch_norm])
def test_what_does_not_fit_is_refused_and_what_is_strided_works_after_a_plan_was_kept(function, route: Route) -> None:
    x = torch.randn(6, 8, device=route.device, requires_grad=True)
    weight, bias = (torch.rand(8, device=route.device, requires_grad=True) for _ in range(2))
    strided = torch.empty(8, 2, device=route.device)[:, 0].copy_(weight.detach()).requires_grad_()
    with _library.implementation(route.implementation):
        output = function(x, weight, bias)
        gradients = torch.autograd.grad(output.square().sum(), (x, weight, bias))
        with pytest.raises(ValueError, match="weight has shape"):
            function(x, weight[:4], bias)
        with pytest.raises(TypeError, match="floating-point"):
            function(x, weight, bias.int())
        with pytest.raises(TypeError, match="floating-point"):
            function(x.int(), weight, bias)
        again = function(x, strided, bias)
        others = torch.autograd.grad(again.square().sum(), (x, strided, bias))
        with torch.no_grad():
            inferred = function(x, weight, bias)
    assert_close(again, output.double())
    assert_close(inferred, output.double())
    for one, other in zip(gradients, others, strict=True):
        assert_close(other, one.double(), reduction=8)
