"""float8 copies of matrices: the kernels' against PyTorch's roundings, and products of the copies."""

from __future__ import annotations

import pytest
import torch

from apex.ops import _library, float8
from apex.ops.float8 import reference, scales
from tests.support.harness import opcheck, routes

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def cast(input, by_row, dtype):
    return float8.cast_both(input, float8.amax(input, by_row), by_row, dtype)


def matrix(shape, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.tensor([1.0, 30.0, 1e-3])[seed % 3]).to(device, dtype)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("by_row", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(64, 128), (70, 33), (1, 1), (3, 500), (200, 16)])
def test_copies_have_the_bits_of_pytorchs(shape, dtype, by_row, route):
    device = route.device
    for seed, number in enumerate(FORMATS):
        input = matrix(shape, dtype, device, seed)
        with _library.implementation(route.implementation):
            found = cast(input, by_row, number)
        copy, transposed, inverse, turned_inverse = found
        if by_row:
            expected, expected_inverse = reference.cast(input, input.abs().amax(1, keepdim=True), number)
            turned, expected_turned = reference.cast(input.t(), input.t().abs().amax(1, keepdim=True), number)
        else:
            expected, expected_inverse = reference.cast(input, input.abs().amax(), number)
            turned, expected_turned = expected.t(), expected_inverse
        assert copy.dtype == transposed.dtype == number
        assert transposed.shape == shape[::-1]
        assert torch.equal(copy.float(), expected.float())
        assert torch.equal(transposed.float(), turned.float())
        assert torch.equal(inverse, expected_inverse)
        assert torch.equal(turned_inverse, expected_turned)
        # Half a step of the format at most, and numbers too small for it.
        steps = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}[number]
        smallest = inverse.double() * torch.finfo(number).smallest_normal
        error = (copy.double() * inverse - input.double()).abs()
        assert (error <= steps * (input.double().abs() + smallest) * 1.001).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("by_row", [False, True], ids=["tensorwise", "rowwise"])
def test_numbers_halfway_between_two(by_row, route):
    """With 5.25 as the largest magnitude a third of all numbers of bfloat16 are: one bit of the scale decides them."""
    input = (torch.arange(-168, 168).view(16, 21) / 32).to(route.device, torch.bfloat16)
    input[:, 0] = 5.25
    with _library.implementation(route.implementation):
        found = cast(input, by_row, torch.float8_e4m3fn)
    expected = reference.cast_both(input, reference.amax(input, by_row), by_row, torch.float8_e4m3fn)
    assert torch.equal(found[0].float(), expected[0].float())
    assert torch.equal(found[1].float(), expected[1].float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="sizes for a GPU")
@pytest.mark.parametrize("by_row", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(256, 128), (2048, 4096), (1000, 4112)])
def test_many_tiles(shape, dtype, by_row):
    for number in FORMATS:
        input = matrix(shape, dtype, "cuda")
        for found, expected in zip(
            cast(input, by_row, number),
            reference.cast_both(input, reference.amax(input, by_row), by_row, number),
            strict=True,
        ):
            assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("by_row", [False, True], ids=["tensorwise", "rowwise"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value, by_row, route):
    device = route.device
    input = matrix((32, 48), torch.bfloat16, device)
    input[3, 5] = value
    with _library.implementation(route.implementation):
        copy, transposed, inverse, _ = cast(input, by_row, torch.float8_e4m3fn)
    back = copy.float() * inverse
    assert not back[3, 5].isfinite()
    assert not transposed.float()[5, 3].isfinite()
    if by_row:
        assert back[4:].isfinite().all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("by_row", [False, True], ids=["tensorwise", "rowwise"])
def test_zeros(by_row, route):
    device = route.device
    input = torch.zeros(16, 32, dtype=torch.bfloat16, device=device)
    with _library.implementation(route.implementation):
        copy, transposed, inverse, turned = float8.cast_both(
            input, float8.amax(input, by_row), by_row, torch.float8_e5m2
        )
    assert not copy.float().any()
    assert not transposed.float().any()
    assert inverse.isfinite().all()
    assert (turned > 0).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("dtype", "smallest"), [(torch.float8_e4m3fn, 2e-18), (torch.float8_e5m2, 1e-22)])
