"""Batch norm against float64, by every route, with uninitialised memory full of NaN."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional

from apex.ops import _library
from apex.ops.batch_norm import BatchNormSpec, Channels, backward, batch_norm, config, forward, op, reference
from tests.support.harness import Route, assert_close, assert_equal_bits, opcheck, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class BatchNormCase:
    shape: tuple[int, ...]
    dtype: torch.dtype = F32
    parameters: torch.dtype | None = F32
    addend: torch.dtype | None = None
    relu: bool = True
    last: bool = True
    training: bool = True
    running: bool = True
    offset: float = 0.0
    has_bias: bool = True
    channel_dim: int = 1
    silu: bool = False

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        dtypes = [str(each).removeprefix("torch.") for each in (self.dtype, self.parameters, self.addend)]
        flags = [name for name in ("relu", "last", "training", "running", "has_bias", "silu") if getattr(self, name)]
        return "-".join((sizes, *dtypes, *flags, str(self.channel_dim), *(["far"] if self.offset else [])))

    @property
    def channels(self) -> int:
        return self.shape[self.channel_dim]

    def tensors(self, device: str) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(1)
        x, z, dy = (torch.randn(self.shape, generator=generator) for _ in range(3))
        weight, bias, mean, variance = (torch.rand(self.channels, generator=generator) + 0.5 for _ in range(4))

        def placed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
            tensor = tensor.to(device, dtype)
            return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if self.last and self.channel_dim == 1 else tensor

        wide = F64 if self.dtype == F64 else F32
        return {
            "x": placed(x + self.offset, self.dtype),
            "z": None if self.addend is None else placed(z, self.addend),
            "dy": placed(dy, self.dtype),
            "weight": None if self.parameters is None else weight.to(device, self.parameters),
            "bias": bias.to(device, self.parameters) if self.parameters and self.has_bias else None,
            "mean": mean.to(device, wide) if self.running else None,
            "variance": variance.to(device, wide) if self.running else None,
        }


CASES = [
    BatchNormCase((3, 12, 3, 5)),
    BatchNormCase((3, 12, 3, 5), addend=F32),
    BatchNormCase((3, 12, 3, 5), addend=F32, relu=False),
    BatchNormCase((3, 12, 3, 5), relu=False),
    BatchNormCase((3, 12, 3, 5), last=False),
    BatchNormCase((3, 12, 3, 5), last=False, addend=F32),
    BatchNormCase((2, 70, 5, 7), F16, addend=F16),
    BatchNormCase((2, 70, 2, 3), BF16, BF16, running=False),
    BatchNormCase((2, 70, 5, 7), BF16, addend=F32, last=False),
    BatchNormCase((2, 5, 9, 7), F32, F16, addend=BF16),
    BatchNormCase((2, 3, 40, 33), F16, last=False),
    BatchNormCase((2, 3, 40, 33), F32),
    BatchNormCase((7, 6), F32, addend=F32),
    BatchNormCase((4, 6, 9), BF16, None),
    BatchNormCase((4, 6, 2, 3, 2), F32, has_bias=False),
    BatchNormCase((4, 6, 1, 1), F32),
    BatchNormCase((4, 1, 3, 3), F32),
    BatchNormCase((2, 4, 5, 12), F16, addend=F16, channel_dim=-1),
    BatchNormCase((2, 4, 5, 12), F32, channel_dim=-1, running=False),
    BatchNormCase((3, 12, 3, 5), F32, training=False),
    BatchNormCase((3, 12, 3, 5), F16, addend=F16, training=False),
    BatchNormCase((3, 12, 3, 5), F32, None, addend=F32, training=False, last=False),
    BatchNormCase((3, 12, 3, 5), F64, F64, addend=F64),
    BatchNormCase((3, 12, 9, 9), F32, offset=300.0),
    BatchNormCase((3, 12, 3, 5), relu=False, silu=True),
    BatchNormCase((2, 70, 5, 7), BF16, relu=False, silu=True, last=False),
    BatchNormCase((2, 3, 40, 33), F16, relu=False, silu=True),
    BatchNormCase((2, 3, 40, 33), F32, None, relu=False, silu=True, last=False),
    BatchNormCase((3, 12, 3, 5), F32, relu=False, silu=True, training=False),
    BatchNormCase((2, 4, 5, 12), F32, relu=False, silu=True, channel_dim=-1),
    BatchNormCase((4, 6, 1, 1), F32, relu=False, silu=True),
    BatchNormCase((3, 12, 3, 5), F64, F64, relu=False, silu=True),
    BatchNormCase((3, 12, 9, 9), F32, offset=300.0, last=False, addend=F32),
]


def exact(case: BatchNormCase, tensors: dict[str, Tensor | None], output: Tensor) -> dict[str, Tensor | None]:
    """Everything in float64 by an independent formula and autograd; ReLU's mask is taken from `output`."""
    leaves = {
        name: None if each is None else each.detach().cpu().double().requires_grad_() for name, each in tensors.items()
    }
    x, mean, variance = leaves["x"], leaves["mean"], leaves["variance"]
    assert x is not None
    rows = x.movedim(case.channel_dim, -1).reshape(-1, case.channels)
    if case.training:
        if mean is not None and variance is not None:
            batch = (rows.mean(0), rows.var(0, correction=1))
            mean, variance = (0.75 * old + 0.25 * new for old, new in zip((mean, variance), batch, strict=True))
        centre, spread = rows.mean(0), rows.var(0, correction=0)
    else:
        assert mean is not None
        assert variance is not None
        centre, spread = mean, variance
    y = (x.movedim(case.channel_dim, -1) - centre) / (spread + 1e-5).sqrt()
    y = y if leaves["weight"] is None else y * leaves["weight"]
    y = (y if leaves["bias"] is None else y + leaves["bias"]).movedim(-1, case.channel_dim)
    y = y if leaves["z"] is None else y + leaves["z"]
    y = functional.silu(y) if case.silu else y
    masked = y * (output.cpu() > 0) if case.relu else y
    assert tensors["dy"] is not None
    masked.backward(tensors["dy"].cpu().double())
    results = {name: None if leaves[name] is None else leaves[name].grad for name in ("x", "z", "weight", "bias")}
    return {"output": y.relu() if case.relu else y, "mean": mean, "variance": variance, **results}


