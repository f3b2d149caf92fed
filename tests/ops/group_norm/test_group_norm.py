"""Group norm against float64, by every route, with uninitialised memory full of NaN."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.ops import _library
from apex.ops._device import INTERPRETER, next_power_of_2
from apex.ops.group_norm import config, group_norm, group_norm_backward, group_norm_forward, op
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class GroupNormCase:
    shape: tuple[int, ...]
    groups: int
    dtype: torch.dtype = F32
    parameters: torch.dtype | None = F32
    silu: bool = False
    channels_last: bool = True
    offset: float = 0.0
    has_bias: bool = True
    way: str = ""

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        dtypes = "-".join(str(each).removeprefix("torch.") for each in (self.dtype, self.parameters))
        flags = [name for name in ("silu", "channels_last") if getattr(self, name)]
        return "-".join((sizes, str(self.groups), dtypes, *flags, *(["far"] if self.offset else []), self.way))

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        generator = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(self.shape, generator=generator) for _ in range(2))
        weight, bias = (torch.rand(self.shape[1], generator=generator) + 0.5 for _ in range(2))
        x = (x + self.offset).to(device, self.dtype)
        if self.channels_last:
            x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        parameters = [None if self.parameters is None else each.to(device, self.parameters) for each in (weight, bias)]
        return x, dy.to(device, self.dtype), parameters[0], parameters[1] if self.has_bias else None


CASES = [
    GroupNormCase((2, 12, 3, 5), 4),
    GroupNormCase((2, 12, 3, 5), 4, silu=True),
    GroupNormCase((3, 20, 4, 4), 4, BF16, BF16, silu=True),
    GroupNormCase((3, 20, 4, 4), 20, F16, F32),
    GroupNormCase((1, 7, 1, 1), 1, F32, None),
    GroupNormCase((2, 6, 9), 2, F32, silu=True),
    GroupNormCase((2, 6, 3, 4, 5), 3, BF16, F32),
    GroupNormCase((5, 8), 2),
    GroupNormCase((2, 12, 3, 5), 4, F64, F64, silu=True),
    GroupNormCase((2, 12, 3, 5), 4, silu=True, channels_last=False),
    GroupNormCase((2, 12, 3, 5), 4, F16, F32, silu=True, channels_last=False),
    GroupNormCase((2, 12, 3, 5), 4, BF16, BF16, channels_last=False),
    GroupNormCase((2, 12, 3, 5), 4, has_bias=False, silu=True),
    GroupNormCase((2, 12, 5, 5), 2, F32, offset=300.0),
    GroupNormCase((2, 24, 9, 8), 2, F32, silu=True, way="cut"),
    GroupNormCase((2, 24, 7, 9), 3, BF16, F32, way="cut"),
    GroupNormCase((1, 70, 5, 9), 2, F32, None, way="cut"),
    GroupNormCase((2, 24, 9, 8), 2, F32, offset=300.0, way="cut"),
    GroupNormCase((2, 24, 9, 8), 2, F32, silu=True, channels_last=False, way="cut"),
    GroupNormCase((2, 24, 7, 9), 2, BF16, F32, channels_last=False, offset=30.0, way="cut"),
]

# What makes groups of any size run as only those of larger images do: cut into tiles.
NONE = {"forward": 0, "backward": 0}
WAYS = {
    "cut": {"SMALL_GROUP": NONE, "FORWARD_TILE": {True: 512, False: 256}, "BACKWARD_TILE": 256},
}


@contextlib.contextmanager
def run_as(way: str) -> Iterator[None]:
    if not way:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WAYS[way].items():
            patch.setattr(config, name, value)
        yield


def exact(case: GroupNormCase, x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None) -> list:
    """Output and gradients in float64 by PyTorch's own operators and autograd."""
    leaves = [None if each is None else each.detach().cpu().double().requires_grad_() for each in (x, weight, bias)]
    output = functional.group_norm(leaves[0], case.groups, leaves[1], leaves[2], 1e-5)
    output = functional.silu(output) if case.silu else output
    output.backward(dy.cpu().double())
    return [output.detach(), *(None if each is None else each.grad for each in leaves)]


def run(case: GroupNormCase, x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None) -> list:
    leaves = [None if each is None else each.detach().clone().requires_grad_() for each in (x, weight, bias)]
    output = group_norm(leaves[0], case.groups, leaves[1], leaves[2], 1e-5, "silu" if case.silu else "")
    output.backward(dy)
    return [output.detach(), *(None if each is None else each.grad for each in leaves)]


def check(case: GroupNormCase, route: Route) -> None:
    if case.offset and route.implementation == "torch":
        pytest.skip("PyTorch's operator for channels-last tensors subtracts large sums from each other")
    tensors = case.tensors(route.device)
    expected = exact(case, *tensors)
    with _library.implementation("auto" if case.dtype == F64 else route.implementation), run_as(case.way):
        actual, again = run(case, *tensors), run(case, *tensors)
    assert actual[0].dtype == case.dtype
    terms = tensors[0].numel() // case.shape[1]
    # Data far from zero has lost digits before the norm sees it; a sum of plain squares would lose them twice.
    conditioning = max(1, round(case.offset))
    for name, result, wanted, count in zip(
        ("output", "dx", "dweight", "dbias"), actual, expected, (1, 1, terms, terms), strict=True
    ):
        assert_close(result, wanted, reduction=count * conditioning, what=name)
    assert_equal_bits(
        [each if each is None else each.contiguous() for each in actual],
        [each if each is None else each.contiguous() for each in again],
    )


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: GroupNormCase, route: Route) -> None:
    check(case, route)


