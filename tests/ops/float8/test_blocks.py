"""float8 matrices with scales of blocks: the casts' bits, their errors, and products against float64."""

from __future__ import annotations

import pytest
import torch

from apex.ops import _library, float8
from apex.ops.float8 import blocks, reference
from tests.ops.float8.test_float8 import matrix
from tests.support.harness import opcheck, routes

NUMBER = torch.float8_e4m3fn
# Tensor cores of Hopper align the 32 products of an instruction and the sum so far to the largest, and cut off what is
# below 2**-13 of it: 132 errors of either sign for 128 products. Their sum has a standard deviation of sqrt(132 / 3),
# 6.6, times 2**-13 of the largest, which is below half the sum of all magnitudes. Five of these are 2**-9 of that sum.
SUM_BOUND = 2**-9
KINDS = pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])


def exact_blocks(input: torch.Tensor, square: bool, power_of_2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of a copy in float64 and its inverse scales, block by block."""
    values, inverses = torch.empty(input.shape, dtype=torch.float64), []
    height = 128 if square else 1
    for row in range(0, input.shape[0], height):
        for column in range(0, input.shape[1], 128):
            tile = input[row : row + height, column : column + 128].double().cpu()
            amax = tile.abs().max().clamp(min=1e-12)
            inverse, scale = amax.float() * (1 / 448), (448 / amax).float()
            if power_of_2:
                inverse = torch.exp2((amax / 448).float().double().log2().ceil()).float()
                scale = 1 / inverse
            rounded = (tile.float() * scale).clamp(-448, 448).to(NUMBER)
            values[row : row + height, column : column + 128] = rounded.double() * inverse.double()
            inverses.append(inverse)
    return values, torch.stack(inverses).view(input.shape[0] // height, -1)


@pytest.mark.parametrize("route", routes())
@KINDS
@pytest.mark.parametrize("power_of_2", [False, True], ids=["exact scales", "powers of two"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_copies_are_the_nearest_numbers_of_each_block(dtype, power_of_2, square, route):
    input = matrix((256, 384), dtype, route.device, 1)
    input[:128, 128:256] *= 1e-3
    input[7] *= 100
    input[:, 5] = 0
    with _library.implementation(route.implementation):
        copy, transposed, inverse, turned_inverse = blocks.cast_blocks(input, square, power_of_2, NUMBER)
    for found, scales, source in ((copy, inverse, input), (transposed, turned_inverse, input.t().contiguous())):
        assert found.dtype == NUMBER
        assert found.is_contiguous()
        expected, expected_scales = exact_blocks(source, square, power_of_2)
        assert torch.equal(scales.cpu(), expected_scales)
        assert torch.equal(reference.widened_blocks(found, scales, torch.float64).cpu(), expected)
        assert scales.stride() == ((4, 1) if square else (1, source.shape[0]))


@pytest.mark.parametrize("route", routes())
@KINDS
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_block(value, power_of_2, square, route):
    input = matrix((128, 256), torch.bfloat16, route.device)
    input[3, 5] = value
    with _library.implementation(route.implementation):
        copy, transposed, inverse, turned = blocks.cast_blocks(input, square, power_of_2, NUMBER)
    assert not reference.widened_blocks(copy, inverse)[3, 5].isfinite()
    assert not reference.widened_blocks(transposed, turned)[5, 3].isfinite()
    assert reference.widened_blocks(copy, inverse)[:, 128:].isfinite().all()


@pytest.mark.parametrize("route", routes())
@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(128, 128, 128), (256, 384, 640)])
def test_products_are_those_of_the_rounded_numbers(shape, dtype, square, route):
    """The inner size 640 has 5 blocks, which is no multiple of the 4 that cuBLASLt's rows of scales have."""
    if route.device == "cuda" and (reason := float8.obstacle(torch.device("cuda"))):
        pytest.skip(reason)
    rows, columns, inner = shape
    left, right = (
        matrix((rows, inner), torch.bfloat16, route.device),
        matrix((columns, inner), torch.bfloat16, route.device, 1),
    )
    left[:, :128] *= 50
    a, _, s, _ = blocks.cast_blocks(left, False, False, NUMBER)
    b, _, t, _ = blocks.cast_blocks(right, square, False, NUMBER)
    exact = reference.widened_blocks(a, s, torch.float64) @ reference.widened_blocks(b, t, torch.float64).t()
    with _library.implementation(route.implementation):
        found = blocks.block_product(a, b, s, t, dtype)
    size = reference.widened_blocks(a, s, torch.float64).abs() @ reference.widened_blocks(b, t, torch.float64).abs().t()
    error = (found.double() - exact).abs()
    bound = SUM_BOUND if route.device == "cuda" else 2**-13  # Triton's interpreter truncates to bfloat16
    assert (error <= bound * size + torch.finfo(dtype).eps * exact.abs()).all(), float((error / size).max())


@pytest.mark.parametrize("route", routes())
@KINDS
def test_products_of_two_formats(square, route):
    """Gradients in e5m2 meet weights and activations in e4m3."""
    if route.device == "cuda" and (reason := float8.obstacle(torch.device("cuda"))):
        pytest.skip(reason)
    left, right = (matrix((128, 256), torch.bfloat16, route.device, seed) for seed in (0, 1))
    with _library.implementation(route.implementation):
        a, _, s, _ = blocks.cast_blocks(left, False, False, torch.float8_e5m2)
        b, _, t, _ = blocks.cast_blocks(right, square, False, NUMBER)
        found = blocks.block_product(a, b, s, t, torch.float32)
    wide = [reference.widened_blocks(*pair, torch.float64) for pair in ((a, s), (b, t))]
    error = (found.double() - wide[0] @ wide[1].t()).abs()
    assert (error <= SUM_BOUND * (wide[0].abs() @ wide[1].abs().t())).all()
    assert float((wide[0] - left.double()).norm() / left.double().norm()) < 0.08


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")
@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_of_cublas(square, dtype):
    if not blocks._cublas_multiplies(torch.device("cuda")):
        pytest.skip("cuBLASLt has no products by blocks here")
    left, right = matrix((512, 1664), torch.bfloat16, "cuda"), matrix((384, 1664), torch.bfloat16, "cuda")
    a, _, s, _ = blocks.cast_blocks(left, False, False, NUMBER)
    b, _, t, _ = blocks.cast_blocks(right, square, False, NUMBER)
    wide = [reference.widened_blocks(*pair, torch.float64) for pair in ((a, s), (b, t))]
    found = blocks.block_product(a, b, s, t, dtype)
    assert found.dtype == dtype
    bound = SUM_BOUND * (wide[0].abs() @ wide[1].abs().t()) + torch.finfo(dtype).eps * (wide[0] @ wide[1].t()).abs()
    assert ((found.double() - wide[0] @ wide[1].t()).abs() <= bound).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="sizes for a GPU")
@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (2048, 4096), (1024, 640)])
def test_many_tiles(shape, dtype, square):
    for power_of_2 in (False, True):
        input = matrix(shape, dtype, "cuda")
        found = blocks.cast_blocks(input, square, power_of_2, NUMBER)
        for each, expected in zip(found, reference.cast_blocks(input, square, power_of_2, NUMBER), strict=True):
            assert torch.equal(each.float(), expected.float())


@pytest.mark.parametrize("route", routes())
def test_registered_operators(route):
    input = matrix((128, 256), torch.bfloat16, route.device)
    with _library.implementation(route.implementation):
        for square in (False, True):
            opcheck(route, torch.ops.apex.float8_cast_blocks.default, (input, square, True, NUMBER))