def run(case: BatchNormCase, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    leaves = {name: None if each is None else each.detach().clone() for name, each in tensors.items()}
    differentiated = ("x", "z", "weight", "bias")
    for name in differentiated:
        if leaves[name] is not None:
            leaves[name].requires_grad_()
    output = batch_norm(
        leaves["x"],
        leaves["mean"],
        leaves["variance"],
        leaves["weight"],
        leaves["bias"],
        case.training,
        0.25,
        z=leaves["z"],
        relu=case.relu,
        silu=case.silu,
        channel_dim=case.channel_dim,
    )
    output.backward(leaves["dy"])
    results = {name: None if leaves[name] is None else leaves[name].grad for name in differentiated}
    return {"output": output.detach(), "mean": leaves["mean"], "variance": leaves["variance"], **results}


def check(case: BatchNormCase, route: Route) -> None:
    if case.offset and route.implementation == "torch":
        pytest.skip("how exact PyTorch's operator is far from zero is not ours to promise")
    tensors = case.tensors(route.device)
    with _library.implementation("auto" if case.dtype == F64 else route.implementation):
        actual, again = run(case, tensors), run(case, tensors)
    assert actual["output"] is not None
    assert tensors["x"] is not None
    assert actual["output"].dtype == case.dtype
    if tensors["x"].dim() == 4:  # PyTorch knows channels-last formats for images and volumes only
        assert actual["output"].stride() == tensors["x"].stride()
    expected = exact(case, tensors, actual["output"])
    count = tensors["x"].numel() // case.channels
    # Data far from zero has lost digits before the norm sees it; a sum of plain squares would lose them twice.
    conditioning = max(1, round(case.offset))
    for name, wanted in expected.items():
        terms = count if name in ("weight", "bias", "mean", "variance") else 1
        assert_close(actual[name], wanted, reduction=terms * conditioning, what=name)
    assert_equal_bits(list(actual.values()), list(again.values()))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: BatchNormCase, route: Route) -> None:
    check(case, route)


NOTHING_WHOLE = {False: 0, True: 0}


