"""Rotary position embeddings under torch.compile, opcheck and CUDA graphs."""

import pytest
import torch

from apex.ops import _library, rope
from apex.transformer.functional.fused_rope import FusedRoPEFunc
from tests.support.harness import Route, assert_close, opcheck, routes


@pytest.mark.parametrize("route", routes())
def test_opcheck(route: Route) -> None:
    t = torch.randn(4, 2, 3, 8, device=route.device, requires_grad=True)
    swapped = torch.randn(2, 4, 1, 8, device=route.device).transpose(0, 1).requires_grad_()
    freqs, table = torch.rand(4, 1, 1, 8, device=route.device), torch.rand(1, 4, 1, 4, device=route.device)
    edges = torch.tensor([0, 3, 4], dtype=torch.int32, device=route.device)
    rotate = torch.ops.apex.rope.default
    with _library.implementation(route.implementation):
        opcheck(route, rotate, ([t], [freqs], None, "sbhd", True, False, 0, "halves"))
        opcheck(route, rotate, ([swapped.detach()], [freqs, freqs], None, "sbhd", False, True, 0, "halves"))
        opcheck(route, rotate, ([t.detach()[:, 0]], [freqs], edges, "thd", False, False, 0, "halves"))
        opcheck(route, rotate, ([t.detach()[:2]], [table] * 4, None, "image", False, False, 2, "halves"))
        opcheck(route, rotate, ([t, swapped], [freqs], None, "sbhd", False, False, 0, "halves"))
        opcheck(route, rotate, ([t], [freqs], None, "sbhd", False, False, 0, "neighbours to halves"))


def test_compiling_autograd_functions_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    t = torch.randn(6, 2, 3, 8, requires_grad=True)
    freqs = torch.rand(6, 1, 1, 8)
    torch._dynamo.reset()
    compiled = torch.compile(FusedRoPEFunc.apply, fullgraph=True, backend="aot_eager")
    outputs = [call(t, freqs, False) for call in (compiled, FusedRoPEFunc.apply)]
    gradient, wanted = (torch.autograd.grad(y.square().sum(), t)[0] for y in outputs)
    assert_close(gradient, wanted.double())
    assert not [str(each.message) for each in recwarn if "cache" in str(each.message)]


def test_tensor_subclasses_take_operators() -> None:
    """FakeTensor stands for those that have no memory of their own, DTensor among them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _library.implementation("auto"), FakeTensorMode():
        t = torch.randn(4, 2, 3, 8, requires_grad=True)
        output = rope.rotary_embedding(t, torch.rand(4, 1, 1, 8), transpose_output_memory=True)
        assert output.stride() == (24, 96, 8, 1)
        assert torch.autograd.grad(output.sum(), t)[0].stride() == t.stride()
