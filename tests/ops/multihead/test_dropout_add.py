"""residual + dropout(x): each element is one of two values, the gradient drops the same ones, seeds decide."""

import pytest
import torch
from torch import Tensor

from apex.ops import _library, multihead
from apex.ops.multihead.op import NATIVE_BELOW, DropoutAdd
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

SHAPES = [(1,), (5, 7), (3, 4, 1000), (4096,), (9001,)]


def kept(output: Tensor, residual: Tensor) -> Tensor:
    return (output.double() - residual.double()).abs() > 1e-3


def inputs(device: str, shape: tuple, dtype=torch.float32, residual_dtype=None) -> tuple[Tensor, Tensor]:
    """No element of x is near zero, so that a dropped one shows."""
    x = torch.rand(shape, device=device) + 1.0
    residual = torch.randn(shape, device=device)
    return x.to(dtype).requires_grad_(), residual.to(residual_dtype or dtype).requires_grad_()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dropout", [0.1, 0.75])
@pytest.mark.usefixtures("poisoned_memory")
def test_values_and_gradients(route: Route, shape: tuple, dropout: float) -> None:
    x, residual = inputs(route.device, shape)
    with _library.implementation(route.implementation):
        output = multihead.dropout_add(x, residual, dropout)
        dy = torch.randn_like(output)
        dx, dresidual = torch.autograd.grad(output, (x, residual), dy)
    keep = kept(output, residual)
    assert_close(output, residual.double() + keep * x.double() / (1 - dropout))
    assert_close(dx, keep * dy.double() / (1 - dropout))
    assert_close(dresidual, dy.double())
    if x.numel() > 4000:
        assert abs(keep.double().mean().item() - (1 - dropout)) < 0.03


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wide", [False, True])
def test_dtypes(route: Route, dtype: torch.dtype, wide: bool) -> None:
    if dtype == torch.float64 and route.implementation == "triton":
        pytest.skip("the kernels do not take float64")
    residual_dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
    x, residual = inputs(route.device, (33, 40), dtype, residual_dtype)
    with _library.implementation(route.implementation):
        output = multihead.dropout_add(x, residual, 0.5)
        dy = torch.randn_like(output)
        dx, dresidual = torch.autograd.grad(output, (x, residual), dy)
    assert output.dtype == dresidual.dtype == residual_dtype
    assert dx.dtype == dtype
    keep = kept(output, residual)
    assert_close(output, residual.double() + keep * x.double() * 2)
    assert_close(dx, keep * dy.double() * 2)


@pytest.mark.parametrize("route", routes())
def test_a_residual_that_is_narrower_than_x(route: Route) -> None:
    x, residual = inputs(route.device, (40,), torch.float32, torch.float16)
    with _library.implementation(route.implementation):
        output = multihead.dropout_add(x, residual, 0.5)
        dy = torch.randn_like(output)
        dx, dresidual = torch.autograd.grad(output, (x, residual), dy)
    assert output.dtype == dx.dtype == torch.float32
    assert torch.equal(dresidual, dy.half())


@pytest.mark.parametrize("route", routes())
def test_the_generator_decides(route: Route) -> None:
    x, residual = inputs(route.device, (2, 3000))
    with _library.implementation(route.implementation):
        torch.manual_seed(3)
        first = multihead.dropout_add(x, residual, 0.5)
        other = multihead.dropout_add(x, residual, 0.5)
        torch.manual_seed(3)
        again = multihead.dropout_add(x, residual, 0.5)
    assert_equal_bits([first.detach()], [again.detach()])
    agreement = (kept(first, residual) == kept(other, residual)).double().mean().item()
    assert 0.4 < agreement < 0.6


@pytest.mark.parametrize("route", routes())
def test_strided_inputs_are_not_changed(route: Route) -> None:
    x, residual = (t.detach().t() for t in inputs(route.device, (40, 50)))
    before = x.clone(), residual.clone()
    with _library.implementation(route.implementation):
        output = multihead.dropout_add(x, residual, 0.5)
    assert_equal_bits((x.contiguous(), residual.contiguous()), tuple(t.contiguous() for t in before))
    assert_close(output, residual.double() + kept(output, residual) * x.double() * 2)


@pytest.mark.parametrize("route", routes())
def test_second_derivative(route: Route) -> None:
    x, residual = inputs(route.device, (64,))
    with _library.implementation(route.implementation):
        output = multihead.dropout_add(x, residual, 0.5)
        (dx,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(dx.sum(), x)
    assert_close(dx, 2 * output.double() * kept(output, residual) * 2)
    assert_close(second, 8.0 * kept(output, residual).double())


@pytest.mark.parametrize("route", routes())
def test_nothing_to_do(route: Route) -> None:
    x, residual = inputs(route.device, (7,))
    with _library.implementation(route.implementation):
        assert_equal_bits([multihead.dropout_add(x, residual, 0.0).detach()], [(x + residual).detach()])
        empty = torch.empty(0, 3, device=route.device)
        assert multihead.dropout_add(empty, empty, 0.5).shape == (0, 3)


def test_kernels_leave_a_residual_of_float64_alone() -> None:
    """They would round it to float32."""
    pytest.importorskip("triton")
    x, residual = torch.ones(5), torch.ones(5, dtype=torch.float64)
    with _library.implementation("triton"), pytest.raises(RuntimeError, match="do not take float64"):
        multihead.dropout_add(x, residual, 0.5)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="must be equal"):
        multihead.dropout_add(torch.ones(3), torch.ones(4), 0.1)
    with pytest.raises(ValueError, match=r"dropout=1\.5"):
        multihead.dropout_add(torch.ones(3), torch.ones(3), 1.5)
    with _library.implementation("triton"), pytest.raises((RuntimeError, ValueError), match="device"):
        multihead.dropout_add(torch.ones(3), torch.ones(3, device="meta"), 0.5)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    x = torch.ones(2**31 + 5000, dtype=torch.float16, device="cuda")
    output = multihead.dropout_add(x, x, 0.5)
    assert set(output[-5000:].unique().tolist()) == {1.0, 3.0}
    assert abs((output[-(2**24) :] == 3).double().mean().item() - 0.5) < 1e-3
    # Words are not repeated beyond 2**32 bytes or 2**31 elements.
    assert not torch.equal(output[:5000], output[2**31 : 2**31 + 5000])


@pytest.mark.gpu
def test_in_a_cuda_graph_each_replay_draws_anew() -> None:
    x, residual = (t.detach() for t in inputs("cuda", (NATIVE_BELOW,)))
    multihead.dropout_add(x, residual, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = multihead.dropout_add(x, residual, 0.5)
    graph.replay()
    first = output.clone()
    graph.replay()
    assert not torch.equal(first, output)
    assert_close(output, residual.double() + kept(output, residual) * x.double() * 2)


@pytest.mark.parametrize("route", [r for r in routes() if r.id in ("interpreter", "gpu-triton")])
def test_the_backward_pass_keeps_four_elements_a_byte(route: Route) -> None:
    x, residual = inputs(route.device, (4, 4096))
    with _library.implementation(route.implementation):
        output = multihead.dropout_add(x, residual, 0.5)
    assert isinstance(output.grad_fn, DropoutAdd._backward_cls)
    assert [(tensor.dtype, tensor.numel()) for tensor in output.grad_fn.saved_tensors] == [(torch.uint8, 4096)]