@pytest.mark.parametrize("route", routes())
def test_more_groups_than_tickets(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs then leave the gradients of parameters to another launch."""
    monkeypatch.setattr(op, "TICKETS", 3)
    check(GroupNormCase((2, 12, 3, 5), 4), route)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    images, channels, positions = 3, 64, (1 << 31) // 128 + 5
    x = torch.randn(images, positions, channels, device="cuda", dtype=BF16).movedim(-1, 1)
    assert x.numel() > 2**31
    weight, bias = (torch.rand(channels, device="cuda", dtype=BF16) for _ in range(2))
    output, statistics = group_norm_forward(x, weight, bias, 32, 1e-5, True)
    dx, dweight, dbias = group_norm_backward(x, x, statistics, weight, bias, 32, 1e-5, True)
    last = slice(positions - 4, positions)
    values = x[-1, :, last].double()
    mean, variance = statistics[-1].double().repeat_interleave(2, 0).unbind(1)
    assert_close(statistics[-1, -1, 0], x[-1, -2:].mean(dtype=F64), what="mean")
    z = (values - mean[:, None]) * (variance[:, None] + 1e-5).rsqrt() * weight.double()[:, None] + bias.double()[
        :, None
    ]
    assert_close(output[-1, :, last], functional.silu(z), what="output")
    assert dx.shape == x.shape
    assert torch.isfinite(dx[-1, :, last]).all()
    assert torch.isfinite(dweight).all()
    assert torch.isfinite(dbias).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("parameters", [F32, F64])  # by kernels and by operators
def test_the_output_keeps_the_layout(route: Route, channels_last: bool, parameters: torch.dtype) -> None:
    x = torch.randn(2, 8, 4, 6, device=route.device, requires_grad=True)
    given = x.to(memory_format=torch.channels_last) if channels_last else x
    with _library.implementation(route.implementation):
        output = group_norm(given, 4, torch.ones(8, dtype=parameters, device=route.device))
        output.backward(torch.ones_like(x))
    assert x.grad is not None
    assert output.stride() == given.stride()


@pytest.mark.parametrize("route", routes())
def test_a_strided_input_and_gradient(route: Route) -> None:
    case = GroupNormCase((2, 12, 6, 10), 4, silu=True)
    x, dy, weight, bias = case.tensors(route.device)
    x, dy = x[:, :, ::2, 1:], dy.to(memory_format=torch.channels_last)[:, :, ::2, 1:]
    with _library.implementation(route.implementation):
        actual = run(case, x, dy, weight, bias)
    for result, wanted in zip(actual, exact(case, x, dy, weight, bias), strict=True):
        assert_close(result, wanted, reduction=54)


@pytest.mark.parametrize("route", routes())
def test_a_bias_without_a_weight(route: Route) -> None:
    x = torch.randn(2, 4, 3, device=route.device, requires_grad=True)
    bias = torch.randn(4, device=route.device, requires_grad=True)
    dy = torch.randn_like(x)
    with _library.implementation(route.implementation):
        gradients = torch.autograd.grad(group_norm(x, 2, None, bias), (x, bias), dy)
    wide, wide_dy = x.detach().double().requires_grad_(), dy.double()
    plain = torch.nn.functional.group_norm(wide, 2)
    assert_close(gradients[0], torch.autograd.grad(plain, wide, wide_dy)[0], reduction=6)
    assert_close(gradients[1], wide_dy.sum((0, 2)), reduction=6)


@pytest.mark.parametrize("route", routes())
def test_a_second_derivative(route: Route) -> None:
    x = torch.randn(2, 6, 3, 3, device=route.device).to(memory_format=torch.channels_last)

    def second(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(group_norm(x, 3, activation="silu").square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    with _library.implementation(route.implementation):
        actual = second(x)
    with _library.implementation("auto"):
        assert_close(actual, second(x.cpu().double()), reduction=100)


@pytest.mark.parametrize("route", routes())
def test_a_second_derivative_of_parameters_that_are_not_contiguous(route: Route) -> None:
    x, both = torch.randn(2, 6, 3, 3, device=route.device), torch.rand(2, 12, device=route.device)

    def second(x: Tensor, both: Tensor) -> Tensor:
        x, both = x.detach().requires_grad_(), both.detach().requires_grad_()
        output = group_norm(x, 3, both[0, ::2], both[1, ::2], activation="silu")
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), both)[0]

    with _library.implementation(route.implementation):
        actual = second(x, both)
    with _library.implementation("auto"):
        assert_close(actual, second(x.cpu().double(), both.cpu().double()), reduction=100)


@pytest.mark.parametrize("route", routes())
def test_autocast_leaves_the_dtype_alone(route: Route) -> None:
    x = torch.randn(2, 8, 4, 4, device=route.device, dtype=BF16).to(memory_format=torch.channels_last)
    weight = torch.rand(8, device=route.device)
    with _library.implementation(route.implementation):
        expected = group_norm(x, 2, weight, activation="silu")
        with torch.autocast(route.device, dtype=BF16):
            actual = group_norm(x, 2, weight, activation="silu")
    assert actual.dtype == BF16
    assert torch.equal(actual, expected)


def test_large_groups_are_cut_up() -> None:
    for direction in ("forward", "backward"):
        assert config.small_config(64, 80, direction, 2, INTERPRETER) is not None
        assert config.small_config(4096, 10, direction, 2, INTERPRETER) is None
    for last in (True, False):
        tile = config.tile_config(4097, 320, 8192, last)
        assert tile.rows * tile.chunks >= 4097
        assert tile.channel_block * tile.channel_blocks >= 320
        assert tile.rows * tile.channel_block <= 8192


def test_tiles_are_addressed_with_32_bits() -> None:
    for positions in (1 << 20, 1 << 28, 1024**3, op.MOST_POSITIONS):
        tile = config.tile_config(positions, 64, 16384, False)
        assert tile.channel_block * positions < 2**31
    assert config.tile_config(1 << 20, 64, 16384, False).channel_block == 16
    with pytest.raises(ValueError, match="4294967296 positions of an image are too many"):
        op._sizes((1, 2, 1 << 16, 1 << 16), 2)


def test_scattered_groups_are_cut_up_in_large_tensors() -> None:
    assert config.groups_apart(47 * 32 * 96 * 96, 2, last=False)
    assert not config.groups_apart(47 * 32 * 96 * 96, 2, last=True)
    assert config.groups_apart(18 * 32 * 8 * 8, 2, last=True)
    assert config.groups_apart(8 * 320 * 64 * 64, 20, last=True)


def test_no_program_loads_many_values_one_by_one() -> None:
    """Where channels are last, an odd number of them in a group leaves no two that may be loaded at once."""
    for positions, channels in itertools.product((49, 196, 784, 2304, 3136), (1, 3, 5, 7, 17, 109)):
        held = next_power_of_2(positions) * next_power_of_2(channels)
        assert config.held_forward(positions, channels, last=True) == (held <= 16384)
        assert config.held_forward(positions, channels, last=False)
        assert config.held_forward(positions, channels + 1, last=True)


def test_no_program_works_long_while_others_have_nothing_to_do() -> None:
    """A program takes a tile, or a group of few elements."""
    for groups, channels_of_group, positions in itertools.product(
        (1, 8, 16, 32), (1, 4, 10, 21, 42, 80), (49, 64, 196, 1024, 1600, 4096, 16384)
    ):
        channels = groups * channels_of_group
        for direction in ("forward", "backward"):
            padded = next_power_of_2(channels_of_group) * positions
            small = config.small_config(positions, channels_of_group, direction, 2, INTERPRETER)
            if small is not None:
                assert padded <= 32768
                held = small.position_block * small.channel_block
                assert held <= (16 if direction == "backward" and 512 < held <= 2048 else 64) * 32 * small.num_warps
            for last in (True, False):
                elements = config.FORWARD_TILE[last] if direction == "forward" else config.BACKWARD_TILE
                tile = config.tile_config(positions, channels, elements, last)
                assert tile.rows * tile.channel_block <= elements
                assert tile.rows * (tile.chunks - 1) < positions <= tile.rows * tile.chunks


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 6, 2, 2), 4), ValueError, "6 channels .* num_groups=4"),
        ((torch.ones(2, 6, 2, 2), 0), ValueError, "num_groups=0"),
        ((torch.ones(6), 2), ValueError, r"shape \[6\]"),
        ((torch.ones(2, 6, dtype=torch.int32), 2), TypeError, "floating-point input"),
        ((torch.ones(2, 6), 2, torch.ones(5)), ValueError, "weight has shape"),
        ((torch.ones(2, 6), 2, torch.ones(6), torch.ones(6, dtype=torch.int32)), TypeError, "bias must be"),
        ((torch.ones(2, 6), 2, torch.ones(6, device="meta")), ValueError, "weight is on meta"),
        ((torch.ones(2, 6), 2, None, None, 1e-5, "relu"), ValueError, "activation='relu'"),
    ],
)
def test_bad_arguments(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        group_norm(*arguments)


def test_backward_refuses_what_does_not_belong_together() -> None:
    x = torch.ones(2, 6, 2, 2)
    _, statistics = group_norm_forward(x, None, None, 2, 1e-5, False)
    with pytest.raises(ValueError, match="the gradient has shape"):
        group_norm_backward(x[:1], x, statistics, None, None, 2, 1e-5, False)
    with pytest.raises(ValueError, match="statistics has shape"):
        group_norm_backward(x, x, statistics[:1], None, None, 2, 1e-5, False)
