"""Colossal-AI's optimizers against PyTorch's or their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from apex.nn.optimizer import CPUAdam, FusedAdam, HybridAdam, Lamb, Lars


def problem() -> tuple[torch.nn.Parameter, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    return torch.nn.Parameter(start), [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(4)]


def trained(kind: Any, *args: Any, factor: float = 1.0, step: dict[str, Any] | None = None, **options: Any) -> Tensor:
    param, gradients = problem()
    optimizer = kind([param], *args, **options)
    for gradient in gradients:
        param.grad = gradient * factor
        optimizer.step(**(step or {}))
    return param.detach()


@pytest.mark.parametrize("kind", [HybridAdam, CPUAdam, FusedAdam])
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_adam_is_torchs(kind: Any, adamw_mode: bool) -> None:
    peer = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    expected = trained(peer, lr=0.1, weight_decay=0.2)
    found = trained(kind, lr=0.1, weight_decay=0.2, adamw_mode=adamw_mode)
    torch.testing.assert_close(found, expected)


def test_positional_arguments_have_the_originals_order() -> None:
    expected = trained(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.2)
    torch.testing.assert_close(trained(HybridAdam, 0.1, True, (0.8, 0.9), 1e-4, 0.2, True), expected)
    torch.testing.assert_close(trained(FusedAdam, 0.1, True, (0.8, 0.9), 1e-4, True, 0.2), expected)


def test_div_scale_divides_gradients() -> None:
    options = {"lr": 0.1, "eps": 0.1}  # a large eps: the step then depends on the size of gradients
    expected = trained(HybridAdam, **options)
    torch.testing.assert_close(trained(HybridAdam, factor=8.0, step={"div_scale": 8.0}, **options), expected)
    assert not torch.allclose(trained(HybridAdam, factor=8.0, **options), expected)


def test_div_scale_divides_the_gradients_of_a_closure() -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for param, div_scale, factor in zip(params, (8.0, -1), (8.0, 1.0), strict=True):
        optimizer = FusedAdam([param], lr=0.1, eps=1.0)  # with a large eps the step depends on the gradient's size

        def closure(param: Tensor = param, optimizer: Any = optimizer, factor: float = factor) -> Tensor:
            optimizer.zero_grad()
            loss = factor * param.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure, div_scale=div_scale) == 3 * factor
    torch.testing.assert_close(*params)


@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_sparse_gradients_are_refused_before_anything_changes(kind: Any) -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    params[0].grad, params[1].grad = torch.ones(2), torch.ones(2).to_sparse()
    optimizer = kind(params)
    with pytest.raises(RuntimeError, match=f"{kind.__name__} takes no sparse gradients"):
        optimizer.step()
    assert not optimizer.state
    assert torch.equal(params[0], torch.ones(2))


def test_options_without_effect_are_named() -> None:
    param, _ = problem()
    with pytest.warns(UserWarning, match=r"HybridAdam ignores clipping_norm=1.0, initial_scale=32\. Give limits"):
        HybridAdam([param], clipping_norm=1.0, initial_scale=32)
    with pytest.raises(NotImplementedError, match=r"nvme_offload_fraction=0\.5 is not supported"):
        CPUAdam([param], nvme_offload_fraction=0.5)


@pytest.mark.parametrize("options", [{}, {"bias_correction": True}, {"adam": True}])
def test_lamb(options: dict[str, Any]) -> None:
    param, gradients = problem()
    weights, first, second = param.detach() * 20, torch.zeros(5, 3).double(), torch.zeros(5, 3).double()
    param.data = weights.clone()
    optimizer = Lamb([param], lr=0.01, weight_decay=0.1, **options)
    for count, gradient in enumerate(gradients, 1):
        param.grad = gradient
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        update = first / (second.sqrt() + 1e-6) + 0.1 * weights
        ratio = 1.0 if options.get("adam") else float(weights.norm() / update.norm())
        corrected = math.sqrt(1 - 0.999**count) / (1 - 0.9**count) if options.get("bias_correction") else 1.0
        weights = weights - 0.01 * corrected * ratio * update
    assert weights.norm() > 10  # the trust ratio has no bound
    torch.testing.assert_close(param.detach(), weights)


def test_lars() -> None:
    param, gradients = problem()
    gradients[1] = gradients[1] * 100  # beyond the bound of 10
    weights, momentum = param.detach().clone(), None
    optimizer = Lars([param], lr=0.5, momentum=0.9, eeta=0.02, weight_decay=0.1, epsilon=1e-3)
    for gradient in gradients:
        param.grad = gradient
        optimizer.step()
        ratio = min(50.0, float(0.02 * weights.norm() / (gradient.norm() + 0.1 * weights.norm() + 1e-3)))
        decayed = (gradient + 0.1 * weights).clamp(-10, 10)
        momentum = decayed if momentum is None else 0.9 * momentum + decayed
        weights = weights - 0.5 * ratio * momentum
    torch.testing.assert_close(param.detach(), weights)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Lars, {"eeta": 2.0}, "eeta=2.0 must be above 0 and at most 1"),
        (Lars, {"momentum": -1.0}, "momentum=-1.0 is negative"),
        (Lars, {"epsilon": -1.0}, "eps=-1.0 is negative"),
        (Lamb, {"betas": (0.9, 1.0)}, r"betas\[1\]=1.0"),
        (Lamb, {"lr": -1.0}, "lr=-1.0 is negative"),
    ],
)
def test_numbers_are_checked(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind([problem()[0]], **options)
