"""What is made of measured sums on the device: factors, moving averages, AdamP's projection; by every route."""

import pytest
import torch
from torch import Tensor

from apex.ops import implementation
from apex.ops.multi_tensor import clip, clipped_before, make_lists, rules, scale
from apex.ops.multi_tensor.rows import TritonRowLists, make_row_lists, projection_thresholds
from apex.optimizers import FusedLAMB, FusedNovoGrad, NpuFusedAdamP
from tests.support.harness import Route, assert_close, routes

SIZES = (5, 300, 0, 64, 1)


def gradients(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(device) for size in SIZES]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("maximum", [False, True])
@pytest.mark.parametrize("limit", [0.5, 1e4])
def test_a_factor_that_clips(limit: float, maximum: bool, scaled: bool, route: Route) -> None:
    tensors = gradients(route.device)
    together = torch.cat(tensors).double() * (0.25 if scaled else 1.0)
    expected = together.abs().max() if maximum else together.norm()
    scale = torch.full((1,), 0.25, device=route.device) if scaled else None
    with implementation(route.implementation):
        lists = make_lists([tensors, tensors, None, None, None])
        rule = rules.MAXIMUM if maximum else rules.SQUARE_SUM
        norm, factor = lists.measured_clip(rule, limit, 0.125, grad_scale=scale)
    assert norm.shape == factor.shape == (1,)
    assert_close(norm, expected.reshape(1))
    assert_close(factor, ((limit / (expected + 0.125)).clamp(max=1.0) * (0.25 if scaled else 1.0)).reshape(1))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_makes_nothing_finite(value: float, route: Route) -> None:
    """As PyTorch's own clipping does: a NaN is not hidden by a factor of 1."""
    tensors = gradients(route.device)
    tensors[1][7] = value
    with implementation(route.implementation):
        norm, factor = make_lists([tensors, tensors, None, None, None]).measured_clip(rules.SQUARE_SUM, 1.0, 0.0)
    assert not norm.isfinite().item()
    assert factor.isnan().item() if value != value else factor.item() == 0


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("maximum", [False, True])
def test_averages_start_with_what_is_first_measured(maximum: bool, route: Route) -> None:
    tensors = gradients(route.device)
    exact = [tensor.double().cpu() for tensor in tensors]
    found = [(t.abs().max() if maximum else t.square().sum()) if t.numel() else t.new_zeros(()) for t in exact]
    before = torch.tensor([[-1.0, 7.0], [2.0, 7.0], [3.0, 7.0], [-1.0, 7.0], [0.0, 7.0]], device=route.device)
    averages = before.clone()
    with implementation(route.implementation):
        lists = make_lists([None, tensors, None, None, None])
        rule = rules.MAXIMUM if maximum else rules.SQUARE_SUM
        lists.measured_average(rule, averages, 0.25, noop=torch.ones(1, device=route.device))
        assert torch.equal(averages, before)
        lists.measured_average(rule, averages, 0.25, noop=torch.zeros(1, device=route.device))
    expected = [f if b < 0 else 0.75 * b + 0.25 * f for f, b in zip(found, before[:, 0].tolist(), strict=True)]
    assert_close(averages[:, 0], torch.stack(expected), reduction=300)
    assert averages[:, 1].eq(7).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("on_device", [False, True])
def test_projection(on_device: bool, route: Route) -> None:
    """A tensor at right angles in every row, one only as a whole, one not at all, a vector, one that is empty."""
    shapes = ((3, 200), (2, 2, 100), (4, 50), (7,), (0, 3))
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    grads = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    grads[0] -= params[0] * ((params[0] * grads[0]).sum(1) / params[0].square().sum(1))[:, None]
    grads[1] = params[1] * torch.tensor([1.0, -1.0], dtype=torch.float64).view(2, 1, 1)
    grads[1][1] *= params[1][0].square().sum() / params[1][1].square().sum()
    grads[2] = params[2] + 0.1
    directions = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    eps, delta, decay, ratio = 1e-8, 0.1, 0.01, 0.25
    rows = [
        torch.stack(
            [(a * b).reshape(len(p) if p.ndim > 1 else 1, -1).sum(1) for a, b in ((p, g), (g, g), (p, p), (p, u))], 1
        )
        for p, g, u in zip(params[:4], grads, directions, strict=False)
    ]
    lengths = [row[:, 2].sqrt() + eps for row in rows]
    whole = (params[1] * directions[1]).sum() / (params[1].norm() + eps) ** 2
    shares = [rows[0][:, 3] / lengths[0] ** 2, whole.expand(2), torch.zeros(4), torch.zeros(1)]
    shrinks = [decay * ratio] * 3 + [decay * ratio] * 2 + [decay] * 5
    single = [p.float().to(route.device) for p in params]
    with implementation(route.implementation):
        lists = make_row_lists([single, single, None, None, None])
        assert isinstance(lists, TritonRowLists) == (route.implementation == "triton")
        found = lists.project(
            torch.cat(rows).float().to(route.device),
            projection_thresholds(single, lists.device),
            eps=eps,
            delta=delta,
            decay=torch.tensor(decay, device=route.device) if on_device else decay,
            ratio=ratio,
        )
    expected = torch.stack((torch.cat(shares).double(), torch.tensor(shrinks, dtype=torch.float64)), 1)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("in_place_first", [True, False])
