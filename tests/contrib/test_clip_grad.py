"""clip_grad_norm_ against PyTorch's own, in float64."""

import pytest
import torch
from torch import Tensor, nn

import apex
from apex.contrib.clip_grad import clip_grad_norm_
from apex.ops import _library, implementation
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

SHAPES = ((9, 8), (5,), (0,), (), (130,))
INF = float("inf")


def parameters(route: Route, *dtypes: torch.dtype) -> list[nn.Parameter]:
    found = []
    for dtype in dtypes:
        for shape in SHAPES:
            param = nn.Parameter(torch.zeros(shape, dtype=dtype, device=route.device))
            param.grad = torch.randn(shape, device=route.device).to(dtype)
            found.append(param)
    found.append(nn.Parameter(torch.zeros(3, device=route.device)))  # without a gradient
    return found


def exact(params: list[nn.Parameter]) -> list[nn.Parameter]:
    copies = [nn.Parameter(param.detach().double().cpu()) for param in params]
    for copy, param in zip(copies, params, strict=True):
        copy.grad = None if param.grad is None else param.grad.double().cpu().clone()
    return copies


def nonempty(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the tensors with elements; PyTorch's function refuses empty ones for the infinity norm."""
    return [param for param in params if param.numel()]


def check(params: list[nn.Parameter], max_norm: float, *norm_type: float) -> None:
    wanted = exact(params)
    expected = torch.nn.utils.clip_grad_norm_(nonempty(wanted), max_norm, *norm_type)
    found = clip_grad_norm_(params, max_norm, *norm_type)
    assert found.shape == ()
    torch.testing.assert_close(
        found.double().cpu(), expected, rtol=2e-3 if found.dtype == torch.float16 else 2e-6, atol=0
    )
    for param, copy in zip(params, wanted, strict=True):
        assert (param.grad is None) == (copy.grad is None)
        if param.grad is not None:
            assert_close(param.grad, copy.grad)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float16, torch.float32), (torch.bfloat16,)])
@pytest.mark.parametrize("norm_type", [2.0, 2, INF, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 1e4, 0.0])
def test_against_torch(max_norm: float, norm_type, dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    with _library.implementation(route.implementation):
        check(parameters(route, *dtypes), max_norm, float(norm_type))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("max_norm", [1, True, "0.5", INF, float("nan"), -1.0])
@pytest.mark.parametrize("bad", [None, INF])
def test_any_limit_that_torch_takes(bad: float | None, max_norm, route: Route) -> None:
    ours, torchs = ([nn.Parameter(torch.ones(size, device=route.device)) for size in (40, 3)] for _ in range(2))
    for param in (*ours, *torchs):
        param.grad = torch.full_like(param, 2.0 if bad is None or len(param) == 3 else bad)
    with implementation(route.implementation):
        norm = clip_grad_norm_(ours, max_norm)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(torchs, max_norm))
    for param, expected in zip(ours, torchs, strict=True):
        torch.testing.assert_close(param.grad, expected.grad, equal_nan=True)


@pytest.mark.parametrize("route", routes())
def test_a_parameter_that_is_given_twice(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass over all would write its gradient concurrently on a GPU, as PyTorch's own function does."""
    param = nn.Parameter(torch.ones(4, device=route.device))
    calls: list[int] = []
    torchs = nn.utils.clip_grad_norm_
    monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda *args: [calls.append(1), torchs(*args)][1])
    with implementation(route.implementation):
        for _ in range(4):  # also when it is known
            param.grad = torch.ones_like(param)
            clip_grad_norm_([param, param], 1.0)
    assert len(calls) == 4
    if route.device == "cpu":
        assert_close(param.grad, torch.full((4,), 1 / 8, dtype=torch.float64))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, 0.5])
def test_other_norms(norm_type: float) -> None:
    check(parameters(Route("cpu", "torch"), torch.float32), 0.5, norm_type)


def test_double_precision() -> None:
    params = parameters(Route("cpu", "torch"), torch.float64, torch.float32)
    check(params, 0.5)
    assert clip_grad_norm_([p for p in params if p.dtype == torch.float64], 0.5).dtype == torch.float64


def test_half_precision_norms_do_not_overflow() -> None:
    """PyTorch's own norm is float16 then, and infinite."""
    param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    param.grad = torch.full((4,), 5e4, dtype=torch.float16)
    norm = clip_grad_norm_(param, 1.0)
    assert norm.item() == pytest.approx(1e5, rel=1e-3)
    assert_close(param.grad, torch.full((4,), 0.5, dtype=torch.float64))


def test_a_tensor_a_generator_and_nothing() -> None:
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    assert clip_grad_norm_(param, 1.0).item() == 2
    assert_close(param.grad, torch.full((4,), 0.5, dtype=torch.float64))
    assert clip_grad_norm_((p for p in [param]), 10.0).item() == pytest.approx(1.0, rel=1e-5)
    assert clip_grad_norm_([], 1.0).item() == 0
    assert clip_grad_norm_([nn.Parameter(torch.zeros(4))], 1.0).item() == 0


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_nonfinite_gradients(bad: float, norm_type: float, route: Route) -> None:
    params = parameters(route, torch.float32)
    params[0].grad[3, 3] = bad
    before = [None if p.grad is None else p.grad.clone() for p in params]
    with _library.implementation(route.implementation):
        with pytest.raises(RuntimeError, match="error_if_nonfinite=False"):
            clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
        assert_equal_bits([p.grad for p in params], before)
        wanted = exact(params)
        expected = torch.nn.utils.clip_grad_norm_(nonempty(wanted), 1.0, norm_type)
        norm = clip_grad_norm_(params, 1.0, norm_type)
    torch.testing.assert_close(norm.double().cpu(), expected, equal_nan=True)
    for param, copy in zip(params, wanted, strict=True):
        if param.grad is not None:
            torch.testing.assert_close(param.grad.double().cpu(), copy.grad, equal_nan=True)


def test_strided_gradients() -> None:
    param = nn.Parameter(torch.zeros(6, 4))
    base = torch.randn(4, 12)
    param.grad = base[:, ::2].t()
    untouched = base[:, 1::2].clone()
    check([param], 0.5)
    assert torch.equal(base[:, 1::2], untouched)


@pytest.mark.gpu
def test_several_devices() -> None:
    cpu, gpu = (parameters(Route(device, "auto"), torch.float32) for device in ("cpu", "cuda"))
    check([*gpu, *cpu], 0.5)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    params = parameters(Route("cuda", "triton"), torch.float32, torch.float16)
    clip_grad_norm_(params, 1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_grad_norm_(params, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_found_after_a_bare_import() -> None:
    assert apex.contrib.clip_grad.clip_grad_norm_ is clip_grad_norm_
    assert isinstance(clip_grad_norm_([], 1.0), Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_without_elements_have_no_part_in_the_largest(dtype: torch.dtype) -> None:
    """PyTorch raises for an infinity norm of nothing."""
    params = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (3, 0)]
    for param in params:
        param.grad = torch.full_like(param, 4.0)
    assert clip_grad_norm_(params, 1.0, torch.inf) == 4.0
    torch.testing.assert_close(params[0].grad, torch.ones(3, dtype=dtype), rtol=1e-5, atol=0)


def test_gradients_of_integers_are_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    param.grad = torch.ones(3, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"parameters have a gradient of torch\.int64"):
        clip_grad_norm_([param], 1.0)
    assert param.grad.tolist() == [1, 1, 1]
