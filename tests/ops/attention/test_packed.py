"""Attention within packed sequences against the float64 reference, by every route, with memory full of NaN."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from apex.ops import _device, _library
from apex.ops.attention import config, op_packed, packed_attention, reference
from tests.ops.attention.cases import LARGE_PACKED_CASES, PACKED_CASES, PackedCase, assert_close
from tests.support.harness import Route, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def run(case: PackedCase, qkv: Tensor, bounds: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient; the same dropout every time."""
    leaf = qkv.detach().requires_grad_()
    torch.manual_seed(7)
    output = packed_attention(leaf, bounds, case.max_seqlen, case.dropout_p)
    return output, torch.autograd.grad(output, leaf, dout)[0]


def exact(case: PackedCase, qkv: Tensor, bounds: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    seed = op_packed.draw_seed(qkv.device).cpu() if case.dropout_p else None
    leaf = qkv.double().cpu().requires_grad_()
    output = reference.packed_attention(leaf, bounds.cpu(), case.dropout_p, seed)
    return output, torch.autograd.grad(output, leaf, dout.double().cpu())[0]


def check(case: PackedCase, route: Route) -> None:
    tensors = case.tensors(route.device)
    expected, expected_gradient = exact(case, *tensors)
    with _library.implementation(route.implementation):
        output, gradient = run(case, *tensors)
    assert_close(output, expected, "output")
    assert_close(gradient, expected_gradient, "gradient")
    end = sum(case.lengths)
    assert not output[end:].any()
    assert not gradient[end:].any()


def test_the_reference_is_attention_of_each_sequence() -> None:
    case = PACKED_CASES[2]
    qkv, bounds, _ = case.tensors("cpu")
    output = reference.packed_attention(qkv.double(), bounds)
    start = 0
    for length in case.lengths:
        query, key, value = qkv[start : start + length].double().unbind(1)
        weights = torch.einsum("mhd,nhd->hmn", query, key).div(4.0).softmax(-1)
        torch.testing.assert_close(output[start : start + length], torch.einsum("hmn,nhd->mhd", weights, value))
        start += length


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_matches_reference(case: PackedCase, route: Route) -> None:
    check(case, route)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE_PACKED_CASES, ids=str)
def test_matches_reference_at_model_sizes(case: PackedCase) -> None:
    check(case, Route("cuda", "triton"))


@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_padding_gives_the_same_without_knowing_lengths(case: PackedCase) -> None:
    """What other devices and torch.compile use."""
    qkv, bounds, dout = case.tensors("cpu")
    expected, expected_gradient = exact(case, qkv, bounds, dout)
    torch.manual_seed(7)
    seed = op_packed.draw_seed(qkv.device) if case.dropout_p else None
    leaf = qkv.requires_grad_()
    options = (bounds, case.max_seqlen, case.dropout_p, seed)
    output = reference.padded_attention(leaf, *options)
    assert_close(output, expected)
    assert_close(torch.autograd.grad(output, leaf, dout)[0], expected_gradient)
    output = reference.padded_attention(leaf, *options, sdpa=False)  # what has a second derivative
    assert_close(output, expected)
    assert_close(torch.autograd.grad(output, leaf, dout)[0], expected_gradient)


