"""Half precision on a CPU: statistics and sums of gradients keep float32's digits."""

import pytest
import torch
from torch.autograd import forward_ad

from apex.ops import norm
from tests.support.harness import assert_close

ROWS, COLUMNS = 1030, 64  # more than the smallest input that takes this way


def tensors(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> list[torch.Tensor | None]:
    """Input, weight, bias and gradient; the mean of a row is as large as its deviation."""
    generator = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(ROWS // 2, 2, COLUMNS, generator=generator).to(dtype) for _ in range(2))
    parameters = [
        None if weight_dtype is None else torch.rand(COLUMNS, generator=generator).add(0.5).to(weight_dtype)
        for _ in range(2)
    ]
    return [values + 1, *parameters, gradient]


def results(function, values, weight, bias, gradient):
    leaves = [t.detach().requires_grad_() for t in (values, weight, bias) if t is not None]
    output = function(*leaves)
    return output, *torch.autograd.grad(output, leaves, gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", ["same", torch.float32, None])
def test_sums_in_float32(dtype: torch.dtype, weight_dtype: torch.dtype | str | None) -> None:
    given = tensors(dtype, dtype if weight_dtype == "same" else weight_dtype)
    actual = results(lambda x, w=None, b=None: norm.layer_norm(x, COLUMNS, w, b), *given)
    wide = [None if t is None else t.double() for t in given]
    expected = results(lambda x, *p: torch.nn.functional.layer_norm(x, (COLUMNS,), *p), *wide)
    for a, e, terms in zip(actual, expected, (1, 1, ROWS, ROWS), strict=False):
        assert_close(a, e, reduction=terms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"])
def test_does_not_ask_what_new_tensors_are_by_default(dtype: torch.dtype, default: torch.dtype | str) -> None:
    values, _, _, gradient = tensors(dtype, None)
    expected = results(lambda x: norm.layer_norm(x, COLUMNS), values, None, None, gradient)
    set_default = torch.set_default_device if default == "meta" else torch.set_default_dtype
    try:
        set_default(default)
        actual = results(lambda x: norm.layer_norm(x, COLUMNS), values, None, None, gradient)
    finally:
        set_default(None if default == "meta" else torch.float32)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("frozen", ["input", "weight", "bias", "parameters"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_takes_only_the_gradients_that_are_wanted(frozen: str, dtype: torch.dtype) -> None:
    values, weight, bias, gradient = tensors(dtype, dtype)
    named = {"input": values, "weight": weight, "bias": bias}
    everything = results(lambda x, w, b: norm.layer_norm(x, COLUMNS, w, b), *named.values(), gradient)[1:]
    wanted = [name for name in named if name != frozen and (frozen != "parameters" or name == "input")]
    for name in named:
        named[name] = named[name].detach().requires_grad_(name in wanted)
    output = norm.layer_norm(named["input"], COLUMNS, named["weight"], named["bias"])
    gradients = torch.autograd.grad(output, [named[name] for name in wanted], gradient)
    for name, some, of_all in zip(wanted, gradients, (everything[list(named).index(n)] for n in wanted), strict=True):
        torch.testing.assert_close(some, of_all, msg=name)


def test_second_derivative() -> None:
    values, weight, bias, _ = tensors(torch.bfloat16, torch.bfloat16)

    def penalty(x, w, b):
        (first,) = torch.autograd.grad(norm.layer_norm(x, COLUMNS, w, b).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, w))

    actual = penalty(*(t.detach().requires_grad_() for t in (values, weight, bias)))
    expected = penalty(*(t.detach().double().requires_grad_() for t in (values, weight, bias)))
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).norm() <= 0.02 * e.norm()


def test_leaves_other_ways_to_differentiate_to_pytorch() -> None:
    values, weight, bias, tangent = tensors(torch.bfloat16, torch.bfloat16)

    def function(x):
        return norm.layer_norm(x, COLUMNS, weight, bias)

    wide = [t.double() for t in (values, weight, bias, tangent)]
    _, expected = torch.func.jvp(
        lambda x: torch.nn.functional.layer_norm(x, (COLUMNS,), wide[1], wide[2]), (wide[0],), (wide[3],)
    )
    assert_close(torch.func.jvp(function, (values,), (tangent,))[1], expected)
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(values, tangent))
        assert_close(forward_ad.unpack_dual(dual).tangent, expected)
    gradient = torch.func.grad(lambda x: function(x).float().square().sum())(values)
    assert gradient.shape == values.shape


def test_refuses_bad_arguments_as_every_norm_does() -> None:
    values, weight, bias, _ = tensors(torch.bfloat16, torch.bfloat16)
    with pytest.raises(ValueError, match="weight has shape"):
        norm.layer_norm(values, COLUMNS, weight[:-1], bias)
    with pytest.raises(ValueError, match="trailing dimensions"):
        norm.layer_norm(values, COLUMNS - 1, weight, bias)
