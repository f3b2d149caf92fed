"""Codecs of slots: bounds of their errors, special values, and the same codes by kernels and by operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from apex.ops import _library
from apex.ops.multi_tensor import codecs, make_lists, rules
from apex.ops.multi_tensor.codecs import Encoded
from apex.ops.multi_tensor.torch_lists import StateSeed
from tests.support.harness import Route, routes

ALL = ("signed8", "root8", "float8", "bfloat16", "remainder8", "remainder16")
EPSILON = 2.0**-22  # of the float32 arithmetic around a code


def values(size: int, spread: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(size, generator=generator, dtype=torch.float64)
    return (numbers * torch.exp(spread * torch.randn(size, generator=generator, dtype=torch.float64))).float()


def largest(numbers: Tensor) -> Tensor:
    """Return the largest magnitude of each element's group."""
    padded = torch.nn.functional.pad(numbers.abs(), (0, -len(numbers) % codecs.GROUP))
    return padded.view(-1, codecs.GROUP).amax(1).repeat_interleave(codecs.GROUP)[: len(numbers)].double()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_error_of_signed8(size: int, spread: float) -> None:
    exact = values(size, spread)
    codes, scales = codecs.encode("signed8", exact)
    error = (codecs.decode("signed8", codes, scales).double() - exact.double()).abs()
    share = exact.double().abs() / largest(exact)
    # Half a step of y is 1/254, and dx/dy = (1 + |x|)**2 / 2, which grows by up to 1/254 within half a step.
    assert (error <= largest(exact) * ((1 + share) ** 2 / 508 * (1 + 1 / 250) + EPSILON)).all()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 5000])
def test_error_of_root8(size: int) -> None:
    exact = values(size, 1.0).square()
    codes, scales = codecs.encode("root8", exact)
    roots = codecs.decode("root8", codes, scales).double().sqrt()
    floor = largest(exact.sqrt()) / 255  # no number that is not 0 gets code 0
    error = (roots - exact.double().sqrt()).abs()
    assert (error <= torch.maximum(floor / 2, floor - exact.double().sqrt()) + EPSILON * largest(exact.sqrt())).all()
    assert (codes >= 1).all()


def test_error_of_float8() -> None:
    exact = values(5000, 1.0)
    codes, scales = codecs.encode("float8", exact)
    error = (codecs.decode("float8", codes, scales).double() - exact.double()).abs()
    step = largest(exact) / 448 * 2.0**-10  # half of the smallest step
    assert (error <= torch.maximum(exact.double().abs() * 2.0**-4, step) + EPSILON * largest(exact)).all()


def test_every_float8_code_comes_back() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes.float()[codes.float().isfinite()]
    again, scales = codecs.encode("float8", numbers)
    assert torch.equal(codecs.decode("float8", again, torch.full_like(scales, 448.0)).abs().amax(), numbers.amax())


def test_remainders_over_all_mantissas() -> None:
    """Every lower half of a float32 beside every exponent, both signs, with carries into the bfloat16."""
    lower = torch.arange(1 << 16, dtype=torch.int32)
    for upper in (0x0000, 0x0001, 0x007F, 0x3F80, 0x3FFF, 0x7F7E, -0x4080):
        exact = (lower + (upper << 16)).view(torch.float32)
        params, remainders = codecs.split(exact, "remainder16")
        assert torch.equal(codecs.join(params, remainders).view(torch.int32), exact.view(torch.int32))
        params, remainders = codecs.split(exact, "remainder8")
        joined = codecs.join(params, remainders).view(torch.int32)
        assert ((joined - exact.view(torch.int32)).abs() <= 128).all()  # half of 2**-16 of the leading digit
        assert params.dtype == torch.bfloat16


