"""Packed attention with dropout under opcheck and CUDA graphs, and heads that kernels leave to PyTorch."""

import pytest
import torch

from apex.ops import _library
from apex.ops._device import forget_launches
from apex.ops.attention import attention, config, op_biased, op_packed, packed_attention
from tests.ops.attention.cases import PACKED_CASES, assert_close
from tests.support.harness import Route, opcheck, routes


@pytest.mark.parametrize("route", routes())
def test_opcheck_of_packed_sequences(route: Route) -> None:
    qkv, bounds, dout = PACKED_CASES[0].tensors(route.device)
    leaf = qkv.detach().requires_grad_()
    seed = torch.tensor([5], device=route.device)
    options = (1, 0.2, True, False)
    with _library.implementation(route.implementation):
        opcheck(route, torch.ops.apex.packed_attention.default, (leaf, bounds, seed, *options))
        output, statistics = op_packed.PACKED_ATTENTION.run(qkv, bounds, seed, *options)
        opcheck(
            route,
            torch.ops.apex.packed_attention_backward.default,
            (dout, qkv, bounds, seed, output, statistics, *options, [True]),
        )


@pytest.mark.parametrize("route", routes())
def test_the_operators_refuse_a_second_derivative(route: Route) -> None:
    qkv, bounds, _ = PACKED_CASES[0].tensors(route.device)
    leaf = qkv.requires_grad_()
    with _library.implementation(route.implementation):
        output, _ = torch.ops.apex.packed_attention(leaf, bounds, None, 1, 0.0, True, False)
        (first,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivative only"):
            torch.autograd.grad(first.square().sum(), leaf)


@pytest.mark.gpu
def test_a_replayed_graph_drops_others() -> None:
    """The seed is drawn on the device, so that every replay has its own."""
    qkv, bounds, _ = PACKED_CASES[1].tensors("cuda")
    with _library.implementation("triton"):
        packed_attention(qkv, bounds, 16, 0.5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = packed_attention(qkv, bounds, 16, 0.5)
        graph.replay()
        first = output.clone()
        graph.replay()
    assert not torch.equal(first, output)


def test_heads_that_are_too_large_go_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 1, 3, config.LARGEST_HEAD + 1)
    pytest.importorskip("triton")
    with _library.implementation("triton"):
        monkeypatch.setattr(op_biased, "output_launch", lambda *arguments: pytest.fail("launched"))
        output = attention(query, query, query)
    assert_close(output, torch.nn.functional.scaled_dot_product_attention(*(query.double(),) * 3))


def test_tensor_subclasses_go_to_pytorch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        query = torch.randn(1, 2, 5, 8)
        assert attention(query, query, query, torch.ones(5)).shape == (1, 2, 5, 8)


def test_operators_leave_heads_that_are_too_large_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators launch kernels without asking first, forward and backward."""
    pytest.importorskip("triton")
    for launch in ("output_launch", "dquery_launch"):
        monkeypatch.setattr(op_biased, launch, lambda *arguments: pytest.fail("launched"))
    forget_launches()
    query = torch.randn(1, 1, 3, config.LARGEST_HEAD + 1, requires_grad=True)
    qkv = torch.randn(3, 3, 1, config.LARGEST_HEAD + 1, requires_grad=True)
    bounds = torch.tensor([0, 1, 3])
    with _library.implementation("triton"):
        output = op_biased.ATTENTION.differentiable(query, query, query, None, None, 1e9)
        packed = op_packed.PACKED_ATTENTION.differentiable(qkv, bounds, None, 2, 0.0, True, False)
        gradients = torch.autograd.grad((output.square().sum(), packed.square().sum()), (query, qkv))
    expected = attention(query, query, query), packed_attention(qkv, bounds, 2)
    wanted = torch.autograd.grad([output.square().sum() for output in expected], (query, qkv))
    for actual, exact in zip((output, packed, *gradients), (*expected, *wanted), strict=True):
        assert_close(actual, exact)
