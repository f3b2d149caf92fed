"""Softmax under torch.compile, opcheck and CUDA graphs."""

import pytest
import torch

from apex.ops import _library, softmax
from apex.ops.softmax import SoftmaxSpec
from apex.transformer.functional import scaled_masked_softmax, scaled_softmax, scaled_upper_triang_masked_softmax
from tests.harness import Route, assert_close, opcheck, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_opcheck(route: Route, dropout: float) -> None:
    x = torch.randn(1, 2, 2, 20, device=route.device, requires_grad=True)
    mask = None if dropout else torch.rand(1, 1, 2, 20, device=route.device) < 0.3
    spec = SoftmaxSpec(0.5, mask is None, dropout)
    with _library.implementation(route.implementation):
        noise = softmax.draw_noise(x, spec)
        opcheck(route, torch.ops.apex.softmax.default, (x, mask, noise, *spec))
        _, probabilities = softmax.softmax_forward(x, mask, spec, noise)
        arguments = (torch.randn_like(x).detach(), probabilities, noise, *spec, [True])
        opcheck(route, torch.ops.apex.softmax_backward.default, arguments)


@pytest.mark.parametrize("route", routes())
def test_compiled_without_graph_breaks(route: Route) -> None:
    x = torch.randn(2, 2, 12, 12, device=route.device, requires_grad=True)
    mask = torch.rand(2, 1, 12, 12, device=route.device) < 0.3

    def function(x, mask):
        return scaled_upper_triang_masked_softmax(x, None, 0.5) + scaled_masked_softmax(x, mask, 0.25).sin()

    # Generated C++ would need a compiler; on a GPU the generated code is Triton.
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        expected, output = function(x, mask), compiled(x, mask)
        assert_close(output, expected.double())
        actual, wanted = (torch.autograd.grad(y.square().sum(), x)[0] for y in (output, expected))
        assert_close(actual, wanted.double())
        with torch.no_grad():
            assert_close(compiled(x, mask), expected.double())


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_compiled_for_all_sizes_at_once(route: Route) -> None:
    backend = "inductor" if route.device == "cuda" else "aot_eager"

    def function(x):
        return scaled_upper_triang_masked_softmax(x, None, 0.5) + scaled_softmax(x, 0.3)

    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for size in (12, 17):
                x = torch.randn(2, 3, size, size, device=route.device, requires_grad=True)
                output, expected = compiled(x), function(x)
                assert_close(output, expected.double())
                actual, wanted = (torch.autograd.grad(y.square().sum(), x)[0] for y in (output, expected))
                assert_close(actual, wanted.double())


@pytest.mark.parametrize("route", routes())
def test_compiled_dropout_is_reproducible(route: Route) -> None:
    x = torch.randn(2, 12, 12, device=route.device, requires_grad=True)
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: softmax.masked_softmax(x, causal=True, dropout=0.5), fullgraph=True, backend=backend
        )
        results = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            output = compiled(x)
            results.append((output.detach(), *torch.autograd.grad(output.square().sum(), x)))
    assert all(map(torch.equal, results[0], results[2]))
    assert not torch.equal(results[0][0], results[1][0])
    plain = softmax.masked_softmax(x.detach(), causal=True)
    assert_close(results[0][0], plain.double() * (results[0][0] != 0) * 2)


@pytest.mark.parametrize("route", routes())
def test_the_operator_refuses_a_second_derivative(route: Route) -> None:
    x = torch.randn(4, 24, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        output = torch.ops.apex.softmax(x, None, None, *SoftmaxSpec(0.5))[0]
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivative only"):
            torch.autograd.grad(first.square().sum(), x)


def test_tensor_subclasses_take_operators() -> None:
    """FakeTensor stands for those that have no memory of their own, DTensor among them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _library.implementation("auto"), FakeTensorMode():
        x = torch.randn(2, 4, 6, requires_grad=True)
        for options in ({}, {"causal": True}, {"mask": torch.zeros(4, 6, dtype=torch.bool)}, {"dropout": 0.5}):
            output = softmax.masked_softmax(x, scale=0.5, **options)
            assert output.shape == x.shape
            assert torch.autograd.grad(output.sum(), x)[0].shape == x.shape


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 2048, 40000])
def test_cuda_graph_capture(keys: int) -> None:
    x = torch.randn(2, 64, keys, device="cuda", requires_grad=True)
    with _library.implementation("triton"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # compile before capture
            torch.autograd.grad(softmax.masked_softmax(x, causal=True).sum(), x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = softmax.masked_softmax(x, causal=True)
            (dx,) = torch.autograd.grad(output.sin().sum(), x)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        expected = softmax.masked_softmax(x, causal=True)
        (expected_dx,) = torch.autograd.grad(expected.sin().sum(), x)
    assert torch.equal(output, expected)
    assert torch.equal(dx, expected_dx)
