"""What a declared op does under autograd and torch.func, whatever it computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.ops import _library, glu, norm
from apex.ops._op import Kernels, Op, Saved
from apex.ops.index_mul import INDEX_MUL
from tests.support.harness import Route, routes


def _gated(input: Tensor, bias: Tensor) -> Tensor:
    gate, value = (input + bias).chunk(2, -1)
    return functional.silu(gate) * value


def _derivatives(function: Callable[[Tensor, Tensor], Tensor], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """First and second derivative with an argument that is computed from the other."""
    input = torch.linspace(-1, 1, 24, device=device).reshape(3, 8).requires_grad_()
    output = function(input, input.sum(0) / 2)
    (first,) = torch.autograd.grad(output.square().sum(), input, create_graph=True)
    return first.cpu(), torch.autograd.grad(first.square().sum(), input)[0].cpu()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    ("op", "formula"),
    [
        (glu.bias_glu, _gated),
        (
            lambda input, _: INDEX_MUL.differentiable(input, input, torch.arange(3, device=input.device)),
            lambda input, _: input * input,
        ),
        (
            lambda input, weight: norm.layer_norm(input, 8, weight, weight),
            lambda x, w: functional.layer_norm(x, (8,), w, w),
        ),
    ],
    ids=["glu", "index_mul", "norm"],
)
def test_arguments_that_depend_on_each_other_are_differentiated_once(route: Route, op, formula) -> None:  # type: ignore[no-untyped-def]
    with _library.implementation(route.implementation):
        found = _derivatives(op, route.device)
    for actual, expected in zip(found, _derivatives(formula), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_errors_name_the_op_of_a_node() -> None:
    input = torch.randn(4, 8, requires_grad=True)
    output = norm.layer_norm(input, 8, memory_efficient=True)
    assert output.grad_fn is not None
    assert output.grad_fn.name() == "NormBackward"
    output.mul_(2)
    with pytest.raises(RuntimeError, match=r"inplace operation.*output 0 of Norm(Backward)?,"):
        output.sum().backward()


def test_a_node_gives_way_to_transforms_of_torch_func() -> None:
    input, weight = torch.randn(2, 4, 8), torch.rand(8) + 0.5

    def memory_efficient(rows: Tensor) -> Tensor:
        return norm.layer_norm(rows, 8, weight, memory_efficient=True)

    def plain(rows: Tensor) -> Tensor:
        return functional.layer_norm(rows, (8,), weight)

    for transform in (
        torch.func.vmap,
        lambda function: torch.func.grad(lambda rows: function(rows).square().sum()),
        lambda function: lambda rows: torch.func.jvp(function, (rows,), (rows.cos(),))[1],
    ):
        torch.testing.assert_close(transform(memory_efficient)(input), transform(plain)(input))


def test_tensors_come_first_in_a_schema() -> None:
    nothing = lambda *arguments: None  # noqa: E731
    declared = {"reference": nothing, "kernels": Kernels(nothing, nothing), "shapes": nothing, "saved": Saved()}
    with pytest.raises(ValueError, match="wrong must name its tensors first"):
        Op(glu.FAMILY, "wrong(int size, Tensor input) -> Tensor", **declared)