@pytest.mark.parametrize("route", [each for each in routes() if each.values[0].implementation == "triton"])
@pytest.mark.parametrize("case", [*CASES[:6], CASES[7], CASES[9], CASES[17], *CASES[-2:]], ids=str)
def test_in_passes(case: BatchNormCase, route: Route) -> None:
    """The same where a program cannot hold a channel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "WHOLE", NOTHING_WHOLE)
        check(case, route)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("last", [True, False])
def test_programs_that_take_several_tiles(route: Route, last: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "WHOLE", NOTHING_WHOLE)
        patch.setattr(config, "pace", lambda *_: config.Pace(128, stages=2))
        patch.setattr(config, "measure_programs", lambda units, blocks, multiprocessors, pace: 5)
        patch.setattr(config, "finish_block", lambda parts: (1, 16))
        check(BatchNormCase((6, 6, 5, 7), BF16, addend=BF16, last=last), route)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [BatchNormCase((2, 70, 5, 7), BF16, last=False), BatchNormCase((9, 6), F16)], ids=str)
def test_parameter_gradients_keep_float32_where_pytorch_would_round_them(case: BatchNormCase) -> None:
    check(case, Route("cuda", "auto"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 64, 112, 112), (32, 256, 56, 56), (32, 512, 28, 28), (32, 2048, 7, 7)])
@pytest.mark.parametrize("addend", [None, F16])
@pytest.mark.parametrize("last", [True, False])
def test_matches_float64_at_the_sizes_of_resnets(shape, addend, last) -> None:
    check(BatchNormCase(shape, F16, addend=addend, last=last), Route("cuda", "triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("addend", [None, F16, F32])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_matches_float64_where_nobody_asks_for_kernels(dtype, addend, last, relu, training) -> None:
    """Below the size from which on kernels run for speed."""
    case = BatchNormCase((32, 512, 7, 7), dtype, addend=addend, relu=relu, last=last, training=training)
    assert torch.Size(case.shape).numel() < config.NATIVE_BELOW
    check(case, Route("cuda", "auto"))


@pytest.mark.gpu
@pytest.mark.parametrize("last", [True, False])
def test_more_than_two_to_the_31_elements(last: bool) -> None:
    channels, positions = 64, (1 << 31) // 128 + 5
    shape = (2, positions, channels) if last else (2, channels, positions)
    x = torch.randn(shape, device="cuda", dtype=BF16)
    x = x.movedim(-1, 1) if last else x
    assert x.numel() > 2**31
    weight, bias = (torch.rand(channels, device="cuda") for _ in range(2))
    spec = BatchNormSpec(relu=True)
    output, found = forward(x, None, Channels(None, None, weight, bias), spec)
    mean, variance = found[:2]
    end = slice(positions - 4, positions)
    values = x[-1, :, end].double()
    assert_close(mean[-1], x[:, -1].mean(dtype=F64), what="mean")
    factor = (variance.double() + 1e-5).rsqrt()
    expected = (values - mean.double()[:, None]) * (factor * weight)[:, None] + bias.double()[:, None]
    assert_close(output[-1, :, end], expected.relu(), what="output")
    dx, _, dweight, dbias = backward(x, x, None, found, spec)
    gradient = torch.where(output[-1, :, end] > 0, values, 0.0)
    normalised = (values - mean.double()[:, None]) * factor[:, None]
    count = x.numel() // channels
    away = dbias.double()[:, None] / count + normalised * dweight.double()[:, None] / count
    assert_close(dx[-1, :, end], (factor * weight)[:, None] * (gradient - away), what="dx")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("dims", [2, 3, 4])
def test_the_layout_of_a_gradient_costs_no_digits(route: Route, dtype: torch.dtype, dims: int) -> None:
    """PyTorch on a CPU computes in half precision where input or gradient is not contiguous."""
    shape = (8, 5, 3, 2)[:dims]
    weight = torch.rand(5, device=route.device) + 0.5
    for turned_input, turned_gradient in ((False, True), (True, False), (True, True)):
        x, dy = (torch.randn(shape, device=route.device).to(dtype) for _ in range(2))
        x = x.movedim(1, -1).contiguous().movedim(-1, 1) if turned_input else x
        dy = dy.movedim(0, -1).contiguous().movedim(-1, 0) if turned_gradient else dy
        wide = x.double().requires_grad_()
        expected = functional.batch_norm(wide, None, None, weight.double(), None, True)
        with _library.implementation(route.implementation):
            output = batch_norm(x.requires_grad_(), weight=weight)
        (gradient,) = torch.autograd.grad(output, x, dy)
        assert_close(gradient, torch.autograd.grad(expected, wide, dy.double())[0], reduction=48)


@pytest.mark.parametrize("route", routes())
def test_running_statistics_that_are_not_contiguous_are_updated(route: Route) -> None:
    x = torch.randn(4, 6, 3, 3, device=route.device)
    mean, variance = (torch.ones(12, device=route.device)[::2] for _ in range(2))
    with _library.implementation(route.implementation):
        batch_norm(x, mean, variance, momentum=1.0, relu=True)
    assert_close(mean, x.double().mean((0, 2, 3)), reduction=36)
    assert_close(variance, x.double().var((0, 2, 3)), reduction=36)


def test_pytorch_gets_a_copy_of_a_misaligned_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for offset, size, misaligned in ((0, 4, False), (1, 4, True), (4, 4, False), (4, 2, True), (8, 2, False)):
        tensor: Any = SimpleNamespace(is_cuda=True, storage_offset=lambda o=offset: o, element_size=lambda s=size: s)
        assert reference.is_misaligned(tensor) == misaligned
    x, taken = torch.randn(4, 6, 3, 3), []
    original = torch.batch_norm
    monkeypatch.setattr(reference, "is_misaligned", lambda values: values.data_ptr() == x.data_ptr())
    monkeypatch.setattr(torch, "batch_norm", lambda input, *rest: taken.append(input) or original(input, *rest))
    torch.testing.assert_close(batch_norm(x), functional.batch_norm(x, None, None, training=True))
    assert taken[0].data_ptr() != x.data_ptr()
    assert taken[0].stride() == x.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_channels_last_that_start_at_an_odd_address(dtype: torch.dtype) -> None:
    x = torch.randn(1 + 4 * 7 * 7 * 16, device="cuda").to(dtype)[1:].view(4, 7, 7, 16).movedim(-1, 1).requires_grad_()
    weight = torch.rand(16, device="cuda")
    output = batch_norm(x, weight=weight, bias=weight)
    output.backward(torch.ones_like(output))
    assert_close(output, functional.batch_norm(x.double(), None, None, *[weight.double()] * 2, training=True))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("shape", [(0, 8, 3, 3), (2, 8, 0, 3)])
@pytest.mark.parametrize("training", [True, False])
def test_empty(route: Route, shape: tuple[int, ...], training: bool) -> None:
    x = torch.empty(shape, device=route.device, requires_grad=True)
    weight = torch.ones(8, device=route.device, requires_grad=True)
    mean, variance = torch.full((8,), 3.0, device=route.device), torch.full((8,), 2.0, device=route.device)
    with _library.implementation(route.implementation):
        output = batch_norm(x, mean, variance, weight, training=training, relu=True)
        output.sum().backward()
    assert output.shape == shape
    assert x.grad is not None
    assert weight.grad is not None
    assert not weight.grad.any()
    assert mean.eq(3).all()
    assert variance.eq(2).all()


@pytest.mark.parametrize("route", routes())
def test_one_value_per_channel(route: Route) -> None:
    x = torch.randn(1, 8, 1, 1, device=route.device, requires_grad=True)
    bias = torch.randn(8, device=route.device)
    mean, variance = torch.zeros(8, device=route.device), torch.ones(8, device=route.device)
    with _library.implementation(route.implementation):
        output = batch_norm(x, mean, variance, None, bias)
        output.sum().backward()
    assert_close(output.flatten(), bias.double())
    assert_close(mean, 0.1 * x.detach().double().flatten())
    assert_close(variance, torch.full((8,), 0.9, dtype=F64))
    assert_close(x.grad, torch.zeros(1, 8, 1, 1, dtype=F64))


class _Nothing(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(ctx, values):  # type: ignore[override]
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        return None


@pytest.mark.parametrize("route", routes())
def test_no_gradient_comes_back(route: Route) -> None:
    x = torch.randn(2, 4, 3, 3, device=route.device, requires_grad=True)
    scale = torch.ones((), device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        output = batch_norm(x, relu=True)
        (scale + _Nothing.apply(output).sum()).backward()
    assert scale.grad is not None
    assert x.grad is None or not x.grad.any()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_gradcheck(relu: bool, training: bool) -> None:
    x, z = (torch.randn(3, 4, 2, dtype=F64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.rand(4, dtype=F64, requires_grad=True) for _ in range(2))
    running = (torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64))

    def function(x: Tensor, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return batch_norm(x, *running, weight, bias, training, 0.0, z=z, relu=relu)

    assert torch.autograd.gradcheck(function, (x, z, weight, bias))
    assert torch.autograd.gradgradcheck(function, (x, z, weight, bias))


@pytest.mark.parametrize("training", [False, True])
def test_the_reference_of_silu_has_first_and_second_derivatives(training: bool) -> None:
    """Kernels take them when a graph of the gradients is asked for."""
    spec = BatchNormSpec(silu=True, training=training)
    x = torch.randn(3, 4, 2, 5, dtype=F64, requires_grad=True)
    weight, bias, mean, variance = (torch.rand(4, dtype=F64) for _ in range(4))
    leaves = (x, weight.requires_grad_(), bias.requires_grad_())
    expected = functional.silu(functional.batch_norm(x, mean.clone(), variance.clone(), weight, bias, training))
    if training:
        mean, variance = reference.combine(reference.rank_statistics(x, 1)[None])
    channels = Channels(mean, variance, weight, bias)
    assert_close(reference.normalise(x, None, channels, spec), expected)
    dy = torch.randn_like(x)
    wanted = torch.autograd.grad(expected, leaves, dy, create_graph=True)
    dx, _, dweight, dbias = reference.gradients(dy, x, None, channels, spec)
    for actual, right in zip((dx, dweight, dbias), wanted, strict=True):
        assert_close(actual, right)
    seconds = [torch.autograd.grad(each[0].square().sum(), leaves) for each in ((dx,), wanted)]
    for actual, right in zip(*seconds, strict=True):
        assert_close(actual, right)


def test_silu_goes_without_an_addend_and_relu() -> None:
    x = torch.randn(2, 3, 4)
    for others in ({"z": x}, {"relu": True}):
        with pytest.raises(ValueError, match=r"silu=True is for a norm without an addend z and without relu"):
            batch_norm(x, silu=True, **others)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_reference_is_torchs_norm_and_its_gradients_are_the_derivatives(relu: bool, training: bool) -> None:
    spec = BatchNormSpec(relu=relu, training=training)
    x, z = (torch.randn(3, 4, 2, 5, dtype=F64, requires_grad=True) for _ in range(2))
    weight, bias, mean, variance = (torch.rand(4, dtype=F64) for _ in range(4))
    leaves = (x, z, weight.requires_grad_(), bias.requires_grad_())
    expected = functional.batch_norm(x, mean.clone(), variance.clone(), weight, bias, training) + z
    expected = expected.relu() if relu else expected
    if training:
        mean, variance = reference.combine(reference.rank_statistics(x, 1)[None])
    channels = Channels(mean, variance, weight, bias)
    output = reference.normalise(x, z, channels, spec)
    assert_close(output, expected)
    dy = torch.randn_like(x)
    wanted = torch.autograd.grad(expected, leaves, dy)
    for actual, right in zip(reference.gradients(dy, x, output, channels, spec), wanted, strict=True):
        assert_close(actual, right)


@pytest.mark.parametrize("route", routes())
def test_a_second_derivative(route: Route) -> None:
    x, z = (torch.randn(3, 6, 3, 3, device=route.device) for _ in range(2))

    def second(x: Tensor, z: Tensor, addend: bool) -> Tensor:
        x = x.detach().requires_grad_()
        output = batch_norm(x, z=z if addend else None, relu=True)
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    for addend in (True, False):
        with _library.implementation(route.implementation):
            actual = second(x, z, addend)
        with _library.implementation("auto"):
            assert_close(actual, second(x.cpu().double(), z.cpu().double(), addend), reduction=10**4)


@pytest.mark.parametrize("route", routes())
def test_opcheck(route: Route) -> None:
    x, z = (torch.randn(3, 6, 3, 3, device=route.device).to(memory_format=torch.channels_last) for _ in range(2))
    weight, bias, mean, variance = (torch.rand(6, device=route.device) for _ in range(4))
    given, ops = (mean, variance, weight, bias), torch.ops.apex
    with _library.implementation(route.implementation):
        for running in ((mean.clone(), variance.clone()), (None, None)):
            opcheck(route, ops.batch_norm_statistics.default, (x, *running, weight, bias, 0.1, 1e-5, 1))
        for output in (z, None):
            for wants_input in (True, False):
                arguments = (x, x, output, *given, 1e-5, True, True, 1, wants_input)
                opcheck(route, ops.batch_norm_backward.default, arguments)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_compiled_without_graph_breaks(route: Route, dtype: torch.dtype) -> None:
    x, z = (torch.randn(3, 6, 3, 3, dtype=dtype, device=route.device) for _ in range(2))
    x, z = (each.to(memory_format=torch.channels_last) for each in (x, z))
    weight, bias = (torch.rand(6, device=route.device) for _ in range(2))
    leaves = [each.requires_grad_() for each in (x, z, weight, bias)]

    def function(x: Tensor, z: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return batch_norm(x.sin(), mean, variance, weight, bias, z=z, relu=True).cos()

    backend = "inductor" if route.device == "cuda" else "aot_eager"
    results = []
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        for each in (torch.compile(function, fullgraph=True, backend=backend), function):
            running = [torch.zeros(6, device=route.device), torch.ones(6, device=route.device)]
            output = each(*leaves, *running)
            results.append([output, *running, *torch.autograd.grad(output.sum(), leaves)])
    for actual, wanted in zip(*results, strict=True):
        if dtype == BF16:  # rounded before and behind the norm, where other kernels are
            torch.testing.assert_close(actual, wanted, rtol=0.02, atol=0.02)
        else:
            assert_close(actual, wanted.double(), reduction=27)


@pytest.mark.parametrize("route", [each for each in routes() if each.values[0].implementation == "triton"])
def test_what_torch_compile_sees(route: Route) -> None:
    """Statistics and gradients are operators, one for each pass; what Inductor can join with others is not."""
    graphs: list[list[str]] = []

    def collect(graph: torch.fx.GraphModule, _: object) -> object:
        inside = [node.args[0] if "functionalized" in str(node.target) else node.target for node in graph.graph.nodes]
        graphs.append([str(each).split(".")[1] for each in inside if str(each).startswith("apex.")])
        return make_boxed_func(graph)

    x, z = (torch.randn(3, 6, 3, 3, device=route.device, requires_grad=True) for _ in range(2))
    running = torch.zeros(6, device=route.device), torch.ones(6, device=route.device)
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        compiled = torch.compile(batch_norm, fullgraph=True, backend=aot_autograd(fw_compiler=collect))
        compiled(x, *running, z=z, relu=True).sum().backward()
    assert graphs == [["batch_norm_statistics"], ["batch_norm_backward"]]


def test_which_norms_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly large ones with something behind them; compiled also a shortcut's, and from a quarter of the size on."""
    for name in ("runs_triton", "runs_triton_now"):
        monkeypatch.setattr(_library, name, lambda *_: True)
    large, small = (torch.empty(size, 16, 256, 64, device="meta").movedim(-1, 1) for size in (16, 4))
    cases = [(large, True), (large, False), (small, True), (small, False), (small[:3], True)]
    taken = lambda compiling: [op.runs_kernels(x, None, BatchNormSpec(relu=relu), compiling) for x, relu in cases]  # noqa: E731
    assert taken(False) == [True, False, False, False, False]
    assert taken(True) == [True, True, True, True, False]