def test_below_the_smallest_scale_numbers_lose_digits_and_become_zeros(dtype, smallest, route):
    """docs/fp8.md has these numbers."""
    for magnitude, remains in ((1e-11, 1.0), (2 * smallest, 0.5), (smallest / 2, 0.0)):
        input = torch.full((16, 32), magnitude, dtype=torch.float32, device=route.device)
        with _library.implementation(route.implementation):
            copy, _, inverse, _ = cast(input, False, dtype)
        part = (copy.double() * inverse.double() / magnitude).mean()
        assert abs(part - 1) < 0.01 if remains == 1 else part >= remains if remains else part == 0


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("by_row", [False, True], ids=["tensorwise", "rowwise"])
def test_products_are_those_of_the_rounded_numbers(by_row, route):
    device = torch.device(route.device)
    if device.type == "cuda" and (reason := float8.obstacle(device)):
        pytest.skip(reason)
    left, right = matrix((32, 64), torch.bfloat16, device), matrix((48, 64), torch.bfloat16, device, 1)
    (a, _, s, _), (b, _, t, _) = (cast(m, by_row, torch.float8_e4m3fn) for m in (left, right))
    found = float8.product(a, b, s, t, torch.bfloat16)
    exact = (a.double() * s) @ (b.double() * t).t()
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_scales_are_rounded_once(dtype):
    """So that they are too large as often as too small, whatever number of bfloat16 is the largest magnitude."""
    amax, limit = torch.arange(128, 256).to(torch.bfloat16), torch.finfo(dtype).max
    inverse, scale = scales.scales_of(amax, dtype)
    assert torch.equal(scale, (limit / amax.double()).float())
    assert torch.equal(inverse, (amax.double() / limit).float())


def test_a_cpu_has_no_float8():
    assert "cpu" in float8.obstacle(torch.device("cpu"))
    assert float8.formats(torch.device("cpu")) == FORMATS


@pytest.mark.parametrize("route", routes())
def test_registered_operators(route):
    input = matrix((32, 48), torch.bfloat16, route.device)
    with _library.implementation(route.implementation):
        opcheck(route, torch.ops.apex.float8_amax.default, (input,))
        for by_row in (False, True):
            amax = float8.amax(input, by_row)
            opcheck(route, torch.ops.apex.float8_cast.default, (input, amax, by_row, torch.float8_e4m3fn))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_largest_magnitudes_of_any_dense_tensor_are_written(dtype, route):
    """Parts beyond the tensor's elements get zeros, over whatever was there."""
    values = matrix((2, 3, 5, 7), dtype, route.device)
    partials = torch.full((4,), -1, dtype=torch.int32, device=route.device)
    with _library.implementation(route.implementation):
        dtypes = float8.amax_dtypes(values.device)
        assert dtypes == (float8.FAMILY.triton_dtypes if route.implementation == "triton" else frozenset())
        assert not float8.fills_memory(values.expand(2, 3, 5, 7)[:, ::2])
        assert not float8.fills_memory(values[:, :1].expand(2, 3, 5, 7))
        assert not float8.fills_memory(values.as_subclass(type("Other", (torch.Tensor,), {})))
        if not dtypes:
            return
        for dense in (values, values.to(memory_format=torch.channels_last), values.transpose(1, 3), values[0, 0, 0, 0]):
            assert float8.fills_memory(dense)
            float8.write_amax(dense, partials)
            assert partials.view(torch.float32).max() == dense.abs().max().float()
            assert (partials >= 0).all()
        for value in (float("inf"), float("nan")):
            values[1, 2, 3, 4] = value
            float8.write_amax(values, partials)
            torch.testing.assert_close(
                partials.view(torch.float32).amax(), torch.tensor(value), equal_nan=True, check_device=False
            )
