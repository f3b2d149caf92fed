"""Attention through PyTorch's fused operator, and step by step, against the reference in float64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from apex.ops import _library, multihead
from apex.ops._tolerance import excess_of_norm
from apex.ops.multihead import explicit, masks, op, reference
from tests.ops.multihead.cases import KINDS, doubles, leaves, make_mask, on_cpu
from tests.support.harness import Route, assert_equal_bits, routes

SIZE = 8
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# queries, keys, batch, heads
SHAPES = [(1, 1, 2, 1), (5, 9, 3, 2), (17, 17, 2, 4)]


def assert_near(actual, expected, steps: int = 2) -> None:
    """Half precision rounds once per step; the matrix units of a GPU round float32 to ten bits at most."""
    for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape
        limit = 1000 * steps if a.is_cuda and a.dtype == torch.float32 else steps
        assert excess_of_norm(a.detach().cpu(), e.detach().cpu()) <= limit, f"result {number}"


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend(route: Route, kind: str, shape: tuple, dtype: torch.dtype) -> None:
    queries, keys, batch, heads = shape
    parts = leaves([(n, batch * heads, SIZE) for n in (queries, keys, keys)], dtype, route.device)
    mask = make_mask(kind, queries, keys, batch, route.device, blind=queries > 1)
    output = multihead.attend(*parts, heads, mask, 0.0)
    dy = torch.randn_like(output)
    gradients = torch.autograd.grad(output, parts, dy)
    wide = doubles(parts)
    expected = reference.attend(*wide, heads, SIZE**-0.5, on_cpu(mask))
    wanted = torch.autograd.grad(expected, wide, dy.cpu().double())
    if keys == 1:  # one key takes all: its logit and so queries and keys have no gradient, but what rounding leaves
        gradients, wanted = gradients[2:], wanted[2:]
    assert output.is_contiguous()
    assert_near((output, *gradients), (expected, *wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_more_heads_than_a_grid_has_room_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = leaves([(n, 6, SIZE) for n in (5, 7, 7)], torch.float32, "cpu")
    mask = make_mask(kind, 5, 7, 3, "cpu")
    expected = multihead.attend(*parts, 2, mask, 0.0)
    monkeypatch.setattr(op, "MOST_HEADS", 5)
    torch.testing.assert_close(multihead.attend(*parts, 2, mask, 0.0), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 100, 128, 192, 200, 1088])
@pytest.mark.parametrize("kind", ["padding", "additive", "time"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_blind_queries_at_every_remainder_of_a_tile(length: int, kind: str, dtype: torch.dtype) -> None:
    """Some versions of cuDNN give NaN gradients for such a query when half of the last tile of keys is empty."""
    batch, heads, size = 3, 4, 64
    parts = leaves([(length, batch * heads, size)] * 3, dtype, "cuda")
    mask = make_mask(kind, length, length, batch, "cuda", blind=True)
    output = multihead.attend(*parts, heads, mask, 0.0)
    dy = torch.randn_like(output)
    gradients = torch.autograd.grad(output, parts, dy)
    wide = doubles(parts)
    expected = reference.attend(*wide, heads, size**-0.5, on_cpu(mask))
    wanted = torch.autograd.grad(expected, wide, dy.cpu().double())
    blind = output[1] if kind == "time" else output[:, 1]
    assert blind.eq(0).all()
    assert_near((output, *gradients), (expected, *wanted), steps=4)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 128, 192, 704])
def test_low_logits_have_finite_gradients(length: int) -> None:
    """A mask that adds -10000 to all keys changes nothing: the same defect of cuDNN, though no query is blind."""
    parts = leaves([(length, 12, 64)] * 3, torch.float16, "cuda")
    added = torch.zeros(3, length, device="cuda", dtype=torch.float16)
    added[1] = -10000
    added[2, length // 2 :] = -10000
    output = multihead.attend(*parts, 4, multihead.Mask(multihead.MaskKind.ADDITIVE, added), 0.0)
    gradients = torch.autograd.grad(output.sum(), parts)
    hidden = added < 0
    hidden[1] = False
    same = multihead.attend(*parts, 4, multihead.Mask(multihead.MaskKind.PADDING, hidden), 0.0)
    wanted = torch.autograd.grad(same.sum(), parts)
    assert_near((output, *gradients), [t.detach().cpu().double() for t in (same, *wanted)], steps=4)


def test_a_shifted_additive_mask_is_the_same_mask() -> None:
    added = torch.randn(3, 8) * 5
    added[0] = -torch.inf
    added[1, 3] = -torch.inf
    shifted = masks._from_zero(added)
    torch.testing.assert_close(torch.softmax(shifted[1:], 1), torch.softmax(added[1:], 1))
    assert shifted[0].eq(-torch.inf).all()
    assert shifted[1:].amax(1).eq(0).all()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "dropout"), [(torch.float32, 0.0), (torch.float16, 0.4)], ids=str)
def test_step_by_step(route: Route, kind: str, dtype: torch.dtype, dropout: float) -> None:
    queries, keys, batch, heads = 5, 9, 3, 2
    parts = [t.detach() for t in leaves([(n, batch * heads, SIZE) for n in (queries, keys, keys)], dtype, route.device)]
    mask = make_mask(kind, queries, keys, batch, route.device, blind=True)
    scale = 0.3
    with _library.implementation(route.implementation):
        core = explicit.attend(*parts, heads, scale, mask, dropout)
        kept = explicit.kept_bytes(core.noise, core.probabilities, dropout)
        dy = torch.randn_like(core.context)
        results = []
        for noise in (core.noise, kept):
            gradients = [torch.empty_like(part) for part in parts]
            explicit.attend_backward(dy, parts, (core.probabilities, core.dropped, noise), scale, dropout, gradients)
            results.append(gradients)
    assert kept.shape == ((batch * heads, queries, keys) if dropout else (0, queries, keys))
    wide = doubles(parts)
    factor = kept.cpu().double().view(batch, heads, queries, keys) / (1.0 - dropout) if dropout else None
    expected = reference.attend(*wide, heads, scale, on_cpu(mask), factor)
    wanted = torch.autograd.grad(expected, wide, dy.cpu().double().view(expected.shape))
    weights = reference.probabilities(*wide[:2], heads, scale, on_cpu(mask)).flatten(0, 1)
    for gradients in results:
        assert_near(
            (core.context.view(expected.shape), core.probabilities, *gradients), (expected, weights, *wanted), steps=4
        )


def test_gradcheck() -> None:
    parts = leaves([(n, 4, 3) for n in (3, 4, 4)], torch.float64, "cpu")
    for kind in KINDS:
        mask = on_cpu(make_mask(kind, 3, 4, 2, "cpu", blind=True))
        assert torch.autograd.gradcheck(lambda q, k, v, m=mask: multihead.attend(q, k, v, 2, m, 0.0), parts)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("kind", ["none", "padding", "time"])
def test_dropout_follows_the_generator(route: Route, kind: str) -> None:
    dtype = torch.float16 if route.device == "cuda" else torch.float32
    parts = leaves([(40, 8, 16)] * 3, dtype, route.device)
    mask = make_mask(kind, 40, 40, 4, route.device)

    def run() -> tuple:
        output = multihead.attend(*parts, 2, mask, 0.3)
        return output, *torch.autograd.grad(output, parts, torch.ones_like(output))

    torch.manual_seed(5)
    first, other = run(), run()
    torch.manual_seed(5)
    again = run()
    # Gradients of the queries may be summed in another order on a GPU.
    assert_equal_bits([first[0].detach()], [again[0].detach()])
    assert not torch.equal(first[0], other[0])
    assert_near(again[1:], [gradient.cpu().double() for gradient in first[1:]], steps=4)


def test_checkpointing_draws_the_same_numbers() -> None:
    parts = leaves([(12, 4, 8)] * 3, torch.float32, "cpu")
    torch.manual_seed(1)
    plain = torch.autograd.grad(multihead.attend(*parts, 2, None, 0.5).sin().sum(), parts)
    torch.manual_seed(1)
    output = checkpoint(lambda q, k, v: multihead.attend(q, k, v, 2, None, 0.5), *parts, use_reentrant=False)
    assert_equal_bits(torch.autograd.grad(output.sin().sum(), parts), plain)


@pytest.mark.parametrize("shape", [(0, 4, 2, 2), (4, 0, 2, 2), (4, 4, 0, 2)], ids=str)
def test_empty(shape: tuple) -> None:
    queries, keys, batch, heads = shape
    parts = leaves([(n, batch * heads, SIZE) for n in (queries, keys, keys)], torch.float32, "cpu")
    output = multihead.attend(*parts, heads, None, 0.0)
    assert output.shape == (queries, batch, heads * SIZE)
    assert output.eq(0).all()
    assert all(gradient.eq(0).all() for gradient in torch.autograd.grad(output.sum(), parts))


def test_masks_are_refused_in_clear_words() -> None:
    parts = leaves([(4, 6, SIZE)] * 3, torch.float32, "cpu")

    def attend(kind: multihead.MaskKind, tensor: torch.Tensor) -> None:
        multihead.attend(*parts, 2, multihead.Mask(kind, tensor), 0.0)

    with pytest.raises(ValueError, match=r"key_padding_mask has shape \[4, 4\], expected \[batch, keys\] = \[3, 4\]"):
        attend(multihead.MaskKind.PADDING, torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"attn_mask has shape \[3, 4\], expected \[queries, keys\] = \[4, 4\]"):
        attend(multihead.MaskKind.TIME, torch.zeros(3, 4))
    with pytest.raises(TypeError, match=r"must be floating-point, got torch\.uint8"):
        attend(multihead.MaskKind.ADDITIVE, torch.zeros(3, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="is on meta"):
        attend(multihead.MaskKind.PADDING, torch.zeros(3, 4, device="meta"))


def test_shapes_are_refused_in_clear_words() -> None:
    x, w, o = torch.randn(3, 2, 8), torch.randn(24, 8), torch.randn(8, 8)
    with pytest.raises(ValueError, match=r"expected \[length, batch, embed_dim\]"):
        multihead.attention([x[0]], [w, o], heads=2)
    with pytest.raises(ValueError, match="embed_dim=8 must be divisible by num_heads=3"):
        multihead.attention([x], [w, o], heads=3)
    with pytest.raises(ValueError, match=r"input_weights has shape \[8, 8\], expected \[24, 8\]"):
        multihead.attention([x], [o, o], heads=2)
    with pytest.raises(ValueError, match=r"dropout=1\.0"):
        multihead.attention([x], [w, o], heads=2, dropout=1.0)
    with pytest.raises(ValueError, match="must agree in batch and embedding"):
        multihead.attention([x, x[:, :1]], [o, w[:16], o], heads=2)
    with pytest.raises(ValueError, match=r"input_weights_kv has shape \[24, 8\], expected \[16, 8\]"):
        multihead.attention([x, x], [o, w, o], heads=2)