@pytest.mark.parametrize("route", routes())
def test_autocast_leaves_the_dtype_alone(route: Route) -> None:
    x = torch.randn(2, 8, 4, 4, device=route.device, dtype=BF16).to(memory_format=torch.channels_last)
    weight = torch.rand(8, device=route.device)
    with _library.implementation(route.implementation):
        expected = batch_norm(x, weight=weight, relu=True)
        with torch.autocast(route.device, dtype=BF16):
            actual = batch_norm(x, weight=weight, relu=True)
    assert actual.dtype == BF16
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("size", [4, 24])
def test_nan_stays_nan_behind_relu(size: int, route: Route) -> None:
    """One program has all 32 values of a channel of the small tensor, and several have the 1152 of the large one."""
    x = torch.randn(2, 3, size, size, device=route.device).to(memory_format=torch.channels_last)
    assert config.held_whole(x.numel(), 3, last=True) == (size == 4)
    x[0, 1, 0, 0] = float("nan")
    with _library.implementation(route.implementation):
        output = batch_norm(x, relu=True)
    assert output[:, 1].isnan().all()
    assert not output[:, ::2].isnan().any()


@pytest.mark.parametrize("route", routes())
def test_an_average_over_all_batches(route: Route) -> None:
    """The momentum is another one in every step."""
    x = torch.randn(4, 6, 3, 3, device=route.device)
    mean, variance = torch.zeros(6, device=route.device), torch.zeros(6, device=route.device)
    with _library.implementation(route.implementation):
        for step in range(1, 4):
            batch_norm(x * step, mean, variance, momentum=1 / step, relu=True)
    assert_close(mean, 2 * x.double().mean((0, 2, 3)), reduction=36)
    assert_close(variance, (1 + 4 + 9) / 3 * x.double().var((0, 2, 3)), reduction=36)