@pytest.mark.parametrize("codec", ALL)
def test_special_values(codec: str) -> None:
    numbers = torch.zeros(256)
    numbers[64:128] = 1e-44  # subnormal: may become zero
    numbers[128] = torch.inf
    numbers[200] = 3e38
    codes, companions = codecs.encode(codec, numbers)
    back = codecs.decode(codec, codes, companions)
    assert (back[:64] == 0).all()
    assert ((back[64:128] >= 0) & (back[64:128] <= 1e-40)).all()
    assert not back[128:192].isfinite().all(), "an overflow is not hidden"
    assert back[192:].isfinite().all()
    for bits in (0x7FC00000, 0x7FFFFFFF, -1):
        unknown = torch.full((64,), bits, dtype=torch.int32).view(torch.float32)
        if codec in ("bfloat16", *codecs.REMAINDERS):
            assert codecs.decode(codec, *codecs.encode(codec, unknown)).isnan().all()


@pytest.mark.parametrize("codec", ["root8", "bfloat16"])
def test_stochastic_rounding_is_right_on_average(codec: str) -> None:
    count = 2_500
    exact = torch.full((64,), 0.3)
    exact[0] = 1.0
    index, row = torch.arange(64), torch.zeros(1, dtype=torch.int64)
    total = torch.zeros(64, dtype=torch.float64)
    for step in range(count):
        bits = codecs.noise((step * 0x9E3779B1) & 0xFFFFFF, row, index, 3)
        codes, scales = codecs.encode(codec, exact, bits)
        total += codes.double() if scales is not None else codes.double() * 2**9
    truth = exact.double().sqrt() * 255 if codec == "root8" else exact.double() * 2**9
    # A code is one of two neighbours: the deviation of a mean of them is at most half a step by the root of the count.
    step = 1.0 if codec == "root8" else 2.0  # 0.3 has an exponent of -2, and 7 more digits
    assert ((total / count - truth).abs() <= 4 * 0.5 * step / count**0.5 + 2.0**-16 * step).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("codec", ALL)
def test_kernels_and_operators_give_the_same_codes(codec: str, route: Route) -> None:
    """A scaled copy into a slot with a codec; a second one reads the codes, to scale them in place."""
    results = []
    for implementation, device in ((route.implementation, route.device), ("torch", "cpu")):
        sources = [values(size, 1.0, size).to(device) for size in (300, 5, 64)]
        sources[0][70:140] = 0.0
        if codec == "root8":
            sources = [source.square() for source in sources]
        params = [source.bfloat16() for source in sources]
        stored = params if codec in codecs.REMAINDERS else [codecs.new_codes(codec, param) for param in params]
        has_companions = codecs.new_companions(codec, params[0]) is not None
        companions = [codecs.new_companions(codec, param) for param in params] if has_companions else None
        with _library.implementation(implementation):
            lists = make_lists([stored, sources, None, None, None], None, {0: Encoded(codec, companions)})
            lists.apply(rules.SCALE, {"scale": 0.5}, seed=StateSeed(12345))
        decoded = [
            codecs.decode(codec, code, None if companions is None else companion)
            for code, companion in zip(stored, companions or stored, strict=True)
        ]
        results.append(([code.cpu() for code in stored], [number.cpu() for number in decoded]))
    (codes, numbers), (expected_codes, expected) = results
    for code, other, number, truth in zip(codes, expected_codes, numbers, expected, strict=True):
        assert code.dtype == other.dtype
        # Kernels may divide less exactly: a code on the edge of two may be the other one.
        differ = code.view(torch.uint8) != other.view(torch.uint8)
        assert differ.float().mean() < 0.02
        limit = torch.maximum(truth.abs(), largest(truth).float() / 100)
        assert ((number - truth).abs() <= 0.07 * limit).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("codec", ["root8", "bfloat16"])
def test_codes_of_shards_are_those_of_the_whole(codec: str, route: Route) -> None:
    """Rows, and columns whose cuts are multiples of 64."""
    source = values(12 * 192, 1.0, 5).view(12, 192).square()

    def codes_of(rows: slice, columns: slice, places: list[codecs.NoisePlace]) -> Tensor:
        sources = [torch.ones(3), source[rows, columns].contiguous()]
        sources = [each.to(route.device) for each in sources]
        stored = [codecs.new_codes(codec, each) for each in sources]
        has_scales = codecs.has_scales(codec)
        scales = [codecs.new_companions(codec, each) for each in sources] if has_scales else None
        with _library.implementation(route.implementation):
            lists = make_lists([stored, sources, None, None, None], None, {0: Encoded(codec, scales)})
            lists.noise_places = torch.tensor(places, device=route.device) if places else None
            lists.apply(rules.SCALE, {"scale": 1.0}, seed=StateSeed(77))
        return stored[1].cpu()

    everything = codes_of(slice(None), slice(None), [])
    for rows, columns in ((slice(5, 12), slice(0, 192)), (slice(3, 9), slice(64, 128))):
        start, run = rows.start * 192 + columns.start, columns.stop - columns.start
        places = [codecs.NoisePlace(0, 0, 3, 3), codecs.NoisePlace(1, start, run, 192)]
        assert torch.equal(codes_of(rows, columns, places), everything[rows, columns])