@pytest.mark.parametrize("route", routes())
def test_dropout_follows_the_generator(route: Route) -> None:
    qkv, bounds, _ = PACKED_CASES[1].tensors(route.device)
    with _library.implementation(route.implementation):
        outputs = []
        for seed in (1, 1, 2):
            generator = torch.Generator(route.device).manual_seed(seed)
            outputs.append(packed_attention(qkv, bounds, 16, 0.5, generator=generator))
        first, again, other = outputs
        torch.manual_seed(3)
        ambient = packed_attention(qkv, bounds, 16, 0.5)
        torch.manual_seed(3)
        assert torch.equal(ambient, packed_attention(qkv, bounds, 16, 0.5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_everywhere(dropout_p: float) -> None:
    """Overall, in every row and column, and without a pattern from one to the next."""
    keep = reference.dropout_keep(torch.tensor([123456789 << 20]), 3, 4, 256, 256, dropout_p).double()
    deviation = (dropout_p * (1 - dropout_p)) ** 0.5
    assert abs(keep.mean() - (1 - dropout_p)) < 5 * deviation / keep.numel() ** 0.5
    for dimension in (1, 2):
        shares = keep.mean(dimension)
        assert (shares - (1 - dropout_p)).abs().max() < 6 * deviation / 256**0.5
    centred = keep - keep.mean()
    for dimension in (0, 1, 2):
        for distance in (1, 2, 3):
            shifted = centred.roll(distance, dimension)
            correlation = (centred * shifted).mean() / deviation**2
            assert abs(correlation) < 6 / keep.numel() ** 0.5


def cudnn_by_formula(query: Tensor, key: Tensor, value: Tensor, saves: bool) -> tuple[Tensor, Tensor | None]:
    """What `cudnn_attention` gets from cuDNN."""
    logits = query.float() @ key.float().transpose(-1, -2) / query.shape[-1] ** 0.5
    output = (logits.softmax(-1) @ value.float()).transpose(1, 2).flatten(0, 1).to(query.dtype)
    return output.contiguous(), logits.logsumexp(-1) if saves else None


KERNELS = [route for route in routes() if route.id in ("interpreter", "gpu-triton")]


@pytest.mark.parametrize("route", KERNELS)
@pytest.mark.parametrize("lengths", [(20, 20, 20), (20, 3, 20), (0, 20, 0), (60,), (7,)], ids=str)
def test_as_many_rows_as_if_all_had_the_greatest_length(
    route: Route, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are taken for a batch first; the kernel finds out whether they are one."""
    case = PackedCase("", lengths, 2, 16, tail=60 - sum(lengths))
    qkv, bounds, dout = case.tensors(route.device)
    expected, expected_gradient = exact(case, qkv, bounds, dout)
    asked = []
    monkeypatch.setattr(
        op_packed, "asks_cudnn", lambda qkv, sequences, length: asked.append((sequences, length)) or True
    )
    monkeypatch.setattr(op_packed, "cudnn_attention", cudnn_by_formula)
    end, longest = sum(lengths), 60 // len(lengths)
    leaf = qkv.requires_grad_()
    with _library.implementation(route.implementation):
        output = packed_attention(leaf, bounds, longest, zero_tail=False)
        (gradient,) = torch.autograd.grad(output, leaf, dout)
        with torch.no_grad():
            unsaved = packed_attention(leaf, bounds, longest, zero_tail=False)
            settings = (longest, 0.0, False, False)
            parts = op_packed.launch_forward(qkv, bounds, None, *settings)
            apart = op_packed.launch_backward(dout, qkv, bounds, None, *parts, *settings, [True])
    assert asked[0] == (len(lengths), longest)
    assert_close(apart[:end], expected_gradient[:end], "gradient from statistics as they are elsewhere")
    assert_close(output[:end], expected[:end], "output")
    assert_close(unsaved[:end], expected[:end], "output without gradient")
    assert_close(gradient[:end], expected_gradient[:end], "gradient")


def test_a_batch_is_looked_for_where_nobody_asks_for_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows to be zeroed are rows behind the last sequence; dropout is the kernel's own."""
    pytest.importorskip("triton")
    monkeypatch.setattr(op_packed, "asks_cudnn", lambda *arguments: pytest.fail("asked"))
    qkv, bounds = torch.randn(8, 3, 1, 16), torch.tensor([0, 4, 8])
    with _library.implementation("triton"):
        packed_attention(qkv, bounds, 4)
        packed_attention(qkv, bounds, 4, 0.5, zero_tail=False)


def test_a_batch_of_tensors_without_an_address_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch.func on a GPU, for which a subclass stands here."""

    class WithoutAddress(torch.Tensor):
        is_cuda = True

        def data_ptr(self) -> int:
            pytest.fail("asked")

    monkeypatch.setattr(op_packed, "cudnn_takes", lambda *form: True)
    assert not op_packed.asks_cudnn(torch.empty(8, 3, 1, 16).half().as_subclass(WithoutAddress), 2, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", [64, 128])
def test_a_batch_through_cudnn(dtype: torch.dtype, head: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CUDNN_FEWEST_ELEMENTS", 1)
    _device.forget_launches()
    for lengths in ((512, 512), (512, 100)):
        case = PackedCase("", lengths, 2, head, 1024 - sum(lengths), dtype)
        qkv, bounds, dout = case.tensors("cuda")
        expected, expected_gradient = exact(case, qkv, bounds, dout)
        leaf, end = qkv.requires_grad_(), sum(lengths)
        assert op_packed.asks_cudnn(qkv, 2, 512) == (torch.cuda.get_device_capability() == (9, 0))
        for mode in ("default", "error"):  # nothing waits for the device, once kernels are compiled
            torch.cuda.set_sync_debug_mode(mode)
            try:
                output = packed_attention(leaf, bounds, 512, zero_tail=False)
                (gradient,) = torch.autograd.grad(output, leaf, dout)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert_close(output[:end], expected[:end], "output")
        assert_close(gradient[:end], expected_gradient[:end], "gradient")
        output.add_(1)  # is no view that autograd would guard


@pytest.mark.parametrize("route", routes())
def test_strided_qkv(route: Route) -> None:
    case = PACKED_CASES[2]
    qkv, bounds, dout = case.tensors(route.device)
    wide = torch.empty(*qkv.shape[:3], 2 * qkv.shape[3], device=route.device)[..., : qkv.shape[3]].copy_(qkv)
    turned = qkv.transpose(2, 3).contiguous().transpose(2, 3)
    other_dout = dout.transpose(0, 1).contiguous().transpose(0, 1)
    expected, expected_gradient = exact(case, qkv, bounds, dout)
    with _library.implementation(route.implementation):
        for strided in (wide, turned):
            output, gradient = run(case, strided, bounds, other_dout)
            assert_close(output, expected)
            assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("route", routes())
def test_lengths_of_either_dtype_one_after_the_other(route: Route) -> None:
    """Launches are kept; those for one dtype must not be taken for the other."""
    qkv = torch.randn(9, 3, 2, 16, device=route.device)
    found = []
    with _library.implementation(route.implementation):
        for dtype in (torch.int32, torch.int64, torch.int32):
            leaf = qkv.clone().requires_grad_()
            output = packed_attention(leaf, torch.tensor([0, 4, 9], dtype=dtype, device=route.device), 5)
            found.append((output, torch.autograd.grad(output.square().sum(), leaf)[0]))
    for output, gradient in found[1:]:
        assert_equal_bits(output, found[0][0])
        assert_equal_bits(gradient, found[0][1])


@pytest.mark.parametrize("route", routes())
def test_nothing_to_attend_to(route: Route) -> None:
    with _library.implementation(route.implementation):
        for rows, bounds in ((0, [0]), (0, [0, 0]), (4, [0]), (4, [0, 0, 0])):
            qkv = torch.randn(rows, 3, 2, 8, device=route.device, requires_grad=True)
            output = packed_attention(qkv, torch.tensor(bounds, device=route.device), 4)
            assert not output.any()
            assert output.shape == (rows, 2, 8)
            assert not torch.autograd.grad(output.sum(), qkv)[0].any()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("strided", [False, True])
def test_second_derivative(route: Route, dropout_p: float, strided: bool) -> None:
    qkv = torch.randn(6, 3, 2, 3, device=route.device)
    if strided:  # in an order that kernels need a copy of
        qkv = qkv.transpose(2, 3).contiguous().transpose(2, 3)
    qkv.requires_grad_()
    bounds = torch.tensor([0, 2, 6], device=route.device)
    seed = op_packed.draw_seed(qkv.device) if dropout_p else None

    def second(function, leaf):
        (first,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    with _library.implementation(route.implementation):
        actual = second(
            lambda x: op_packed.PACKED_ATTENTION.differentiable(x, bounds, seed, 4, dropout_p, True, False), qkv
        )
    on_host = None if seed is None else seed.cpu()
    wide = qkv.detach().cpu().double().requires_grad_()
    assert_close(actual, second(lambda x: reference.packed_attention(x, bounds.cpu(), dropout_p, on_host), wide))


@pytest.mark.parametrize("route", routes())
def test_activation_checkpointing_repeats_the_dropout(route: Route) -> None:
    qkv, bounds, dout = PACKED_CASES[1].tensors(route.device)
    leaf = qkv.requires_grad_()
    with _library.implementation(route.implementation):
        _, plain = run(PackedCase("", (16, 16), 2, 16, dropout_p=0.3), qkv, bounds, dout)
        torch.manual_seed(7)
        output = checkpoint(lambda x: packed_attention(x, bounds, 16, 0.3), leaf, use_reentrant=False)
        output.backward(dout)
    assert torch.equal(leaf.grad, plain)


@pytest.mark.parametrize("route", routes())
def test_autocast_computes_in_its_dtype(route: Route) -> None:
    qkv, bounds, _ = PACKED_CASES[2].tensors(route.device)
    with _library.implementation(route.implementation), torch.autocast(route.device, dtype=torch.bfloat16):
        output = packed_attention(qkv, bounds, 33)
    assert output.dtype == torch.bfloat16
    assert_close(output, reference.packed_attention(qkv.double().cpu(), bounds.cpu()))


@pytest.mark.parametrize(
    ("shape", "bounds", "length", "dropout_p", "message"),
    [
        ((4, 2, 2, 8), [0, 4], 4, 0.0, "qkv has shape"),
        ((4, 3, 2, 8), [[0, 4]], 4, 0.0, "cu_seqlens has shape"),
        ((4, 3, 2, 8), [0, 5], 5, 0.0, "the 4 rows of qkv"),
        ((4, 3, 2, 8), [0, 3, 2], 4, 0.0, "must grow"),
        ((4, 3, 2, 8), [0, 4], 3, 0.0, "max_s=3"),
        ((4, 3, 2, 8), [0, 4], 4, 1.0, "p_dropout=1.0"),
    ],
)
def test_arguments_that_do_not_fit(shape, bounds, length, dropout_p, message) -> None:
    with pytest.raises(ValueError, match=message):
        packed_attention(torch.zeros(shape), torch.tensor(bounds), length, dropout_p)


def test_dtypes_that_do_not_fit() -> None:
    qkv, bounds = torch.zeros(4, 3, 2, 8), torch.tensor([0, 4])
    with pytest.raises(TypeError, match=r"cu_seqlens is torch.float32"):
        packed_attention(qkv, bounds.float(), 4)
    with pytest.raises(TypeError, match="floating-point"):
        packed_attention(qkv.int(), bounds, 4)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    qkv, bounds, dout = PACKED_CASES[9].tensors("cuda")
    leaf = qkv.requires_grad_()
    for implementation in ("triton", "torch"):
        with _library.implementation(implementation):
            torch.cuda.set_sync_debug_mode("error")
            try:
                output = packed_attention(leaf, bounds, 20, 0.3 if implementation == "triton" else 0.0)
                torch.autograd.grad(output, leaf, dout)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    heads, head = 16, 64
    rows = (1 << 31) // (3 * heads * head) + 517
    qkv = torch.randn(rows, 3, heads, head, device="cuda", dtype=torch.float16)
    bounds = torch.tensor([0, rows - 200, rows - 3], dtype=torch.int32, device="cuda")
    # The first sequence is cut off: only the last one is looked at.
    options = (bounds, None, 256, 0.0, True)
    output, statistics = op_packed.launch_forward(qkv, *options, False)
    dqkv = op_packed.launch_backward(output, qkv, bounds, None, output, statistics, 256, 0.0, True, False, [True])
    last = slice(rows - 200, rows - 3)
    wide = qkv[last].double().cpu().requires_grad_()
    expected = reference.packed_attention(wide, torch.tensor([0, 197]))
    assert_close(output[last], expected)
    assert_close(dqkv[last], torch.autograd.grad(expected, wide, output[last].double().cpu())[0])
    assert not dqkv[-3:].any()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("bounds", [[0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_no_sequence_at_all(route: Route, bounds: list[int], dropout_p: float) -> None:
    qkv = torch.randn(3, 3, 2, 8, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        output = packed_attention(qkv, torch.tensor(bounds, device=route.device), 1, dropout_p)
        (first,) = torch.autograd.grad(output.sum(), qkv, create_graph=True)
    assert output.shape == (3, 2, 8)
    assert not output.any()
    assert not first.any()


def test_sequences_start_at_the_first_row() -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens=\[2, 5\] must grow from 0"):
        packed_attention(torch.randn(5, 3, 2, 8), torch.tensor([2, 5]), 3)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("bounds", [[0, 5, 2, 6], [-4, 3, 6], [0, 4, 9]], ids=str)
def test_bounds_that_leave_the_rows(bounds: list[int], route: Route) -> None:
    """Refused on a CPU; kernels cut them to the rows there are, and what lies around those is NaN."""
    memory = torch.full((18, 3, 2, 16), torch.nan, device=route.device)
    qkv = memory[6:12].normal_()
    given = torch.tensor(bounds, device=route.device)
    with pytest.raises(ValueError, match="must grow from 0 to at most the 6 rows"):
        op_packed.check(qkv.cpu(), given.cpu(), 6, 0.0)
    if route == Route("cpu", "torch"):
        output = reference.padded_attention(qkv, given, 6, 0.0, None)
    else:
        with _library.implementation(route.implementation):
            output, _ = op_packed.launch_forward(qkv, given, None, 6, 0.0, True, False)
    assert output.isfinite().all()
