"""Sums that the launch adds up whose programs found them, and the second launch that does it elsewhere."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from apex.ops import implementation
from apex.ops._device import DeviceFacts
from apex.ops.multi_tensor import dispatch, l2norm, lamb_step, make_lists, max_norm, rules
from apex.ops.multi_tensor.torch_lists import TorchLists
from tests.support.harness import Route, assert_close, routes

# Of several programs each, of one, and of one element.
SIZES = (5, 3000, 64, 1, 700)
KERNELS = [parameter for parameter in routes() if parameter.values[0].implementation == "triton"]


def tensors_of(sizes: tuple[int, ...], device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(device) for size in sizes]


@pytest.fixture(params=["one launch", "two launches"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched; with a second launch, as on AMD, or without."""
    monkeypatch.setattr(DeviceFacts, "publishes_for_all", request.param == "one launch")
    monkeypatch.setattr(dispatch, "_groups_by_signature", OrderedDict())
    from apex.ops._launch import PreparedLaunch  # which needs triton

    names: list[str] = []
    launch = PreparedLaunch.__call__

    def noting(self: PreparedLaunch, *given: Any) -> None:
        names.append(self.kernel.name)
        launch(self, *given)

    monkeypatch.setattr(PreparedLaunch, "__call__", noting)
    names.append(request.param)
    return names


@pytest.mark.parametrize("route", KERNELS)
def test_sums_of_all_and_of_each(route: Route, launches: list[str]) -> None:
    tensors = tensors_of(SIZES, route.device)
    with implementation(route.implementation):
        for _ in range(3):  # what programs count on is as it was, and nothing else
            for tensor in tensors:
                tensor.mul_(1.5)
            exact = [tensor.double().cpu() for tensor in tensors]
            total, _ = l2norm(tensors)
            assert_close(total, torch.cat(exact).norm().reshape(1), reduction=sum(SIZES))
            _, each = l2norm(tensors, per_tensor=True)
            assert_close(each, torch.stack([tensor.norm() for tensor in exact]), reduction=max(SIZES))
            total, each = max_norm(tensors, per_tensor=True)
            assert torch.equal(each.cpu().double(), torch.stack([tensor.abs().max() for tensor in exact]))
            assert total.item() == each.max().item()
        found = make_lists([tensors, tensors, None, None, None]).apply(rules.LARS_NORMS, {})
        assert_close(found[:, 0], torch.stack([tensor.square().sum() for tensor in exact]), reduction=max(SIZES))
        assert torch.equal(found[:, 0], found[:, 1])
    kind, *names = launches
    assert names.count("apply_rule") == 3 * 3 + 1
    # The total of what was found for each is a launch of its own.
    assert names.count("reduce_partials") == (3 * 2 if kind == "one launch" else 3 * 5 + 1)


@pytest.mark.parametrize("route", KERNELS)
@pytest.mark.parametrize("sizes", [(0, 300, 0), (0,), (0, 0)])
def test_empty_tensors(sizes: tuple[int, ...], route: Route, launches: list[str]) -> None:
    tensors = tensors_of(sizes, route.device)
    exact = [tensor.double().cpu() for tensor in tensors]
    with implementation(route.implementation):
        for _ in range(2):
            total, each = l2norm(tensors, per_tensor=True)
            assert_close(total, torch.cat(exact).norm().reshape(1), reduction=300)
            assert_close(each, torch.stack([tensor.norm() for tensor in exact]), reduction=300)
            assert_close(l2norm(tensors)[0], torch.cat(exact).norm().reshape(1), reduction=300)
            assert max_norm(tensors)[0].item() == max([t.abs().max().item() for t in tensors if t.numel()], default=0)


@pytest.mark.parametrize("route", KERNELS)
def test_what_is_not_finite_is_found(route: Route, launches: list[str]) -> None:
    tensors = tensors_of(SIZES, route.device)
    with implementation(route.implementation):
        for value in (torch.inf, torch.nan):
            flag = torch.zeros(1, dtype=torch.int32, device=route.device)
            l2norm(tensors, overflow=flag)
            assert flag.item() == 0
            tensors[1][2999] = value
            total, _ = l2norm(tensors, overflow=flag)
            assert flag.item() == 1
            assert not total.isfinite().item()
            assert not max_norm(tensors)[0].isfinite().item()
            tensors[1][2999] = 0.0


@pytest.mark.parametrize("route", KERNELS)
def test_averages(route: Route, launches: list[str]) -> None:
    """With no empty tensor among them, as in models."""
    tensors = tensors_of(SIZES, route.device)
    averages = torch.tensor([[-1.0, 7.0]] * len(SIZES), device=route.device)
    skip, go_on = torch.ones(1, device=route.device), torch.zeros(1, device=route.device)
    exact = None
    with implementation(route.implementation):
        whole = make_lists([None, tensors, None, None, None])
        for step in range(4):
            for tensor in tensors:
                tensor.mul_(1.5)
            whole.measured_average(rules.SQUARE_SUM, averages, 0.25, noop=skip if step == 1 else go_on)
            if step != 1:
                found = torch.stack([tensor.double().cpu().square().sum() for tensor in tensors])
                exact = found if exact is None else 0.75 * exact + 0.25 * found
            assert_close(averages[:, 0], exact, reduction=max(SIZES))
    assert averages[:, 1].eq(7).all()
    assert ("reduce_partials" in launches) == (launches[0] == "two launches")


@pytest.mark.parametrize("route", KERNELS)
def test_steps_of_lamb(route: Route, launches: list[str]) -> None:
    slots: list[list[Tensor]] = [tensors_of(SIZES, "cpu") for _ in range(4)]
    slots[3] = [tensor.square() for tensor in slots[3]]
    there = [[tensor.to(route.device) for tensor in tensors] for tensors in slots]
    exact = [[tensor.double() for tensor in tensors] for tensors in slots]
    flags = [torch.full((1,), value, device=route.device) for value in (0.0, 1.0)]
    with implementation(route.implementation):
        mine = make_lists([*there, None])
        for step, skipped in enumerate((False, True, False), 1):
            hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "step": step}
            lamb_step(mine, hyper, (True,), noop=flags[skipped])
            if not skipped:
                lamb_step(TorchLists([*exact, None]), hyper, (True,))
    for slot in (0, 2, 3):
        for tensor, wanted in zip(there[slot], exact[slot], strict=True):
            assert_close(tensor, wanted, reduction=max(SIZES))
    assert ("reduce_partials" in launches) == (launches[0] == "two launches")


@pytest.mark.gpu
def test_the_same_bits_every_time() -> None:
    """Whichever program is the last."""
    tensors = tensors_of((1 << 20, 5, 3_000_001, *(64,) * 100), "cuda")
    totals = torch.cat([l2norm(tensors)[0] for _ in range(300)])
    assert len(totals.unique()) == 1
    each = torch.stack([l2norm(tensors, per_tensor=True)[1] for _ in range(100)])
    assert torch.equal(each, each[:1].expand_as(each))
