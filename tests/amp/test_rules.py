"""Dtypes of functions between initialize and shutdown: upstream's lists, on a CPU and on a GPU.

The GPU's rules are checked without a GPU: fake tensors go through the same autocast kernels.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from apex import amp
from apex.ops.autocast import RuleKernels
from tests.amp.common import quiet

HALF, FLOAT, WIDEST, LOGICAL, BANNED, REFUSED = "half", "float", "widest", "logical", "banned", "refused"


class Make(NamedTuple):
    """Makes arguments: of float32, of half precision, and integers."""

    device: str
    low: torch.dtype

    def f(self, *shape: int) -> Tensor:
        return torch.full(shape, 0.5, device=self.device)

    def h(self, *shape: int) -> Tensor:
        return torch.full(shape, 0.5, device=self.device, dtype=self.low)

    def i(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=torch.int64)


Call = Callable[[Make], Any]
CALLS: dict[str, tuple[str, Call]] = {
    # float32 in, half precision out.
    "conv1d": (HALF, lambda m: F.conv1d(m.f(1, 2, 5), m.f(3, 2, 2))),
    "conv2d": (HALF, lambda m: F.conv2d(m.f(1, 2, 5, 5), m.f(3, 2, 2, 2))),
    "conv3d": (HALF, lambda m: F.conv3d(m.f(1, 2, 3, 3, 3), m.f(3, 2, 2, 2, 2))),
    "conv_transpose1d": (HALF, lambda m: F.conv_transpose1d(m.f(1, 2, 5), m.f(2, 3, 2))),
    "conv_transpose2d": (HALF, lambda m: F.conv_transpose2d(m.f(1, 2, 5, 5), m.f(2, 3, 2, 2))),
    "conv_transpose3d": (HALF, lambda m: F.conv_transpose3d(m.f(1, 2, 3, 3, 3), m.f(2, 3, 2, 2, 2))),
    "conv_tbc": (HALF, lambda m: F.conv_tbc(m.f(5, 1, 2), m.f(2, 2, 3), m.f(3))),
    "linear": (HALF, lambda m: F.linear(m.f(2, 2), m.f(2, 2), m.f(2))),
    "prelu": (HALF, lambda m: torch.prelu(m.f(2, 2), m.f(1))),
    "addmm": (HALF, lambda m: torch.addmm(m.f(2, 2), m.f(2, 2), m.f(2, 2))),
    "addmv": (HALF, lambda m: torch.addmv(m.f(2), m.f(2, 2), m.f(2))),
    "addr": (HALF, lambda m: torch.addr(m.f(2, 2), m.f(2), m.f(2))),
    "matmul": (HALF, lambda m: torch.matmul(m.f(2, 2), m.f(2, 2))),
    "mm": (HALF, lambda m: torch.mm(m.f(2, 2), m.f(2, 2))),
    "mv": (HALF, lambda m: torch.mv(m.f(2, 2), m.f(2))),
    "addbmm": (HALF, lambda m: torch.addbmm(m.f(2, 2), m.f(1, 2, 2), m.f(1, 2, 2))),
    "baddbmm": (HALF, lambda m: torch.baddbmm(m.f(1, 2, 2), m.f(1, 2, 2), m.f(1, 2, 2))),
    "bmm": (HALF, lambda m: torch.bmm(m.f(1, 2, 2), m.f(1, 2, 2))),
    "Tensor.__matmul__": (HALF, lambda m: m.f(2, 2) @ m.h(2, 2)),
    "Tensor.mm": (HALF, lambda m: m.f(2, 2).mm(m.f(2, 2))),
    # Half precision in, float32 out.
    **{
        name: (FLOAT, lambda m, name=name: getattr(torch, name)(m.h(2, 2)))
        for name in ("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt",
                     "sinh", "tan", "sum", "prod", "norm", "std", "var")
    },
    "Tensor.exp": (FLOAT, lambda m: m.h(2).exp()),
    "Tensor.sum": (FLOAT, lambda m: m.h(2, 2).sum(0)),
    "pow": (FLOAT, lambda m: torch.pow(m.h(2), 2)),
    "pow of tensors": (FLOAT, lambda m: torch.pow(m.h(2), m.h(2))),
    "Tensor.__pow__": (FLOAT, lambda m: m.h(2) ** 3),
    "Tensor.__rpow__": (FLOAT, lambda m: 2 ** m.h(2)),
    "cumprod": (FLOAT, lambda m: torch.cumprod(m.h(2, 2), 0)),
    "cumsum": (FLOAT, lambda m: torch.cumsum(m.h(2, 2), 0)),
    "dist": (FLOAT, lambda m: torch.dist(m.h(2, 2), m.h(2, 2))),
    "norm of rows": (FLOAT, lambda m: torch.norm(m.h(2, 2), dim=1)),
    "Tensor.norm": (FLOAT, lambda m: m.h(2, 2).norm()),
    "sum of rows": (FLOAT, lambda m: torch.sum(m.h(2, 2), 1)),
    "prod of rows": (FLOAT, lambda m: torch.prod(m.h(2, 2), 1)),
    "std of rows": (FLOAT, lambda m: torch.std(m.h(2, 2), 1)),
    "var of rows": (FLOAT, lambda m: m.h(2, 2).var(1)),
    "renorm": (FLOAT, lambda m: torch.renorm(m.h(2, 2), 2, 0, 1.0)),
    "interpolate": (FLOAT, lambda m: F.interpolate(m.h(1, 1, 4, 4), scale_factor=2)),
    "interpolate linear": (FLOAT, lambda m: F.interpolate(m.h(1, 1, 4), scale_factor=2, mode="linear")),
    "interpolate bilinear": (FLOAT, lambda m: F.interpolate(m.h(1, 1, 4, 4), scale_factor=2, mode="bilinear")),
    "interpolate bicubic": (FLOAT, lambda m: F.interpolate(m.h(1, 1, 4, 4), scale_factor=2, mode="bicubic")),
    "grid_sample": (FLOAT, lambda m: F.grid_sample(m.h(1, 1, 2, 2), m.h(1, 2, 2, 2), align_corners=False)),
    "softplus": (FLOAT, lambda m: F.softplus(m.h(2, 2))),
    "softmin": (FLOAT, lambda m: F.softmin(m.h(2, 2), 1)),
    "log_softmax": (FLOAT, lambda m: F.log_softmax(m.h(2, 2), 1)),
    "softmax": (FLOAT, lambda m: F.softmax(m.h(2, 2), 1)),
    "layer_norm": (FLOAT, lambda m: F.layer_norm(m.h(2, 2), (2,), m.f(2), m.f(2))),
    "group_norm": (FLOAT, lambda m: F.group_norm(m.h(2, 2, 3), 1, m.f(2), m.f(2))),
    "local_response_norm": (FLOAT, lambda m: F.local_response_norm(m.h(2, 2, 3), 2)),
    "normalize": (FLOAT, lambda m: F.normalize(m.h(2, 2))),
    "cosine_similarity": (FLOAT, lambda m: F.cosine_similarity(m.h(2, 2), m.h(2, 2))),
    "poisson_nll_loss": (FLOAT, lambda m: F.poisson_nll_loss(m.h(2, 2), m.h(2, 2))),
    "cosine_embedding_loss": (FLOAT, lambda m: F.cosine_embedding_loss(m.h(2, 2), m.h(2, 2), m.h(2))),
    "cross_entropy": (FLOAT, lambda m: F.cross_entropy(m.h(2, 2), m.i(2))),
    "hinge_embedding_loss": (FLOAT, lambda m: F.hinge_embedding_loss(m.h(2, 2), m.h(2, 2))),
    "kl_div": (FLOAT, lambda m: F.kl_div(m.h(2, 2), m.h(2, 2), reduction="sum")),
    "l1_loss": (FLOAT, lambda m: F.l1_loss(m.h(2, 2), m.h(2, 2))),
    "mse_loss": (FLOAT, lambda m: F.mse_loss(m.h(2, 2), m.h(2, 2))),
    "margin_ranking_loss": (FLOAT, lambda m: F.margin_ranking_loss(m.h(2), m.h(2), m.h(2))),
    "multilabel_margin_loss": (FLOAT, lambda m: F.multilabel_margin_loss(m.h(2, 2), m.i(2, 2))),
    "multilabel_soft_margin_loss": (FLOAT, lambda m: F.multilabel_soft_margin_loss(m.h(2, 2), m.h(2, 2))),
    "multi_margin_loss": (FLOAT, lambda m: F.multi_margin_loss(m.h(2, 2), m.i(2))),
    "nll_loss": (FLOAT, lambda m: F.nll_loss(m.h(2, 2), m.i(2))),
    "nll_loss of images": (FLOAT, lambda m: F.nll_loss(m.h(2, 2, 3, 3), m.i(2, 3, 3))),
    "binary_cross_entropy_with_logits": (FLOAT, lambda m: F.binary_cross_entropy_with_logits(m.h(2), m.h(2))),
    "smooth_l1_loss": (FLOAT, lambda m: F.smooth_l1_loss(m.h(2, 2), m.h(2, 2))),
    "soft_margin_loss": (FLOAT, lambda m: F.soft_margin_loss(m.h(2, 2), m.h(2, 2))),
    "triplet_margin_loss": (FLOAT, lambda m: F.triplet_margin_loss(m.h(2, 2), m.h(2, 2), m.h(2, 2))),
    "ctc_loss": (FLOAT, lambda m: F.ctc_loss(m.h(5, 1, 4), m.i(1, 2) + 1, (5,), (2,))),
    "binary_cross_entropy in float32": (FLOAT, lambda m: F.binary_cross_entropy(m.f(2), m.f(2))),
    # On upstream's float32 list, here as autocast has it: what comes in, computed in float32 and rounded once.
    "gelu": (HALF, lambda m: F.gelu(m.h(2, 2))),
    # Mixed in, the widest out.
    **{
        name: (WIDEST, lambda m, name=name: getattr(torch, name)(m.h(2, 2), m.f(2, 2)))
        for name in ("atan2", "add", "div", "mul", "sub")
    },
    "Tensor.__radd__": (WIDEST, lambda m: m.h(2) + m.f(2)),
    "addcdiv": (WIDEST, lambda m: torch.addcdiv(m.h(2), m.f(2), m.h(2))),
    "addcmul": (WIDEST, lambda m: torch.addcmul(m.h(2), m.f(2), m.h(2))),
    "cross": (WIDEST, lambda m: torch.cross(m.h(2, 3), m.f(2, 3), dim=1)),
    "bilinear": (WIDEST, lambda m: F.bilinear(m.h(2, 2), m.f(2, 2), m.f(1, 2, 2))),
    "dot": (WIDEST, lambda m: torch.dot(m.h(2), m.f(2))),
    "cat": (WIDEST, lambda m: torch.cat([m.h(2), m.f(2)])),
    "stack": (WIDEST, lambda m: torch.stack([m.h(2), m.f(2)])),
    **{
        name: (LOGICAL, lambda m, name=name: getattr(torch, name)(m.h(2, 2), m.f(2, 2)))
        for name in ("eq", "ge", "gt", "le", "lt", "ne")
    },
    # In place: the type of the tensor itself.
    "Tensor.__iadd__": (HALF, lambda m: m.h(2).add_(m.f(2))),
    "Tensor.__imul__": (HALF, lambda m: m.h(2).mul_(m.f(2))),
    "Tensor.__isub__": (HALF, lambda m: m.h(2).sub_(m.f(2))),
    "Tensor.__itruediv__": (HALF, lambda m: m.h(2).div_(m.f(2))),
    "binary_cross_entropy": (BANNED, lambda m: F.binary_cross_entropy(m.h(2), m.f(2))),
    "BCELoss": (BANNED, lambda m: nn.BCELoss()(m.h(2), m.h(2))),
    # In place, where the result is float32.
    **{
        f"Tensor.{name}": (REFUSED, lambda m, name=name: getattr(m.h(2, 2), name)())
        for name in ("acos_", "arccos_", "asin_", "cosh_", "erfinv_", "exp_", "expm1_", "log_", "log10_", "log1p_",
                     "log2_", "reciprocal_", "rsqrt_", "sinh_", "tan_")
    },
    "torch.exp_": (REFUSED, lambda m: torch.exp_(m.h(2))),
    "Tensor.pow_": (REFUSED, lambda m: m.h(2).pow_(2)),
    "Tensor.pow_ of tensors": (REFUSED, lambda m: m.f(2).pow_(m.h(2))),
    "Tensor.__ipow__": (REFUSED, lambda m: operator.ipow(m.h(2), 2)),
    "Tensor.cumprod_": (REFUSED, lambda m: m.h(2, 2).cumprod_(0)),
    "Tensor.cumsum_": (REFUSED, lambda m: m.h(2, 2).cumsum_(0)),
    "Tensor.renorm_": (REFUSED, lambda m: m.h(2, 2).renorm_(2, 0, 1.0)),
    "Tensor.exp_ in float32": (FLOAT, lambda m: m.f(2).exp_()),
    "Tensor.__ipow__ in float32": (FLOAT, lambda m: operator.ipow(m.f(2), 2)),
}  # fmt: skip
RECURRENT: dict[str, Call] = {
    "LSTM": lambda m: nn.LSTM(2, 3)(m.f(4, 1, 2))[0],
    "GRU": lambda m: nn.GRU(2, 3)(m.f(4, 1, 2))[0],
    "RNN": lambda m: nn.RNN(2, 3)(m.f(4, 1, 2))[0],
    "packed LSTM": lambda m: nn.LSTM(2, 3)(packed(m.f(4, 1, 2)))[0].data,
    "LSTMCell": lambda m: nn.LSTMCell(2, 3)(m.f(1, 2))[0],
    "GRUCell": lambda m: nn.GRUCell(2, 3)(m.f(1, 2)),
    "RNNCell": lambda m: nn.RNNCell(2, 3)(m.f(1, 2)),
}


def packed(sequence: Tensor) -> nn.utils.rnn.PackedSequence:
    return nn.utils.rnn.pack_padded_sequence(sequence, torch.tensor([len(sequence)], device="cpu"))


def check(rule: str, call: Call, make: Make) -> None:
    if rule == BANNED:
        with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
            call(make)
        return
    if rule == REFUSED:
        with pytest.raises(NotImplementedError, match=rf"_ was called in place with a {make.low} argument"):
            call(make)
        return
    expected = {HALF: make.low, FLOAT: torch.float32, WIDEST: torch.float32, LOGICAL: torch.bool}[rule]
    assert call(make).dtype == expected


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", [*CALLS, *RECURRENT])
def test_on_a_cpu(name: str, low: torch.dtype) -> None:
    quiet(nn.Linear(1, 1), opt_level="O1" if low == torch.float16 else "O4")
    rule, call = CALLS[name] if name in CALLS else (HALF, RECURRENT[name])
    check(rule, call, Make("cpu", low))


@contextlib.contextmanager
def pretended_gpu(low: torch.dtype) -> Iterator[Make]:
    """Yield with autocast for GPUs and apex's rules, for fake tensors."""
    kernels = RuleKernels()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", low)
    try:
        with FakeTensorMode():
            yield Make("cuda", low)
    finally:
        torch.set_autocast_enabled("cuda", False)
        kernels.release()