def encoded(codec: str, source: Tensor, route: Route, seed: int = 12345) -> tuple[Tensor, Tensor]:
    """Return the codes (or bfloat16 parameters) of a vector, and their companions, as a kernel stores them."""
    source = source.to(route.device)
    stored = [source.bfloat16() if codec in codecs.REMAINDERS else codecs.new_codes(codec, source)]
    companions = [codecs.new_companions(codec, stored[0])]
    with _library.implementation(route.implementation):
        lists = make_lists([stored, [source], None, None, None], None, {0: Encoded(codec, companions)})
        lists.apply(rules.SCALE, {"scale": 1.0}, seed=StateSeed(seed))
    return stored[0].cpu(), companions[0].cpu()


@pytest.mark.parametrize("route", routes())
def test_roots_keep_zeros_and_largest_numbers(route: Route) -> None:
    """The largest number of a group must not wrap around to code 0, whatever its noise and the error of its inverse."""
    exact = values(1 << 14, 8.0, 7).square().clamp(min=1e-30)
    exact[::5] = 0.0
    exact[::64] = exact.view(-1, 64).amax(1)
    for seed in range(3):
        codes, _ = encoded("root8", exact, route, seed)
        assert (codes[::64] >= 254).all()
        assert (codes[exact == 0] == 0).all()
        assert (codes[exact > 0] >= 1).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("codec", ["remainder8", "remainder16"])
def test_kernels_keep_infinities_and_nan(codec: str, route: Route) -> None:
    exact = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.3895e38, -3.3895e38, 0.0, -0.0, 1e-44])
    params, remainders = encoded(codec, exact, route)
    joined = codecs.join(params, remainders)
    assert torch.equal(joined[:2], exact[:2])
    assert joined[2].isnan()
    assert ((joined[3:] - exact[3:]).abs() <= exact[3:].abs() * 2.0**-16 + 2.0**-142).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("codec", ["signed8", "float8"])
@pytest.mark.parametrize("size", [2e-38, 1e-30, 1e30, 3e38])
def test_kernels_encode_very_small_and_large_numbers(codec: str, size: float, route: Route) -> None:
    """No product of a number and a factor of its group overflows or vanishes."""
    exact = torch.linspace(-1, 1, 65)[:64] * size
    number = codecs.decode(codec, *encoded(codec, exact, route))
    assert ((number.double() - exact.double()).abs() <= size * 2.0**-4).all()
    assert (number[exact == 0] == 0).all()


def test_noise_of_neighbours_and_of_steps_is_uncorrelated() -> None:
    """Elements of one hash differ by multiples of the golden ratio, others by their hash, steps by the seed."""
    index, row = torch.arange(1 << 12), torch.zeros(1, dtype=torch.int64)
    steps = range(256)
    bits = torch.stack([codecs.noise((step * 0x9E3779B1) & 0xFFFFFF, row, index, 3) for step in steps])
    noise = bits.double() / 65536 - 0.5
    assert (noise.mean(0).abs() <= 5 * (1 / 12) ** 0.5 / len(steps) ** 0.5).all()
    assert (noise.mean(1).abs() <= 5 * (1 / 12) ** 0.5 / len(index) ** 0.5).all()
    for distance in (1, 2, 3, 64, 128):  # of steps; a mean of products of independent numbers has a deviation of 1/12
        limit = 5 / 12 / ((len(steps) - distance) * len(index)) ** 0.5 * 8  # 64 elements have one hash
        assert abs(float((noise[distance:] * noise[:-distance]).mean())) <= limit
