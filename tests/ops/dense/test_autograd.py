"""Derivatives: gradcheck, derivatives of derivatives, frozen parameters, checkpointing, autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from apex.ops import _library, dense
from apex.ops.dense import reference
from tests.support.harness import Route, assert_close, routes

SHAPES = {
    "dense": ((2, 3, 4), (5, 4), (5,)),
    "no bias": ((2, 3, 4), (5, 4)),
    "gelu": ((3, 4), (6, 4), (6,), (2, 6), (2,)),
    "none": ((2, 3, 4), (5, 4), (3, 5), (5,), (3,)),
    "relu": ((7, 4), (5, 4), (3, 5), (5,), (3,)),
    "sigmoid": ((4,), (5, 4), (3, 5)),
}
NODES: dict[str, Callable[..., Tensor]] = {
    "dense": dense.FusedDenseFunc.apply,
    "no bias": dense.DenseNoBiasFunc.apply,
    "gelu": dense.FusedDenseGeluDenseFunc.apply,
    "none": lambda *args: dense.MlpFunction.apply(True, 0, *args),
    "relu": lambda *args: dense.MlpFunction.apply(1, 1, *args),
    "sigmoid": lambda *args: dense.MlpFunction.apply(0, 2, *args),
}


def tensors(kind: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in SHAPES[kind]
    ]


@pytest.mark.parametrize("kind", NODES)
def test_gradcheck(kind: str) -> None:
    inputs = tensors(kind, dtype=torch.float64)
    assert torch.autograd.gradcheck(NODES[kind], inputs)
    assert torch.autograd.gradgradcheck(NODES[kind], inputs)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("kind", ["gelu", "sigmoid"])
def test_second_derivative_of_a_kernel(kind: str, route: Route) -> None:
    def second(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(function(*inputs).square().sum(), inputs[:2], create_graph=True)
        return torch.autograd.grad(sum(f.square().sum() for f in first), inputs, allow_unused=True)

    inputs = tensors(kind, route.device)
    with _library.implementation(route.implementation):
        actual = second(NODES[kind], inputs)
    plain = reference.dense_gelu_dense if kind == "gelu" else lambda x, *w: reference.mlp(x, w, (), "sigmoid")
    expected = second(plain, [t.detach().double().requires_grad_() for t in inputs])
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, reduction=100)


@pytest.mark.parametrize("route", routes())
def test_one_tensor_as_several_arguments(route: Route) -> None:
    x, weight = (torch.randn(4, 4, device=route.device, requires_grad=True) for _ in range(2))
    for create_graph in (False, True):
        with _library.implementation(route.implementation):
            output = dense.MlpFunction.apply(False, 2, x, weight, weight, weight)
        actual = torch.autograd.grad(output.sum(), (x, weight), create_graph=create_graph)
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        expected = torch.autograd.grad(reference.mlp(wide[0], [wide[1]] * 3, (), "sigmoid").sum(), wide)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, reduction=16)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("kind", ["gelu", "relu"])
def test_only_wanted_gradients_are_computed(kind: str, route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    original = Tensor.mm
    monkeypatch.setattr(Tensor, "mm", lambda *args: products.append(1) or original(*args))
    # Index of the one tensor with a gradient -> matrix products in the backward pass.
    costs = {"gelu": (2, 2, 1, 1, 0), "relu": (2, 2, 1, 1, 0)}[kind]
    full = tensors(kind, route.device)
    with _library.implementation(route.implementation):
        everything = torch.autograd.grad(NODES[kind](*full).sum(), full)
        assert len(products) == 4
        for index, cost in enumerate(costs):
            products.clear()
            inputs = [t.detach().requires_grad_(i == index) for i, t in enumerate(full)]
            (gradient,) = torch.autograd.grad(NODES[kind](*inputs).sum(), inputs[index])
            assert torch.equal(gradient, everything[index])
            assert len(products) == cost


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("kind", ["gelu", "relu"])
def test_checkpointing_and_retained_graphs(kind: str, route: Route) -> None:
    inputs = tensors(kind, route.device)
    with _library.implementation(route.implementation):
        output = NODES[kind](*inputs)
        plain, again = (torch.autograd.grad(output.square().sum(), inputs, retain_graph=True) for _ in range(2))
        later = checkpoint(NODES[kind], *inputs, use_reentrant=False)
        checkpointed = torch.autograd.grad(later.square().sum(), inputs)
    for first, *others in zip(plain, again, checkpointed, strict=True):
        assert all(torch.equal(first, other) for other in others)


def test_one_wide_tensor_is_kept_between_two_layers() -> None:
    inputs = tensors("gelu", "cpu")
    output = NODES["gelu"](*inputs)
    kept = output.grad_fn.saved_tensors
    assert [tuple(each.shape) for each in kept] == [*(tuple(each.shape) for each in inputs), (3, 6)]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("kind", NODES)
def test_the_output_may_be_changed(kind: str, route: Route) -> None:
    """An output that a Function keeps must not be changed; one that it does not keep may be."""
    inputs = [torch.randn(2, *shape, device=route.device) if not i else torch.randn(shape, device=route.device)
              for i, shape in enumerate(SHAPES[kind])]  # fmt: skip
    inputs[1].requires_grad_()
    with _library.implementation(route.implementation):
        output = NODES[kind](*inputs)
        output.mul_(2)
        if kind in ("relu", "sigmoid"):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                output.sum().backward()
        else:
            output.sum().backward()
            assert inputs[1].grad.isfinite().all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype, route: Route) -> None:
    calls = {
        "dense": dense.dense,
        "gelu": dense.dense_gelu_dense,
        "relu": lambda x, w1, w2, b1, b2: dense.mlp(x, [w1, w2], [b1, b2]),
    }
    for kind, call in calls.items():
        inputs = tensors(kind, route.device)
        low = [t.detach().to(dtype).requires_grad_() for t in inputs]
        with _library.implementation(route.implementation):
            with torch.autocast(route.device, dtype=dtype):
                output = call(*inputs)
                gradients = torch.autograd.grad(output.float().sum(), inputs)  # backward under autocast too
                as_given = NODES[kind](*inputs)
                as_given_gradients = torch.autograd.grad(as_given.sum(), inputs)
            plain = call(*low)
            plain_gradients = torch.autograd.grad(plain.float().sum(), low)
        assert output.dtype == dtype
        assert torch.equal(output, plain)
        for actual, expected in zip(gradients, plain_gradients, strict=True):
            assert actual.dtype == torch.float32
            assert torch.equal(actual, expected.float())
        assert as_given.dtype == torch.float32
        exact = call(*[t.detach().double().requires_grad_() for t in inputs])
        assert_close(as_given, exact, reduction=6)
        assert all(g.dtype == torch.float32 for g in as_given_gradients)


@pytest.mark.parametrize("route", routes())
def test_float64_keeps_its_precision(route: Route) -> None:
    if route.implementation == "triton":
        pytest.skip("the kernels take up to float32")
    inputs = tensors("gelu", route.device, torch.float64)
    with _library.implementation(route.implementation), torch.autocast(route.device, dtype=torch.bfloat16):
        output = dense.dense_gelu_dense(*inputs)
    assert output.dtype == torch.float64


@pytest.mark.parametrize("implementation", ["auto", "torch", "triton"])
def test_small_layers_are_left_to_pytorch(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the widest layer; what is asked for is done at any size."""
    if implementation != "torch":
        pytest.importorskip("triton")
    monkeypatch.setattr("apex.ops.dense.config.SMALL", 4 * 8)
    monkeypatch.setattr("apex.ops.dense.config.SMALL_BETWEEN_LAYERS", 4 * 8)
    monkeypatch.setattr(_library, "runs_triton", lambda family, tensor: implementation != "torch")
    with _library.implementation(implementation):
        for rows, node in ((4, implementation != "torch"), (3, implementation == "triton")):
            x = torch.randn(rows, 2, requires_grad=True)
            outputs = (
                dense.dense_gelu_dense(x, torch.randn(8, 2), None, torch.randn(3, 8), None),
                dense.mlp(x, [torch.randn(8, 2), torch.randn(3, 8)]),
            )
            names = [output.grad_fn.name() for output in outputs]
            wanted = ["FusedDenseGeluDenseFuncBackward", "MlpFunctionBackward"]
            assert [a == b for a, b in zip(names, wanted, strict=True)] == [node, node]
            with torch.no_grad():
                again = dense.mlp(x, [torch.ones(8, 2), torch.ones(3, 8)])
            assert again.grad_fn is None


@pytest.mark.gpu
def test_cuda_graph() -> None:
    shapes = ((4096, 512), (1024, 512), (1024,), (512, 1024), (512,))
    # Small enough that sums over 4096 rows stay below float16's largest number.
    inputs = [(torch.randn(shape, device="cuda") / 16).half().requires_grad_() for shape in shapes]
    total = torch.zeros(1024, 512, device="cuda")

    def step() -> tuple[Tensor, ...]:
        output = dense.dense_gelu_dense(*inputs)
        gradients = torch.autograd.grad(output, inputs, torch.ones_like(output))
        dense.wgrad_gemm_accum(inputs[0].detach(), torch.ones(4096, 1024, device="cuda").half(), total)
        return output, *gradients

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    once = total.clone()
    graph.replay()
    graph.replay()
    for actual, wanted in zip(results, expected, strict=True):
        assert (actual.double() - wanted.double()).norm() <= 1e-3 * wanted.double().norm()
    # Tensor cores add in a little less than float32.
    assert (total.double() - 3 * once.double()).norm() <= 1e-5 * (3 * once.double()).norm()