# These ask cuDNN on their way.
NEED_A_GPU = ("grid_sample", "ctc_loss")


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NEED_A_GPU])
def test_rules_of_a_gpu_with_fake_tensors(name: str) -> None:
    with pretended_gpu(torch.float16) as make:
        check(*CALLS[name], make)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CALLS, *(name for name in RECURRENT)])
def test_on_a_gpu(name: str) -> None:
    quiet(nn.Linear(1, 1).cuda(), opt_level="O1")
    rule, call = CALLS[name] if name in CALLS else (HALF, RECURRENT[name])
    with torch.device("cuda"):
        check(rule, call, Make("cuda", torch.float16))


def test_equal_of_mixed_types() -> None:
    quiet(nn.Linear(1, 1), opt_level="O1")
    half = torch.tensor([0.5, 0.25]).half()
    assert torch.equal(half, half.float())
    assert half.equal(half.float())
    assert not torch.equal(half, half.float() + 1e-6)


def test_the_numbers_are_float32_numbers() -> None:
    """Check that a function cast to float32 computes in float32 without rounding in between."""
    quiet(nn.Linear(1, 1), opt_level="O1")
    x = torch.linspace(0.1, 0.9, 50).half()
    assert torch.equal(torch.exp(x), torch.exp(x.float()))
    assert torch.sum(torch.full((50,), 60000.0).half()).item() == 3000000.0
    assert torch.equal(torch.var(x), torch.var(x.float()))
    assert torch.equal(F.softmax(x, 0), F.softmax(x.float(), 0))


