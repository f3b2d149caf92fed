"""The loss against its definition in float64, by every route, with uninitialised memory full of NaN."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor

from apex.ops import _library, transducer
from apex.ops.transducer import LOSS, config, op_loss, reference
from tests.ops.transducer import formulas
from tests.support.harness import NO_GATHER, Route, assert_close, assert_equal_bits, opcheck, routes

ROUTES = routes(lacks=NO_GATHER)
_HALF, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# frames, labels, words, lengths of both, blank, dtype: one node; no labels; blank first, last and between; words in one
# tile, in two, and in rows of an odd length
CASES = [
    (1, 0, 2, [1], [0], 1, _F32),
    (3, 0, 5, [3, 1], [0, 0], 0, _F32),
    (3, 3, 7, [3, 1], [1, 3], 6, _F32),
    (3, 2, 32, [3, 2], [2, 0], 9, _HALF),
    (2, 1, 1100, [2, 1], [1, 1], 1050, _F32),
    (2, 2, 40, [2, 2], [2, 1], 0, _BF16),
]


def tensors(case, device: str, packed: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """x, label, f_len, y_len, batch_offset and the gradient of the losses."""
    frames, labels, words, f_len, y_len, _, dtype = case
    batches = len(f_len)
    x = 2 * torch.randn(batches, frames, labels + 1, words)
    label = torch.randint(words, (batches, labels), dtype=torch.int32)
    lengths = torch.tensor(f_len, dtype=torch.int32), torch.tensor(y_len)
    label[torch.arange(labels)[None] >= lengths[1][:, None]] = 1 << 30  # is not looked at
    grad = torch.tensor([1.0, -0.5, 2.0])[:batches]
    offset = None
    if packed:
        x = formulas.pack(x, lengths[0], lengths[1] + 1)
        offset = torch.cumsum(lengths[0] * (lengths[1] + 1), 0).to(device)
    return x.to(device, dtype), label.to(device), lengths[0].to(device), lengths[1].to(device), offset, grad.to(device)


def run(x, label, f_len, y_len, offset, grad, frames: int, blank: int) -> list[Tensor]:
    """Losses, alpha, beta and the gradient of x."""
    given, settings = (x, label, f_len, y_len, offset), (frames, blank, True, True, True)
    losses, sums, shares, scores = LOSS.run(*given, *settings)
    (gradient,) = LOSS.run_backward((grad.to(x.dtype),), (*given, sums, shares), settings, (True,))
    return [losses, *scores.unbind(0), gradient]


def exact(x, label, f_len, y_len, offset, grad, frames: int, blank: int) -> list[Tensor]:
    """`run` by the reference in float64."""
    given = [t if t is None else t.cpu() for t in (x.double(), label, f_len, y_len, offset)]
    settings = (frames, blank, True, True, True)
    losses, sums, shares, scores = reference.loss(*given, *settings)
    gradient = reference.loss_backward(grad.double().cpu(), *given, sums, shares, *settings, (True,))
    return [losses, *scores.unbind(0), gradient]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_definition(case) -> None:
    x, label, f_len, y_len, _, grad = tensors((*case[:6], _F64), "cpu")
    x.requires_grad_()
    wanted = formulas.losses(x, label, f_len, y_len, case[5])
    (gradient,) = torch.autograd.grad(wanted, x, grad.double())
    losses, alpha, beta, found = exact(x.detach(), label, f_len, y_len, None, grad, case[0], case[5])
    torch.testing.assert_close(losses, wanted.detach())
    torch.testing.assert_close(found, gradient)
    for b, (frames, labels) in enumerate(zip(f_len.tolist(), y_len.tolist(), strict=True)):
        last = x[b, frames - 1, labels].log_softmax(-1)[case[5]].detach()
        torch.testing.assert_close(alpha[b, frames - 1, labels] + last, beta[b, 0, 0])
        # Every alignment crosses each diagonal once.
        nodes = (alpha + beta)[b, :frames, : labels + 1].flip(1)
        for diagonal in range(-labels, frames):
            torch.testing.assert_close(nodes.diagonal(-diagonal).logsumexp(0), beta[b, 0, 0])
    packed = formulas.pack(x.detach(), f_len, y_len + 1)
    offset = torch.cumsum(f_len * (y_len + 1), 0)
    by_packed = exact(packed, label, f_len, y_len, offset, grad, case[0], case[5])
    for actual, expected in zip(by_packed, (losses, alpha, beta, formulas.pack(found, f_len, y_len + 1)), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, packed: bool, route: Route) -> None:
    given = *tensors(case, route.device, packed), case[0], case[5]
    before = given[0].clone()
    with _library.implementation(route.implementation):
        found, again = run(*given), run(*given)
    assert [t.dtype for t in found] == [case[6], _F32, _F32, case[6]]
    # A score adds up as many terms as it has words behind it.
    for actual, wanted, what in zip(found, exact(*given), ("losses", "alpha", "beta", "dx"), strict=True):
        assert_close(actual, wanted, reduction=10 * (case[0] + case[1]), what=what)
    assert_equal_bits(found, again)
    assert_equal_bits([given[0]], [before])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("route", ROUTES)
def test_blocks_of_tokens_walk_one_after_the_other(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "WALK_TOKENS", 2)
    given = *tensors((2, 4, 6, [2, 1], [4, 2], 0, _F32), route.device), 2, 0
    with _library.implementation(route.implementation):
        found = run(*given)
    for actual, wanted in zip(found, exact(*given), strict=True):
        assert_close(actual, wanted, reduction=60)


@pytest.mark.parametrize("route", ROUTES)
def test_words_that_cannot_be(route: Route) -> None:
    """Logits of -inf leave the other alignments; garbage in the padding counts for nothing."""
    case = (2, 2, 5, [2, 1], [2, 1], 0, _F32)
    x, label, f_len, y_len, _, grad = tensors(case, route.device)
    x[0, 0, 0, int(label[0, 0])] = float("-inf")
    x[1, 1:], x[1, :, 2:] = float("nan"), float("nan")
    given = x, label, f_len, y_len, None, grad, 2, 0
    with _library.implementation(route.implementation):
        found = run(*given)
    wanted = exact(*given)
    assert wanted[0].isfinite().all()
    assert not found[3][1, 1:].any()
    assert not found[3][1, :, 2:].any()
    for index in (0, 2, 3):
        assert_close(found[index], wanted[index], reduction=40)


@pytest.mark.parametrize("route", ROUTES)
def test_no_way_to_the_end(route: Route) -> None:
    """An impossible last blank makes a loss infinite, NaN makes it NaN; the third sequence knows of neither."""
    x, label, f_len, y_len, _, grad = tensors((2, 2, 5, [2, 2, 1], [2, 1, 1], 0, _F32), route.device)
    x[0, 1, 2, 0] = float("-inf")
    x[1, 0, 1, 3] = float("nan")
    given = x, label, f_len, y_len, None, grad, 2, 0
    with _library.implementation(route.implementation):
        found = run(*given)
    assert found[0][0] == float("inf")
    assert found[0][1].isnan()
    assert found[3][:2].isnan().any((1, 2, 3)).all()
    wanted = exact(*given)
    for index in (0, 1, 2, 3):
        assert_close(found[index][2:], wanted[index][2:], reduction=40)


@pytest.mark.parametrize("route", [route for route in ROUTES if route.values[0].implementation == "triton"])
def test_long_sequences_keep_the_digits_of_float32(route: Route) -> None:
    """Losses near a thousand: a difference of their float32 logarithms would be off by 1e-4, ten tolerances."""
    frames = 20
    x, label, f_len, y_len, _, _ = tensors((frames, 1, 6, [frames], [1], 0, _F32), route.device)
    x[..., 0] -= 45.0
    given = x, label, f_len, y_len, None, torch.ones(1), frames, 0
    with _library.implementation(route.implementation):
        losses, _, _, gradient = run(*given[:5], torch.ones(1, device=route.device), frames, 0)
    wanted = exact(*given)
    assert wanted[0] > 800
    assert_close(losses, wanted[0], reduction=frames)
    assert_close(gradient, wanted[3])


@pytest.mark.parametrize("route", ROUTES)
def test_more_tokens_than_frames(route: Route) -> None:
    given = *tensors((2, 6, 4, [2, 1], [6, 4], 1, _F32), route.device), 2, 1
    with _library.implementation(route.implementation):
        found = run(*given)
    for actual, wanted in zip(found, exact(*given), strict=True):
        assert_close(actual, wanted, reduction=80)


@pytest.mark.parametrize("route", ROUTES)
def test_beta_alone_strided_and_empty(route: Route) -> None:
    x, label, f_len, y_len, _, grad = tensors((3, 2, 8, [3, 2], [2, 1], 1, _F32), route.device)
    strided = x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    lengths = torch.stack([f_len, f_len], 1)[:, 0], y_len.int()
    with _library.implementation(route.implementation):
        losses, *_ = LOSS.run(x, label, f_len, y_len, None, 3, 1, True, False, False)
        found = run(strided, label.long().t().contiguous().t(), *lengths, None, grad[:1].expand(2), 3, 1)
        none = torch.empty(0, dtype=torch.int32, device=route.device)
        empty = run(x[:0], label[:0], none, none, None, grad[:0], 3, 1)
    wanted = exact(x, label, f_len, y_len, None, grad[:1].expand(2), 3, 1)
    assert_close(losses, wanted[0], reduction=50)
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, expected, reduction=50)
    assert [t.shape for t in empty] == [(0,), (0, 3, 3), (0, 3, 3), (0, 3, 3, 8)]


@pytest.mark.gpu
def test_log_probabilities_and_logits_of_one_shape_in_turn() -> None:
    """Launches are cached by shape; log-probabilities lack a tensor that logits have."""
    x, label, f_len, y_len, _, grad = tensors((3, 2, 8, [3, 2], [2, 1], 1, _F32), "cuda")
    given = label, f_len, y_len, None
    found = []
    for _ in range(2):
        for softmax, logits in ((True, x), (False, x.log_softmax(-1))):
            _, sums, shares, _ = LOSS.run(logits, *given, 3, 1, softmax, True, False)
            assert (sums is not None) == softmax
            saved = logits, *given, sums, shares
            found += LOSS.run_backward((grad,), saved, (3, 1, True, True, False), (True,))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize("route", ROUTES)
def test_pytorch_knows_the_operator_of_log_probabilities(route: Route) -> None:
    x, label, f_len, y_len, offset, grad = tensors((2, 1, 4, [2, 1], [1, 1], 0, _F32), route.device, packed=True)
    given = x, label, f_len, y_len, offset
    with _library.implementation(route.implementation):
        settings = (2, 0, False, True, True)
        opcheck(route, torch.ops.apex.transducer_loss.default, (*given, *settings))
        _, sums, shares, _ = LOSS.run(*given, *settings)
        backward = torch.ops.apex.transducer_loss_backward.default
        opcheck(route, backward, (grad, *given, sums, shares, *settings, [True]))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    frames, tokens, words = 600, 60, 32000
    x = torch.randn(2, frames, tokens, words, device="cuda", dtype=_HALF)
    label = torch.randint(1, words, (2, tokens - 1), device="cuda")
    lengths = torch.tensor([frames, 9], device="cuda"), torch.tensor([tokens - 1, 5], device="cuda")
    given, settings = (x, label, *lengths, None), (frames, 0, True, True, False)
    losses, sums, shares, _ = LOSS.run(*given, *settings)
    (dx,) = LOSS.run_backward((torch.ones(2, device="cuda"),), (*given, sums, shares), settings, (True,))
    small = x[1:, :9, :6].contiguous(), label[1:, :5], lengths[0][1:], lengths[1][1:], None, torch.ones(1), 9, 0
    wanted = exact(*small)
    torch.testing.assert_close(losses[1:].double().cpu(), wanted[0], rtol=1e-3, atol=0)
    torch.testing.assert_close(dx[1:, :9, :6].double().cpu(), wanted[3], rtol=2e-3, atol=1e-5)
    assert not dx[1, 9:].any()
    torch.testing.assert_close(dx[0, -1, -1].float().sum(), torch.zeros((), device="cuda"), rtol=0, atol=2e-3)


def test_bad_arguments_are_named() -> None:
    x, label, f_len, y_len, _, _ = tensors((4, 3, 7, [4, 2], [1, 3], 0, _F32), "cpu")
    check = transducer.check_loss
    with pytest.raises(ValueError, match=r"label must be batch x labels of int32 or int64, got torch\.float32"):
        check(x, label.float(), f_len, y_len, None, 4, 0)
    with pytest.raises(TypeError, match="x must be float16"):
        check(x.long(), label, f_len, y_len, None, 4, 0)
    with pytest.raises(ValueError, match=r"got shape \[2, 4, 3, 7\] where label has \[2, 3\]"):
        check(x[:, :, 1:], label, f_len, y_len, None, 4, 0)
    with pytest.raises(ValueError, match="max_f_len=3 must be the 4 frames"):
        check(x, label, f_len, y_len, None, 3, 0)
    with pytest.raises(ValueError, match="a packed x must be rows x words"):
        check(x, label, f_len, y_len, f_len, 4, 0)
    with pytest.raises(TypeError, match=r"blank_idx=1\.5 must be an integer"):
        check(x, label, f_len, y_len, None, 4, 1.5)
    for blank in (-1, 7):
        with pytest.raises(ValueError, match=f"blank_idx={blank} must be a word, between 0 and 6"):
            check(x, label, f_len, y_len, None, 4, blank)
    with pytest.raises(ValueError, match="label is on meta"):
        check(x, label.to("meta"), f_len, y_len, None, 4, 0)
    with pytest.raises(ValueError, match="f_len must be between 1 and 4, got 0"):
        check(x, label, f_len - 2, y_len, None, 4, 0)
    with pytest.raises(ValueError, match="y_len must be between 0 and 3, got 4"):
        check(x, label, f_len, y_len + 1, None, 4, 0)


def test_a_triton_without_gather_leaves_the_loss_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    x, label, f_len, y_len, _, _ = tensors(CASES[2], "cpu")
    given = (x, label, f_len, y_len, None, CASES[2][0], CASES[2][5], True, True, False)
    expected = LOSS.run(*given)[0]
    monkeypatch.setattr(op_loss, "kernels", types.SimpleNamespace(tl=None))
    with _library.implementation("triton"), pytest.raises(RuntimeError, match=r"needs Triton 3\.3"):
        LOSS.run(*given)
    monkeypatch.setattr(_library, "runs_triton", lambda *_: True)
    assert_equal_bits(LOSS.run(*given)[0], expected)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("route", ROUTES)
def test_rows_behind_the_last_sequence_have_no_gradient(route: Route) -> None:
    x, *given, grad = tensors((2, 1, 700, [2, 1], [1, 1], 0, _HALF), route.device, packed=True)
    longer = torch.cat((x, torch.full((5, 700), torch.nan, dtype=_HALF, device=route.device)))
    with _library.implementation(route.implementation):
        results = [run(each, *given, grad, 2, 0) for each in (x, longer)]
    *_, dx = results[0]
    *_, longer_dx = results[1]
    assert_equal_bits(results[0][:3], results[1][:3])
    assert_equal_bits([longer_dx[: len(x)]], [dx])
    assert not longer_dx[len(x) :].any()


@pytest.mark.parametrize("wrong", [-1, 7, 7 + 2**32])
def test_labels_that_are_no_words_are_refused_on_a_cpu(wrong: int) -> None:
    x, label, f_len, y_len, _, _ = tensors((4, 3, 7, [4, 2], [1, 3], 0, _F32), "cpu")
    label = label.long()
    transducer.check_loss(x, label, f_len, y_len, None, 4, 0)  # labels behind y_len are not looked at
    label[1, 2] = wrong
    with pytest.raises(ValueError, match=f"label must hold words, between 0 and 6, got {wrong}"):
        transducer.check_loss(x, label, f_len, y_len, None, 4, 0)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("wrong", [-1, 7, 7 + 2**32])
def test_labels_that_are_no_words_give_nan_to_their_sequence_alone(wrong: int, route: Route) -> None:
    x, label, f_len, y_len, _, grad = tensors((4, 3, 7, [4, 2], [1, 3], 0, _F32), route.device)
    label = label.long()
    with _library.implementation(route.implementation):
        losses, *_, gradient = run(x, label, f_len, y_len, None, grad, 4, 0)
        label[1, 2] = wrong
        bad_losses, *_, bad_gradient = run(x, label, f_len, y_len, None, grad, 4, 0)
    assert bad_losses[1].isnan()
    assert bad_gradient[1, :2].isnan().any()
    assert_equal_bits([losses[0], gradient[0]], [bad_losses[0], bad_gradient[0]])


def test_offsets_that_do_not_fit_are_refused_on_a_cpu() -> None:
    x, label, f_len, y_len, offset, _ = tensors((2, 1, 5, [2, 1], [1, 1], 0, _F32), "cpu", packed=True)
    with pytest.raises(ValueError, match=r"batch_offset=\[4, 7\] must be the running sum .*, \[4, 6\]"):
        transducer.check_loss(x, label, f_len, y_len, offset + torch.tensor([0, 1]), 2, 0)
    with pytest.raises(ValueError, match=r"more rows than the 5 that are packed"):
        transducer.check_loss(x[:5], label, f_len, y_len, offset, 2, 0)


@pytest.mark.parametrize("route", ROUTES[1:])
@pytest.mark.parametrize("wrong", [[-3, 6], [9, 6], [4, 2**40]])
def test_kernels_stay_within_the_rows_whatever_offsets_say(wrong: list[int], route: Route) -> None:
    """Rows around those of x would show in the gradient, which has none, or in losses that are not NaN."""
    x, label, f_len, y_len, _, grad = tensors((2, 1, 5, [2, 1], [1, 1], 0, _F32), route.device, packed=True)
    if wrong[0] == 4:
        x = x[:5]  # a row less than both need
    offset = torch.tensor(wrong, device=route.device)
    with _library.implementation("triton"):
        losses, *_, gradient = run(x, label, f_len, y_len, offset, grad.to(route.device), 2, 0)
    assert losses.isnan().any()
    assert gradient.shape == x.shape