def test_what_is_left_to_torch() -> None:
    """Most plain norms and small inputs, unless kernels are asked for or PyTorch would round twice."""
    runs_kernels = op.runs_kernels
    small, large = torch.empty(2, 4, 8, 8), torch.empty(1, 1, 1, 1).expand(32, 256, 32, 32)
    wide = torch.empty(32, 64, 64, 64, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_library, "runs_triton_now", lambda family, tensor: True)
        assert runs_kernels(large, None, BatchNormSpec(relu=True))
        assert runs_kernels(large, large, BatchNormSpec())
        assert not runs_kernels(large, None, BatchNormSpec())
        assert runs_kernels(wide, None, BatchNormSpec())
        assert not runs_kernels(wide.new_empty(10, 512, 48, 48, dtype=torch.float16), None, BatchNormSpec())
        assert not runs_kernels(wide, None, BatchNormSpec(training=False))
        assert not runs_kernels(wide.to(memory_format=torch.channels_last), None, BatchNormSpec())
        assert not runs_kernels(small, None, BatchNormSpec(relu=True))
        assert not runs_kernels(small, small, BatchNormSpec(relu=True))
        assert runs_kernels(small.half(), small, BatchNormSpec())
        with _library.implementation("triton"):
            assert runs_kernels(small, None, BatchNormSpec())