def test_a_type_that_is_asked_for_is_given() -> None:
    quiet(nn.Linear(1, 1), opt_level="O1")
    x = torch.ones(3).half()
    assert torch.sum(x, dtype=torch.float64).dtype == torch.float64
    assert torch.cumsum(x, 0, dtype=torch.float16).dtype == torch.float16
    assert F.softmax(x, 0, dtype=torch.float64).dtype == torch.float64
    assert torch.softmax(x, 0, torch.float16).dtype == torch.float16


def test_doubles_and_integers_are_left_alone() -> None:
    quiet(nn.Linear(1, 1), opt_level="O1")
    double = torch.ones(2, 2, dtype=torch.float64)
    assert (double @ double).dtype == torch.float64
    assert torch.exp(double).dtype == torch.float64
    assert torch.mv(double, double[0]).dtype == torch.float64
    assert torch.sum(torch.ones(3, dtype=torch.int64)).dtype == torch.int64
    assert torch.dot(torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)).dtype == torch.int64


def test_allow_banned() -> None:
    make = Make("cpu", torch.float16)
    handle = amp.init(allow_banned=True)
    loss = F.binary_cross_entropy(make.h(3), make.f(3))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(0.6931, abs=1e-4)
    handle._deactivate()
    amp.init()
    with pytest.raises(RuntimeError, match=r"register_float_function\(torch, 'sigmoid'\)"):
        F.binary_cross_entropy(make.h(3), make.f(3))


