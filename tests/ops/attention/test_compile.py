"""The attentions under torch.compile, opcheck and CUDA graphs, and what `apex doctor` says of them."""

import pytest
import torch

from apex.ops import _library
from apex.ops._device import forget_launches
from apex.ops.attention import FAMILY, attention, config, op_biased, op_packed, packed_attention
from tests.ops.attention.cases import BIASED_CASES, PACKED_CASES, assert_close
from tests.support.harness import Route, opcheck, routes


@pytest.mark.parametrize("route", routes())
def test_opcheck(route: Route) -> None:
    (query, key, value, bias), mask, dout = BIASED_CASES[2].tensors(route.device)
    leaves = [t.requires_grad_() for t in (query, key, value, bias)]
    with _library.implementation(route.implementation):
        opcheck(route, torch.ops.apex.attention.default, (*leaves[:3], mask, leaves[3], 1e9))
        plain = [t.detach() for t in leaves]
        output, statistics = op_biased.ATTENTION.run(*plain[:3], mask, plain[3], 1e9)
        given = (*plain[:3], mask, plain[3], output.contiguous(), statistics, 1e9, [True] * 4)
        opcheck(route, torch.ops.apex.attention_backward.default, (dout, *given))


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
def test_compiled_without_graph_breaks(route: Route) -> None:
    inputs, mask, dout = BIASED_CASES[2].tensors(route.device)
    leaves = [t.requires_grad_() for t in inputs]
    qkv, bounds, dpacked = PACKED_CASES[1].tensors(route.device)
    leaves.append(qkv.requires_grad_())

    def function(query, key, value, bias, qkv):
        first = attention(query, key, value, mask, bias).sin()
        return first, packed_attention(qkv, bounds, 16).sin()

    # Generated C++ would need a compiler; on a GPU the generated code is Triton.
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        expected = function(*leaves)
        gradients = torch.autograd.grad(expected, leaves, (dout, dpacked))
        actual = torch.compile(function, fullgraph=True, backend=backend)(*leaves)
        compiled_gradients = torch.autograd.grad(actual, leaves, (dout, dpacked))
    for a, e in zip((*actual, *compiled_gradients), (*expected, *gradients), strict=True):
        assert_close(a, e)


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
def test_cuda_graph_capture() -> None:
    inputs, mask, dout = BIASED_CASES[2].tensors("cuda")
    leaves = [t.requires_grad_() for t in inputs]
    qkv, bounds, dpacked = PACKED_CASES[1].tensors("cuda")
    leaves.append(qkv.requires_grad_())

    def step():
        outputs = attention(*leaves[:3], mask, leaves[3]), packed_attention(leaves[4], bounds, 16)
        return *outputs, *torch.autograd.grad(outputs, leaves, (dout, dpacked))

    with _library.implementation("triton"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # compile before capture
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        torch.cuda.synchronize()
        expected = step()
    assert all(map(torch.equal, results, expected))


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


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_self_check(route: Route) -> None:
    with _library.implementation(route.implementation):
        assert FAMILY.self_check(torch.device(route.device)) <= 1


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