def test_small_norms_go_to_torch_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few elements that PyTorch's operator takes as they are, and nothing that it takes but we refuse."""
    monkeypatch.setattr(op, "check", None)
    x, one, mean, variance = torch.randn(3, 6, 4), torch.rand(6), torch.zeros(6), torch.ones(6)
    expected = torch.nn.functional.batch_norm(x, mean.clone(), variance.clone(), one, one, True)
    assert torch.equal(batch_norm(x, mean, variance, one, one, z=x, relu=True), (expected + x).relu())
    assert not torch.equal(mean, torch.zeros(6))
    for changed in (
        {"weight": one[:, None]},
        {"weight": one.int()},
        {"weight": 1.0},
        {"weight": torch.rand(12)[::2]},
        {"bias": one.double()},
        {"z": x[0]},
        {"z": x.int()},
        {"z": x.to("meta"), "running_mean": mean, "running_var": variance},
        {"input": x.half()},
        {"input": x[:1, :, :1]},
        {"input": x[0, :, 0]},
        {"running_mean": mean},
        {"channel_dim": -1},
        {"input": torch.empty(1, 1).expand(config.NATIVE_BELOW // 6 + 1, 6)},
    ):
        with pytest.raises(TypeError, match="not callable"):
            batch_norm(**{"input": x, "weight": one, "bias": one, "relu": True, **changed})  # type: ignore[arg-type]


def test_large_plain_norms_that_no_kernel_takes_go_to_torch_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "check", None)
    monkeypatch.setattr(config, "NATIVE_BELOW", 1)
    x, one = torch.randn(3, 6, 4), torch.rand(6)
    expected = torch.nn.functional.batch_norm(x, None, None, one, one, True)
    assert torch.equal(batch_norm(x, weight=one, bias=one), expected)
    assert torch.equal(batch_norm(x, weight=one, bias=one, training=1), expected)  # type: ignore[arg-type]
    monkeypatch.setattr(config, "PLAIN_POSITIONS", 4)
    with pytest.raises(TypeError, match="not callable"):
        batch_norm(x, weight=one, bias=one)
    assert batch_norm(x, one, one, one, one, training=False).shape == x.shape


@pytest.mark.parametrize("route", [route for route in routes() if route.values[0].implementation == "triton"])
def test_backward_does_not_ask_again_who_takes_the_input(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 6, 4, 4, device=route.device), torch.rand(6, device=route.device)
    leaves, dy = (x.requires_grad_(), weight.requires_grad_()), torch.randn_like(x)
    with _library.implementation(route.implementation):
        output = batch_norm(x, weight=weight, relu=True)
        expected = torch.autograd.grad(output, leaves, dy, retain_graph=True)
        monkeypatch.setattr(op, "launches", None)
        found = torch.autograd.grad(output, leaves, dy)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_small_norms_without_memory_change_nothing(name: str) -> None:
    """Parameters that were never materialised are found before running statistics move."""
    given = {each: torch.ones(6) for each in ("running_mean", "running_var", "weight", "bias")}
    with pytest.raises(ValueError, match=f"{name} is on meta"):
        batch_norm(torch.randn(3, 6, 4), **{**given, name: torch.ones(6, device="meta")})  # type: ignore[arg-type]
    assert all(torch.equal(each, torch.ones(6)) for each in given.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_small_norms_refuse_another_device(dtype: torch.dtype, training: bool) -> None:
    """PyTorch's operator notices that before it changes anything, and the error is ours."""
    x = torch.randn(3, 6, 4, 4, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    here = [torch.ones(6, device="cuda") for _ in range(4)]
    for place, name in enumerate(("running_mean", "running_var", "weight", "bias")):
        given = [each.cpu() if number == place else each for number, each in enumerate(here)]
        with pytest.raises(ValueError, match=f"{name} is on cpu"):
            batch_norm(x, *given, training=training)
    with pytest.raises(ValueError, match="z is on cpu"):
        batch_norm(x, *here, training=training, z=x.cpu())
    batch_norm(x.double(), *[each.clone() for each in here], training=training)  # which takes no float32 by itself
    assert all(torch.equal(each, torch.ones_like(each)) for each in here)


@pytest.mark.parametrize("last", [True, False])
def test_tiles_cover_everything(last: bool) -> None:
    for positions, channels in ((49, 2048), (3136, 96), (1, 5), (100352, 256)):
        tiles = config.tiling(config.Geometry(1, positions, channels, last), 2048)
        *_, chunks = tiles.sizes[:3]
        rows, channel_block = tiles.constants["R"], tiles.constants["C_BLOCK"]
        assert rows * chunks >= positions
        assert (channels if last else positions) % tiles.constants["ALIGN"] == 0
        assert channel_block * tiles.channel_blocks >= channels
        assert rows * channel_block <= 2048


@pytest.mark.parametrize("last", [True, False])
def test_whole_channels_fit_a_program(last: bool) -> None:
    assert not config.held_whole(5 * 8193, 5, last)
    for images, positions, channels in ((1, 196, 200), (2, 512, 7), (1, 1, 5), (64, 16, 2048), (1, 8192, 3)):
        if not config.held_whole(images * positions * channels, channels, last):
            assert last
            continue
        (programs,), sizes, constants = config.whole_tiling(config.Geometry(images, positions, channels, last))
        assert sizes == (images * positions, positions, channels)
        assert constants["R"] >= images * positions
        assert constants["R"] * constants["C_BLOCK"] <= config.WHOLE_TILE
        assert programs * constants["C_BLOCK"] >= channels > (programs - 1) * constants["C_BLOCK"]


ONES = torch.ones(6)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([1.0, 2.0],), {}, TypeError, "input must be a tensor, got list"),
        ((torch.ones(6),), {}, ValueError, r"shape \[6\]"),
        ((torch.ones(2, 6, dtype=torch.int32),), {}, TypeError, "floating-point input"),
        ((torch.ones(2, 6), ONES), {}, ValueError, "given together"),
        ((torch.ones(2, 6),), {"training": False}, ValueError, "needed where training is False"),
        ((torch.ones(2, 6), torch.ones(5), ONES), {}, ValueError, "running_mean has shape"),
        ((torch.ones(2, 6), None, None, torch.ones(5)), {}, ValueError, "weight has shape"),
        ((torch.ones(2, 6), None, None, ONES.int()), {}, TypeError, "weight must be"),
        ((torch.ones(2, 6), None, None, ONES.to("meta")), {}, ValueError, "weight is on meta"),
        ((torch.ones(2, 6),), {"z": torch.ones(2, 5)}, ValueError, "z has shape"),
        ((torch.ones(2, 6),), {"z": torch.ones(2, 6, dtype=torch.int32)}, TypeError, "z must be"),
        ((torch.ones(2, 6),), {"channel_dim": 2}, ValueError, "channel_dim=2"),
    ],
)
def test_bad_arguments(arguments: tuple, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batch_norm(*arguments, **options)
