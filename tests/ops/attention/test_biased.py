"""Attention with mask and bias against the float64 reference, by every route, with uninitialised memory full of NaN."""

import math

import pytest
import torch
from torch import Tensor

from apex.ops import _library
from apex.ops._device import forget_launches
from apex.ops.attention import attention, config, op_biased, reference
from tests.ops.attention.cases import BIASED_CASES, SHARED_CASES, BiasedCase, assert_close
from tests.support.harness import Route, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAMES = ("dquery", "dkey", "dvalue", "dbias")


def by_hand(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    """An independent formula: einsum and exponentials."""
    logits = torch.einsum("...md,...nd->...mn", query, key) / math.sqrt(query.shape[-1]) + bias
    weights = logits.masked_fill(mask == 0, -math.inf).exp()
    return torch.einsum("...mn,...nd->...md", weights, value) / weights.sum(-1, keepdim=True)


def run(inputs: list[Tensor], mask: Tensor | None, dout: Tensor, function=attention) -> tuple[Tensor, tuple]:
    """Output and gradients."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    output = function(*leaves[:3], mask, leaves[3] if len(leaves) > 3 else None)
    return output, torch.autograd.grad(output, leaves, dout)


def exact(inputs: list[Tensor], mask: Tensor | None, dout: Tensor) -> tuple[Tensor, tuple]:
    wide = [t.double().cpu() for t in inputs]
    return run(wide, None if mask is None else mask.double().cpu(), dout.double().cpu(), reference.attention)


def check(case: BiasedCase, route: Route) -> None:
    inputs, mask, dout = case.tensors(route.device)
    expected, expected_gradients = exact(inputs, mask, dout)
    with _library.implementation(route.implementation):
        output, gradients = run(inputs, mask, dout)
    assert output.dtype == case.dtype
    assert_close(output, expected, "output")
    for name, actual, wanted, given in zip(NAMES, gradients, expected_gradients, inputs, strict=False):
        assert actual.dtype == given.dtype
        assert_close(actual, wanted, name, case.dtype)


def test_the_reference_is_the_formula() -> None:
    inputs, mask, dout = BIASED_CASES[2].tensors("cpu")
    inputs, mask, dout = [t.double() for t in inputs], mask.double(), dout.double()
    expected, expected_gradients = run(inputs, mask, dout, by_hand)
    actual, gradients = run(inputs, mask, dout, reference.attention)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", BIASED_CASES, ids=str)
def test_matches_reference(case: BiasedCase, route: Route) -> None:
    check(case, route)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("case", SHARED_CASES, ids=str)
def test_ways_to_share(case: BiasedCase, route: Route) -> None:
    check(case, route)


@pytest.mark.parametrize("case", SHARED_CASES[3:6], ids=str)
def test_ways_to_share_in_the_interpreter(case: BiasedCase) -> None:
    pytest.importorskip("triton")
    check(case, Route("cpu", "triton"))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("at_once", [1, 2, 4, 8])
def test_the_sum_over_batches_is_taken_in_parts(route: Route, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group that three batches share each, and of several groups at once."""
    case = BiasedCase("", (2, 3, 1, 4, 4), 5, (2, 3, 1, 1, 5), (2, 1, 1, 4, 5))
    monkeypatch.setattr("apex.ops.attention.config.STORED_BYTES", at_once * 4 * 5 * 4)
    check(case, route)


@pytest.mark.parametrize("route", routes())
def test_rows_without_keys_average_all_values(route: Route) -> None:
    """1e9 is so large that float32 forgets the logits beside it: what OpenFold's own formula gives."""
    inputs, mask, dout = BIASED_CASES[4].tensors(route.device)
    inputs, mask, dout = [t.float() for t in inputs], mask.float(), dout.float()
    mask[1] = 0
    expected, expected_gradients = run([t.cpu() for t in inputs], mask.cpu(), dout.cpu(), reference.attention)
    with _library.implementation(route.implementation):
        output, gradients = run(inputs, mask, dout)
    assert_close(output[1], inputs[2][1].mean(-2, keepdim=True).expand_as(output[1]), "output")
    assert_close(output, expected, "output")
    for name, actual, wanted in zip(NAMES, gradients, expected_gradients, strict=True):
        assert_close(actual, wanted, name)


@pytest.mark.parametrize("route", routes())
def test_bias_of_minus_infinity(route: Route) -> None:
    """Whole tiles of it, as a causal or a local mask has them."""
    query, key, value = (torch.randn(1, 1, 40, 16, device=route.device) for _ in range(3))
    bias = torch.zeros(1, 1, 40, 40, device=route.device)
    bias[..., :33] = -math.inf
    with _library.implementation(route.implementation):
        output, (dquery, *_) = run([query, key, value], None, value, lambda *a: attention(*a[:3], None, bias))
    wide = [t.double().cpu() for t in (query, key[..., 33:, :], value[..., 33:, :])]
    expected, (expected_dquery, *_) = exact(wide, None, value)
    assert_close(output, expected)
    assert_close(dquery, expected_dquery)


@pytest.mark.parametrize("route", routes())
def test_strided_tensors(route: Route) -> None:
    """Heads behind lengths, as projections leave them; slices; gradients that are expanded."""
    packed = torch.randn(2, 20, 2, 3 * 24, device=route.device)
    query, key, value = packed[..., 3:51].transpose(1, 2).unflatten(-1, (3, 16)).unbind(-2)
    bias = torch.randn(20, 20, 2, device=route.device).permute(2, 0, 1)[None]
    mask = (torch.rand(20, 2, device=route.device) > 0.3).t()[:, None, None].float()
    mask[..., 0] = 1
    dout = torch.ones((), device=route.device).expand(2, 2, 20, 16)
    expected, expected_gradients = exact([query, key, value, bias], mask, dout)
    with _library.implementation(route.implementation):
        output, gradients = run([query, key, value, bias], mask, dout)
    assert_close(output, expected, "output")
    for name, actual, wanted in zip(NAMES, gradients, expected_gradients, strict=True):
        assert_close(actual, wanted, name)


@pytest.mark.parametrize("route", routes())
def test_the_output_is_laid_out_like_the_query(route: Route) -> None:
    """So that heads can be joined again without a copy."""
    query, key, value = (torch.randn(3, 20, 2, 16, device=route.device).transpose(1, 2) for _ in range(3))
    with _library.implementation(route.implementation):
        output = attention(query, key, value, None, torch.zeros(1, 2, 20, 20, device=route.device))
    if route.implementation == "triton":
        assert output.transpose(1, 2).is_contiguous()
    output.add_(1)  # is no view that autograd would guard


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_masks_of_other_dtypes(route: Route) -> None:
    inputs, mask, _ = BIASED_CASES[2].tensors(route.device)
    with _library.implementation(route.implementation):
        expected = attention(*inputs[:3], mask, inputs[3])
        for dtype in (torch.bool, torch.int64, torch.float64):
            assert_close(attention(*inputs[:3], mask.to(dtype), inputs[3]), expected)


@pytest.mark.parametrize("route", routes())
def test_masks_and_biases_of_two_dtypes_one_after_the_other(route: Route) -> None:
    """Launches are kept; those for one dtype must not be taken for the other."""
    query, key, value = (torch.randn(2, 1, 8, 16, device=route.device, dtype=torch.float16) for _ in range(3))
    mask = (torch.arange(8, device=route.device) < 6).expand(2, 1, 1, 8)
    bias = torch.randn(1, 1, 8, 8, device=route.device).bfloat16()
    dtypes = torch.float32, torch.bfloat16
    with _library.implementation(route.implementation):
        found = [attention(query, key, value, mask.to(a), bias.to(b)) for a in dtypes for b in dtypes]
    for output in found[1:]:
        assert_close(output, found[0])


@pytest.mark.parametrize("route", routes())
def test_frozen_bias_costs_no_launch(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_biased, "dquery_dbias_launch", lambda *arguments: pytest.fail("launched"))
    forget_launches()
    inputs, mask, dout = BIASED_CASES[2].tensors(route.device)
    query = inputs[0].requires_grad_()
    with _library.implementation(route.implementation):
        output = attention(query, *inputs[1:3], mask, inputs[3])
        assert torch.autograd.grad(output, query, dout)[0].shape == query.shape


@pytest.mark.parametrize("route", [r for r in routes() if r.id in ("interpreter", "gpu-triton")])
@pytest.mark.parametrize("length", [17, 131])
def test_odd_rows_of_the_bias_are_copied(route: Route, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass reads the copy, whose rows are longer, and gives the same bits."""
    query, key, value = (torch.randn(2, 2, length, 16, device=route.device, dtype=torch.float16) for _ in range(3))
    bias = torch.randn(1, 2, length, length, device=route.device, dtype=torch.float16)
    outputs = []
    with _library.implementation(route.implementation):
        for copies in (False, True):
            monkeypatch.setattr(config, "padded_bias", lambda *sizes, copies=copies: 8 * -(-length // 8) * copies)
            forget_launches()
            outputs.append(attention(query, key, value, None, bias))
    forget_launches()
    assert_equal_bits(outputs[:1], outputs[1:])


def double_inputs() -> tuple[Tensor, ...]:
    shapes = ((2, 1, 3, 4), (2, 1, 5, 4), (2, 1, 5, 4), (1, 1, 3, 5))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


@pytest.mark.parametrize("route", routes())
def test_second_derivative(route: Route) -> None:
    """Of the autograd node itself, which the public function takes where there are kernels."""
    inputs = [t.detach().float().to(route.device).requires_grad_() for t in double_inputs()]
    mask = torch.tensor([1.0, 1, 0, 1, 1], device=route.device)

    def second(function, inputs, mask):
        output = function(*inputs[:3], mask, inputs[3], 1e9)
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    with _library.implementation(route.implementation):
        actual = second(op_biased.ATTENTION.differentiable, inputs, mask)
    wide = [t.detach().cpu().double().requires_grad_() for t in inputs]
    for a, e in zip(actual, second(reference.attention, wide, mask.double().cpu()), strict=True):
        assert_close(a, e)


@pytest.mark.parametrize("route", routes())
def test_autocast_computes_in_its_dtype(route: Route) -> None:
    inputs, mask, dout = BIASED_CASES[2].tensors(route.device)
    half = [t.to(torch.bfloat16) for t in inputs[:3]]
    with _library.implementation(route.implementation):
        expected = attention(*half, mask, inputs[3])
        with torch.autocast(route.device, dtype=torch.bfloat16):
            output, gradients = run(inputs, mask, dout.to(torch.bfloat16))
    assert output.dtype == torch.bfloat16
    assert_close(output, expected)
    assert all(g.dtype == torch.float32 for g in gradients)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": (8, 4)}, "query and key"),
        ({"key": (2, 3, 6, 8)}, "differ in their length only"),
        ({"value": (2, 2, 7, 8)}, "value has shape"),
        ({"mask": (3, 1, 1, 6)}, "mask has shape"),
        ({"bias": (1, 2, 2, 5, 6)}, "bias has shape"),
    ],
)
def test_shapes_that_do_not_fit(changes: dict, message: str) -> None:
    shapes = {"query": (2, 2, 5, 8), "key": (2, 2, 6, 8), "value": (2, 2, 6, 8), **changes}
    with pytest.raises(ValueError, match=message):
        attention(**{name: torch.zeros(shape) for name, shape in shapes.items()})


def test_dtypes_that_do_not_fit() -> None:
    query, key, value = (torch.zeros(1, 2, 5, 8) for _ in range(3))
    with pytest.raises(TypeError, match=r"key is torch.float16"):
        attention(query, key.half(), value)
    with pytest.raises(TypeError, match="floating-point"):
        attention(query.int(), key.int(), value.int())
    with pytest.raises(ValueError, match="value is on meta"):
        attention(query, key, value.to("meta"))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    """Queries and logits both; only the last batch is looked at."""
    batches, length, head = (1 << 31) // (256 * 64) + 3, 256, 64
    query = torch.randn(batches, 1, length, head, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(1, 1, length, length, device="cuda", dtype=torch.bfloat16)
    output, statistics = op_biased.launch_forward(query, query, query, None, bias, 1e9)
    wanted = (True, True, True, False)
    dquery, dkey, dvalue, _ = op_biased.launch_backward(
        query, query, query, query, None, bias, output, statistics, 1e9, wanted
    )
    last = query[-1:]
    expected, gradients = exact([last, last, last, bias], None, last)
    assert_close(output[-1:], expected)
    for actual, wanted in zip((dquery, dkey, dvalue), gradients, strict=False):
        assert_close(actual[-1:], wanted)


@pytest.mark.parametrize("route", [r for r in routes() if r.id in ("interpreter", "gpu-triton")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_that_the_bias_hides_altogether(route: Route, dtype: torch.dtype) -> None:
    """Nothing is left of their logits beside 1e9: they give the average of all values, and its gradient."""
    query, key, value = (torch.randn(2, 2, 5, 8, device=route.device).to(dtype).requires_grad_() for _ in range(3))
    bias = torch.zeros(2, 2, 5, 5, device=route.device)
    bias[:, :, 1] = -1e9
    with _library.implementation(route.implementation):
        output = attention(query, key, value, None, bias)
        dquery, dkey, dvalue = torch.autograd.grad(output[:, :, 1].sum(), (query, key, value))
    assert_close(output[:, :, 1], value.detach().mean(2))
    assert_close(dvalue, torch.full_like(dvalue, 0.2))
    assert dquery.isfinite().all()
    assert dkey.isfinite().all()
