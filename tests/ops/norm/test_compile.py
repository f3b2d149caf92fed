"""The norms under torch.compile, opcheck and CUDA graphs."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction, FusedRMSNormAffineFunction
from apex.ops import _library, norm
from tests.support.harness import Route, assert_close, routes


def test_opcheck_with_a_wider_weight() -> None:
    x, weight = torch.randn(4, 40), torch.rand(40, dtype=torch.float64)
    with _library.implementation("torch"):
        for subtract_mean in (True, False):
            settings = (40, 1e-5, subtract_mean, False, torch.float64, torch.float32)
            torch.library.opcheck(torch.ops.apex.norm.default, (x, weight, None, *settings))


@pytest.mark.parametrize("route", routes())
def test_compiled_modules_without_graph_breaks(route: Route) -> None:
    modules = [
        FusedLayerNorm(48),
        FusedRMSNorm(48),
        FusedLayerNorm(48, memory_efficient=True),
        FusedRMSNorm(48, elementwise_affine=False),
        MixedFusedLayerNorm(48),
        MixedFusedRMSNorm(48, memory_efficient=True),
    ]
    x = torch.randn(6, 48, device=route.device, requires_grad=True)
    inputs = [x, *(param for module in modules for param in module.to(route.device).parameters())]

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([module(x + index) for index, module in enumerate(modules)])

    # Generated C++ would need a compiler; on a GPU the generated code is Triton.
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        expected = function(x)
        expected_gradients = torch.autograd.grad(expected.sin().sum(), inputs)
        compiled = torch.compile(function, fullgraph=True, backend=backend)(x)
        gradients = torch.autograd.grad(compiled.sin().sum(), inputs)
    assert_close(compiled, expected.double())
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, wanted.double(), reduction=6)


@pytest.mark.parametrize("route", routes())
def test_compiled_autograd_functions(route: Route) -> None:
    """Clients call these by name inside models that they compile."""
    x = torch.randn(6, 48, device=route.device, requires_grad=True)
    weight, bias = (torch.rand(48, device=route.device, requires_grad=True) for _ in range(2))

    def function(x, weight, bias):
        y = FusedLayerNormAffineFunction.apply(x, weight, bias, (48,), 1e-5, False)
        return FusedRMSNormAffineFunction.apply(y, weight, (48,), 1e-5, True).sin()

    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        expected = torch.autograd.grad(function(x, weight, bias).sum(), (x, weight, bias))
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        actual = torch.autograd.grad(compiled(x, weight, bias).sum(), (x, weight, bias))
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e.double(), reduction=6)


@pytest.mark.parametrize("route", routes())
def test_the_operator_refuses_a_second_derivative(route: Route) -> None:
    x = torch.randn(4, 24, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        output = torch.ops.apex.norm(x, None, None, 24, 1e-5, True, False, torch.float32, torch.float32)[0]
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivative only"):
            torch.autograd.grad(first.square().sum(), x)


def test_tensor_subclasses_take_operators() -> None:
    """FakeTensor stands for those that have no memory of their own, DTensor among them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _library.implementation("auto"), FakeTensorMode():
        x = torch.randn(4, 24, requires_grad=True)
        for memory_efficient in (False, True):
            output = norm.layer_norm(x, 24, memory_efficient=memory_efficient)
            assert output.shape == (4, 24)
            assert torch.autograd.grad(output.sum(), x)[0].shape == (4, 24)
    with _library.implementation("triton"), FakeTensorMode():
        x = torch.randn(4, 24)
        with pytest.raises(RuntimeError, match="FakeTensor"):
            norm.layer_norm(x, 24)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_compiled_norms_of_permuted_inputs_are_left_to_inductor(route: Route, memory_efficient: bool) -> None:
    """The kernels would need a copy of the input, which Inductor reads as it lies."""
    seen: list[str] = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    image = torch.randn(2, 8, 3, 3, device=route.device, requires_grad=True)
    layer = FusedLayerNorm(8, memory_efficient=memory_efficient).to(route.device)

    def function(x):
        return layer(x).sin().sum()

    with _library.implementation(route.implementation):
        for x, is_opaque in ((image.permute(0, 2, 3, 1), False), (torch.randn(4, 8, device=route.device), True)):
            seen.clear()
            torch._dynamo.reset()
            compiled = torch.compile(function, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
            assert_close(compiled(x), function(x).double())
            has_operator = is_opaque and (memory_efficient or route.implementation == "triton")
            assert any("apex" in target for target in seen) == has_operator
