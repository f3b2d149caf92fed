"""Rotary position embeddings under torch.compile, opcheck and CUDA graphs."""

import pytest
import torch

from apex.ops import _library, rope
from apex.transformer.functional import fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd
from apex.transformer.functional.fused_rope import FusedRoPEFunc
from tests.harness import Route, assert_close, opcheck, routes


@pytest.mark.parametrize("route", routes())
def test_opcheck(route: Route) -> None:
    t = torch.randn(4, 2, 3, 8, device=route.device, requires_grad=True)
    swapped = torch.randn(2, 4, 1, 8, device=route.device).transpose(0, 1).requires_grad_()
    freqs, table = torch.rand(4, 1, 1, 8, device=route.device), torch.rand(1, 4, 1, 4, device=route.device)
    edges = torch.tensor([0, 3, 4], dtype=torch.int32, device=route.device)
    rotate = torch.ops.apex.rope.default
    with _library.implementation(route.implementation):
        opcheck(route, rotate, ([t], [freqs], None, "sbhd", True, False, 0))
        opcheck(route, rotate, ([swapped.detach()], [freqs, freqs], None, "sbhd", False, True, 0))
        opcheck(route, rotate, ([t.detach()[:, 0]], [freqs], edges, "thd", False, False, 0))
        opcheck(route, rotate, ([t.detach()[:2]], [table] * 4, None, "image", False, False, 2))
        opcheck(route, rotate, ([t, swapped], [freqs], None, "sbhd", False, False, 0))


@pytest.mark.parametrize("route", routes())
def test_compiled_without_graph_breaks(route: Route) -> None:
    t = torch.randn(6, 2, 3, 8, device=route.device, requires_grad=True)
    freqs = torch.rand(6, 1, 1, 8, device=route.device)
    edges = torch.tensor([0, 2, 6], dtype=torch.int32, device=route.device)

    def function(t):
        query, key = rope.rotary_embedding_pair(t, t[:, :, :1], freqs)
        swapped = fused_apply_rotary_pos_emb(query, freqs, transpose_output_memory=True)
        return swapped.transpose(0, 1).sin() * key.transpose(0, 1) + fused_apply_rotary_pos_emb_thd(
            t[:, 0], edges, freqs
        )

    # Generated C++ would need a compiler; on a GPU the generated code is Triton.
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        expected = function(t)
        compiled = torch.compile(function, fullgraph=True, backend=backend)(t)
        (gradient,), (expected_gradient,) = (torch.autograd.grad(y.square().sum(), t) for y in (compiled, expected))
    assert_close(compiled, expected.double())
    assert_close(gradient, expected_gradient.double(), reduction=10)


def test_compiling_autograd_functions_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    t = torch.randn(6, 2, 3, 8, requires_grad=True)
    freqs = torch.rand(6, 1, 1, 8)
    torch._dynamo.reset()
    compiled = torch.compile(FusedRoPEFunc.apply, fullgraph=True, backend="aot_eager")
    outputs = [call(t, freqs, False) for call in (compiled, FusedRoPEFunc.apply)]
    gradient, wanted = (torch.autograd.grad(y.square().sum(), t)[0] for y in outputs)
    assert_close(gradient, wanted.double())
    assert not [str(each.message) for each in recwarn if "cache" in str(each.message)]


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_compiled_for_all_sizes_at_once(route: Route) -> None:
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        compiled = torch.compile(fused_apply_rotary_pos_emb, fullgraph=True, dynamic=True, backend=backend)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for tokens in (6, 9):
                t = torch.randn(tokens, 2, 3, 8, device=route.device, requires_grad=True)
                freqs = torch.rand(tokens, 1, 1, 8, device=route.device)
                output, expected = (call(t, freqs) for call in (compiled, fused_apply_rotary_pos_emb))
                assert_close(output, expected.double())
                gradient, wanted = (torch.autograd.grad(y.square().sum(), t)[0] for y in (output, expected))
                assert_close(gradient, wanted.double())


def test_tensor_subclasses_take_operators() -> None:
    """FakeTensor stands for those that have no memory of their own, DTensor among them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _library.implementation("auto"), FakeTensorMode():
        t = torch.randn(4, 2, 3, 8, requires_grad=True)
        output = rope.rotary_embedding(t, torch.rand(4, 1, 1, 8), transpose_output_memory=True)
        assert output.stride() == (24, 96, 8, 1)
        assert torch.autograd.grad(output.sum(), t)[0].stride() == t.stride()


@pytest.mark.gpu
def test_cuda_graph_capture() -> None:
    t = torch.randn(512, 2, 8, 64, device="cuda", requires_grad=True)
    freqs = torch.rand(512, 1, 1, 64, device="cuda")
    edges = torch.tensor([0, 100, 512], dtype=torch.int32, device="cuda")

    def function(t):
        return torch.autograd.grad(rope.rotary_embedding(t[:, 0], freqs, cu_seqlens=edges).sin().sum(), t)[0]

    with _library.implementation("triton"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # compile before capture
            function(t)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gradient = function(t)
        with torch.no_grad():
            t.copy_(torch.randn_like(t))
        edges.copy_(torch.tensor([0, 300, 512]))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(gradient, function(t))