def test_the_advice_for_banned_functions_works() -> None:
    amp.register_float_function(torch, "sigmoid")
    model = quiet(nn.Linear(2, 1), opt_level="O1")
    loss = F.binary_cross_entropy(torch.sigmoid(model(torch.randn(3, 2))), torch.ones(3, 1))
    loss.backward()
    assert model.weight.grad is not None


def test_in_place_where_casts_are_off() -> None:
    """Casts are off in backward passes, optimizer steps and disable_casts, and for dtypes that amp does not cast."""
    quiet(nn.Linear(1, 1), opt_level="O1")
    half = torch.zeros(2).half()
    with amp.disable_casts():
        assert torch.equal(half.exp_(), torch.ones(2).half())
    for dtype in (torch.float32, torch.float64):
        plain = torch.zeros(2, dtype=dtype)
        assert plain.exp_() is plain
        assert torch.equal(plain, torch.ones(2, dtype=dtype))
    x = torch.zeros(2, requires_grad=True)
    (x * 1.0).exp_().sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_gradients_flow_through_the_kernels() -> None:
    quiet(nn.Linear(1, 1), opt_level="O1")
    x = torch.tensor([0.5, 1.0], dtype=torch.float16, requires_grad=True)
    torch.exp(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.exp(x.detach().float()).half())


def test_rules_end_with_the_session() -> None:
    def registered() -> set[str]:
        keys = ("AutocastCPU", "AutocastCUDA")
        return {f"{key}:{name}" for key in keys for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}

    before = registered()
    quiet(nn.Linear(1, 1), opt_level="O1")
    assert registered() > before
    amp.shutdown()
    assert registered() == before
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.exp(torch.ones(2).half()).dtype == torch.float16
        F.binary_cross_entropy(torch.full((2,), 0.5).half(), torch.ones(2))


def test_rules_are_for_sessions_that_cast_functions() -> None:
    quiet(nn.Linear(1, 1), opt_level="O2")
    assert torch.exp(torch.ones(2).half()).dtype == torch.float16
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
