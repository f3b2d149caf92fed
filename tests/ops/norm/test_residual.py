"""Norms that add a residual and a bias on the way, against the same in float64 with PyTorch's operators."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.ops import _library, norm
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")
KERNELS = [route for route in routes() if route.id != "cpu-torch"]


def expected(tensors: list[Tensor | None], gradients: list[Tensor], subtract_mean: bool) -> list[Tensor]:
    """Norm, sum and the gradients of the tensors, in float64."""
    wide = [None if t is None else t.detach().cpu().double().requires_grad_() for t in tensors]
    branch, residual, added, weight, bias = wide
    total = residual + branch + (0 if added is None else added)
    shape = total.shape[-1:]
    output = F.layer_norm(total, shape, weight, bias) if subtract_mean else F.rms_norm(total, shape, weight, 1e-5)
    given = [gradient.cpu().double() for gradient in gradients]
    torch.autograd.backward((output, total), given)
    return [output, total, *(t.grad for t in wide if t is not None)]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("memory_efficient", [True, False])
@pytest.mark.parametrize(
    ("shape", "subtract_mean", "with_bias"),
    [((2, 9, 96), True, True), ((24, 64), False, True), ((5, 100), True, False), ((3, 2200), False, False)],
)
def test_norm_of_a_sum(
    shape: tuple[int, ...], subtract_mean: bool, with_bias: bool, memory_efficient: bool, route: Route
) -> None:
    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=route.device)

    width = shape[-1]
    parameters = [random(width) if with_bias else None, random(width).abs() + 0.5, random(width)]
    if not subtract_mean:
        parameters[2] = None
    tensors = [random(*shape), random(*shape), *parameters]
    inputs = [None if t is None else t.requires_grad_() for t in tensors]
    gradients = [random(*shape), random(*shape)]
    with _library.implementation(route.implementation):
        results = norm.add_norm(
            *inputs[:3], width, *inputs[3:], subtract_mean=subtract_mean, memory_efficient=memory_efficient
        )
        torch.autograd.backward(results, gradients)
    found = [*results, *(t.grad for t in inputs if t is not None)]
    rows = results[0].numel() // width
    for actual, exact in zip(found, expected(tensors, gradients, subtract_mean), strict=True):
        assert_close(actual, exact, reduction=1 if actual.dim() > 1 else rows)


@pytest.mark.parametrize("route", KERNELS)
def test_compiled_modules_give_the_gradients_of_eager_ones(route: Route) -> None:
    first = FusedLayerNorm(48, memory_efficient=True).to(route.device)
    second = FusedRMSNorm(48, memory_efficient=True).to(route.device)
    branch, residual = torch.randn(2, 6, 48, device=route.device)
    bias = torch.randn(48, device=route.device, requires_grad=True)
    inputs = [branch.requires_grad_(), residual.requires_grad_(), bias, *first.parameters(), *second.parameters()]

    def loss(branch: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
        output, total = first(branch, residual, bias)
        output, total = second(output, total)
        return (output * total.sin()).sum()

    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        found = [
            torch.autograd.grad(function(*inputs[:3]), inputs)
            for function in (loss, torch.compile(loss, fullgraph=True, backend=backend))
        ]
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("route", routes())
def test_the_sum_is_normalised_as_it_is_returned(route: Route) -> None:
    """In half precision the norm is that of the rounded sum, so that a later norm of the sum gives the same."""
    branch, residual = torch.randn(2, 8, 64, device=route.device).bfloat16()
    weight, bias = torch.rand(2, 64, device=route.device).bfloat16()
    with torch.no_grad(), _library.implementation(route.implementation):
        output, total = norm.add_norm(branch, residual, None, 64, weight, bias, subtract_mean=True)
        again = norm.layer_norm(total, 64, weight, bias)
    assert_equal_bits([output], [again])


@pytest.mark.parametrize("route", KERNELS)
def test_parameters_that_kernels_do_not_take(route: Route) -> None:
    branch, residual = torch.randn(2, 8, 64, device=route.device)
    wide = torch.rand(128, device=route.device)
    for weight in (wide[::2], wide[:64].double()):
        with _library.implementation(route.implementation):
            output, total = norm.add_norm(branch, residual, wide[1::2], 64, weight, subtract_mean=False)
        assert_close(total, branch.double() + residual + wide[1::2])
        assert_close(output, F.rms_norm(total.double(), (64,), weight.double(), 1e-5))


def test_shapes_that_do_not_fit_are_refused() -> None:
    layer = FusedLayerNorm(8)
    with pytest.raises(ValueError, match=r"residual has shape \[3, 8\]"):
        layer(torch.ones(2, 8), torch.ones(3, 8))
    with pytest.raises(ValueError, match=r"added bias \[4\]"):
        layer(torch.ones(2, 8), torch.ones(2, 8), torch.ones(4))


@pytest.mark.parametrize("autocast", [True, False])
def test_addends_that_do_not_fit_are_refused(autocast: bool) -> None:
    """Under autocast too, where PyTorch would broadcast them; and a bias is not forgotten where it has no residual."""
    x = torch.ones(2, 8)
    for layer in (FusedLayerNorm(8), FusedRMSNorm(8)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            with pytest.raises(ValueError, match=r"residual has shape \[8\]"):
                layer(x, x[0])
            with pytest.raises(ValueError, match="residual is on meta, the input on cpu"):
                layer(x, x.to("meta"))
            with pytest.raises(ValueError, match="input_bias is on meta, the input on cpu"):
                layer(x, x, x[0].to("meta"))
            with pytest.raises(TypeError, match="residual must be a tensor, got NoneType"):
                layer(x, input_bias=x[0])
            with pytest.raises(TypeError, match="input_bias must be a tensor or None, got float"):
                layer(x, x, 1.0)


def test_autocast_adds_in_the_dtype_of_the_residual() -> None:
    layer, branch, residual = FusedLayerNorm(8), torch.randn(2, 8).bfloat16(), torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, total = layer(branch, residual)
    assert (output.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert_close(total, branch.double() + residual.double())


def test_inductor_need_not_write_out_what_leads_to_an_operator() -> None:
    """It does, before PyTorch 2.13, for operators that it does not know, in time that doubles with every such norm."""
    lowering = pytest.importorskip("torch._inductor.lowering")
    if not hasattr(lowering, "tag_to_layout_constraint"):
        pytest.skip("PyTorch 2.6 and 2.7 have no such layout constraints")
    lowering.lowerings.pop(torch.ops.apex.add_norm.default, None)
    with FakeTensorMode():
        x, weight = torch.empty(6, 40), torch.empty(40)
        torch.ops.apex.add_norm(x, x, None, weight, None, 40, 1e-5, False, True)
    assert torch.ops.apex.add_norm.default in lowering.lowerings