def test_lists_in_place_and_apart_are_told_apart(in_place_first: bool, route: Route) -> None:
    tensors = [torch.ones(4, device=route.device), torch.ones(300, device=route.device)]
    with implementation(route.implementation):
        for in_place in (in_place_first, not in_place_first, in_place_first):
            for _ in range(3):
                scale(tensors, tensors if in_place else list(tensors), 2.0)
    assert all(tensor.eq(2.0**9).all() for tensor in tensors)


@pytest.mark.parametrize("route", routes())
def test_tensors_are_known_again_only_while_they_are_alike(route: Route) -> None:
    """The memory of a tensor may be that of another by the next call: of another size, shape or dtype."""
    memory = torch.ones(4000, device=route.device)
    halves = memory.view(torch.bfloat16)

    def clipped(*tensors: Tensor) -> float:
        return clip(list(tensors), 1e9, 0.0).item()

    with implementation(route.implementation):
        for _ in range(3):
            assert clipped(memory[:400], memory[400:1000]) == pytest.approx(1000**0.5)
        assert (clipped_before([memory[:400], memory[400:1000]]) is not None) == (route.implementation == "triton")
        # The same addresses each time.
        assert clipped(memory[:400], memory[400:900]) == pytest.approx(900**0.5)
        assert clipped(memory[:400].view(20, 20), memory[400:1000]) == pytest.approx(1000**0.5)
        assert clipped(memory[:800:2], memory[400:1000]) == pytest.approx(1000**0.5)
        assert clipped_before([halves[:400], halves[800:1400]]) is None
        halves[:400], halves[800:1400] = 2.0, 2.0
        assert clipped(halves[:400], halves[800:1400]) == pytest.approx(4000**0.5)
        assert clipped_before([memory[:400], memory[400:800]]) is None


@pytest.mark.parametrize("route", routes())
def test_a_tensor_between_others_that_has_moved(route: Route) -> None:
    """Lists are looked up by the shapes of their first and last tensors."""
    first, last = torch.ones(4, device=route.device), torch.ones(5, device=route.device)
    between = [torch.full((300,), value, device=route.device) for value in (1.0, 2.0, 3.0)]
    with implementation(route.implementation):
        for value, tensor in enumerate(between, 1):
            for _ in range(3):
                found = clip([first, tensor, last], 1e9, 0.0)
                assert found.item() == pytest.approx((9 + 300 * value**2) ** 0.5)
            known = clipped_before([first, tensor, last])
            assert (known is not None) == (route.implementation == "triton")


@pytest.mark.parametrize("route", [parameter for parameter in routes() if parameter.id == "interpreter"])
def test_kernels_get_floats(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a kernel for the values of integers: one for a limit of 1 would serve all others."""
    from apex.ops._launch import PreparedLaunch  # which needs triton

    given: list[float] = []
    launch = PreparedLaunch._launch_first

    def noting(self: PreparedLaunch, key: tuple, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]) -> None:
        given.extend(floats)
        launch(self, key, tensors, floats)

    monkeypatch.setattr(PreparedLaunch, "_launch_first", noting)
    params = [torch.nn.Parameter(torch.ones(3, 4, device=route.device))]
    params[0].grad = torch.ones_like(params[0])
    with implementation(route.implementation):
        clip([param.grad for param in params], 1, 0)
        for made in (
            FusedLAMB(params, lr=1, max_grad_norm=1),
            FusedNovoGrad(params, lr=1, betas=(0, 0)),
            NpuFusedAdamP(params, lr=1, eps=1, weight_decay=1, delta=1, wd_ratio=1),
        ):
            made.step()
    assert len(given) > 20
    assert {type(number) for number in given} == {float}
