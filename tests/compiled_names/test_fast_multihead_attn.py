"""fast_multihead_attn, called as upstream's autograd Functions call it."""

import pytest
import torch
from torch import Tensor

import fast_multihead_attn
from apex.ops import _library
from apex.ops.multihead import Mask, MaskKind, reference
from tests.support.harness import Route, assert_close, routes

LENGTH, KEYS, BATCH, HEADS, WIDTH = 6, 9, 3, 2, 16
SIZE = WIDTH // HEADS
NOTHING = torch.tensor([])


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [(torch.randn(shape) * (1.0 if len(shape) == 3 else 0.3)) for shape in shapes]


def mask(kind: str, keys: int) -> tuple[bool, bool, Tensor, Mask | None]:
    """use_mask, use_time_mask and pad_mask; and the same for the reference."""
    if kind == "none":
        return False, False, NOTHING, None
    hidden = torch.rand((LENGTH, keys) if kind == "time" else (BATCH, keys)) > 0.6
    hidden[:, 0] = False
    if kind == "additive":
        added = hidden * -3.0
        return True, False, added, Mask(MaskKind.ADDITIVE, added.double())
    return True, kind == "time", hidden.byte(), Mask(MaskKind.TIME if kind == "time" else MaskKind.PADDING, hidden)


def attended(projections: list[Tensor], out: Tensor, cover: Mask | None, kept: Tensor, dropout: float) -> Tensor:
    """Attention in float64 that drops what the bytes say, and the output's projection."""
    factor = kept.double().view(BATCH, HEADS, *kept.shape[1:]) / (1.0 - dropout) if kept.numel() else None
    context = reference.attend(*projections, HEADS, SIZE**-0.5, cover, factor)
    return context @ out.T


def split(inputs: Tensor, weight: Tensor, parts: int, bias: Tensor | None = None) -> list[Tensor]:
    packed = inputs @ weight.T
    packed = packed if bias is None else packed + bias
    return list(packed.view(len(inputs), BATCH * HEADS, parts, SIZE).unbind(2))


def assert_gradients(actual: list[Tensor], expected: Tensor, wide: list[Tensor], dy: Tensor) -> None:
    wanted = torch.autograd.grad(expected, wide, dy.cpu().double())
    assert len(actual) == len(wanted)
    for number, (a, e) in enumerate(zip(actual, wanted, strict=True)):
        assert_close(a, e, reduction=LENGTH * BATCH, what=f"gradient {number}")


def doubles(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("function", ["plain", "bias", "additive"])
@pytest.mark.parametrize(
    ("kind", "dropout", "training"), [("none", 0.0, True), ("padding", 0.4, True), ("time", 0.4, False)]
)
def test_self_attention(route: Route, function: str, kind: str, dropout: float, training: bool) -> None:
    biased = function != "plain"
    kind = "additive" if function == "additive" else kind
    x, w, o, wb, ob = leaves((LENGTH, BATCH, WIDTH), (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (3 * WIDTH,), (WIDTH,))
    use_mask, use_time_mask, pad_mask, cover = mask(kind, LENGTH)
    name = {"plain": "self_attn", "bias": "self_attn_bias", "additive": "self_attn_bias_additive_mask"}[function]
    biases = (wb, ob) if biased else ()
    heads, probability = torch.tensor([HEADS])[0], torch.tensor([dropout])[0]
    dy = torch.randn_like(x)
    wide = doubles([x, w, o, *biases])
    x, w, o, dy, pad_mask, *biases = (t.to(route.device) for t in (x, w, o, dy, pad_mask, *biases))
    with _library.implementation(route.implementation):
        packed, third, dropped, kept, context, outputs = getattr(fast_multihead_attn, f"{name}_forward")(
            use_mask, use_time_mask, training, HEADS, x, w, o, *biases, pad_mask, dropout
        )
        saved = (context, dropped, third, *((pad_mask,) if function == "additive" else ()), packed, x, w, o)
        gradients = getattr(fast_multihead_attn, f"{name}_backward")(heads, dy, *saved, kept, probability)
    assert packed.shape == (LENGTH, BATCH, 3 * WIDTH)
    assert third.shape == dropped.shape == (BATCH * HEADS, LENGTH, LENGTH)
    assert context.shape == (LENGTH, BATCH * HEADS, SIZE)
    assert kept.dtype == torch.uint8
    assert kept.shape[0] == (BATCH * HEADS if training and dropout else 0)
    expected = attended(split(wide[0], wide[1], 3, wide[3] if biased else None), wide[2], cover, kept.cpu(), dropout)
    expected = expected + wide[4] if biased else expected
    assert_close(outputs, expected, reduction=WIDTH)
    assert_gradients(gradients, expected, wide, dy)
    if function == "additive":
        queries, keys, _ = split(wide[0], wide[1], 3, wide[3])
        assert_close(third, torch.einsum("snd,tnd->nst", queries, keys) * SIZE**-0.5, reduction=WIDTH)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_self_attention_norm_add(dropout: float) -> None:
    x, gamma, beta, w, o = leaves((LENGTH, BATCH, WIDTH), (WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (WIDTH, WIDTH))
    use_mask, use_time_mask, pad_mask, cover = mask("padding", LENGTH)
    results = fast_multihead_attn.self_attn_norm_add_forward(
        use_mask, use_time_mask, True, HEADS, x, gamma, beta, w, o, pad_mask, dropout
    )
    normed, mean, invvar, packed, probabilities, dropped, kept, context, kept_sum, outputs = results
    assert mean.shape == invvar.shape == (LENGTH * BATCH,)
    assert kept_sum.shape == x.shape
    wide = doubles([x, gamma, beta, w, o])
    norm = torch.nn.functional.layer_norm(wide[0], (WIDTH,), wide[1], wide[2], 1e-5)
    expected = attended(split(norm, wide[3], 3), wide[4], cover, kept, dropout)
    expected = wide[0] + expected * kept_sum.double() / (1 - dropout)
    assert_close(normed, norm)
    assert_close(outputs, expected, reduction=WIDTH)
    dy = torch.randn_like(x)
    gradients = fast_multihead_attn.self_attn_norm_add_backward(
        HEADS, dy, context, dropped, probabilities, packed, normed, mean, invvar, x, gamma, beta, w, o, kept, kept_sum,
        dropout,
    )  # fmt: skip
    assert_gradients(gradients, expected, wide, dy)


@pytest.mark.parametrize("norm_add", [False, True])
@pytest.mark.parametrize(
    ("kind", "dropout", "training"), [("none", 0.4, True), ("padding", 0.0, True), ("time", 0.4, False)]
)
def test_encdec_attention(norm_add: bool, kind: str, dropout: float, training: bool) -> None:
    q, kv, gamma, beta = leaves((LENGTH, BATCH, WIDTH), (KEYS, BATCH, WIDTH), (WIDTH,), (WIDTH,))
    wq, wkv, o = leaves((WIDTH, WIDTH), (2 * WIDTH, WIDTH), (WIDTH, WIDTH))
    use_mask, use_time_mask, pad_mask, cover = mask(kind, KEYS)
    head, weights, dy = (use_mask, use_time_mask, training, HEADS), (wq, wkv, o), torch.randn_like(q)
    if norm_add:
        *norm_results, projected, packed, probabilities, dropped, kept, context, kept_sum, outputs = (
            fast_multihead_attn.encdec_multihead_attn_norm_add_forward(
                *head, q, kv, gamma, beta, *weights, pad_mask, dropout
            )
        )
        gradients = fast_multihead_attn.encdec_multihead_attn_norm_add_backward(
            HEADS, dy, context, dropped, probabilities, projected, packed, *norm_results, q, kv, gamma, beta, *weights,
            kept, kept_sum, dropout,
        )  # fmt: skip
    else:
        projected, packed, probabilities, dropped, kept, context, outputs = (
            fast_multihead_attn.encdec_multihead_attn_forward(*head, q, kv, *weights, pad_mask, dropout)
        )
        gradients = fast_multihead_attn.encdec_multihead_attn_backward(
            HEADS, dy, context, dropped, probabilities, projected, packed, q, kv, *weights, kept, dropout
        )
    assert projected.shape == (LENGTH, BATCH, WIDTH)
    assert packed.shape == (KEYS, BATCH, 2 * WIDTH)
    assert probabilities.shape == (BATCH * HEADS, LENGTH, KEYS)
    wide = doubles([q, kv, *((gamma, beta) if norm_add else ()), *weights])
    inputs = torch.nn.functional.layer_norm(wide[0], (WIDTH,), *wide[2:4], 1e-5) if norm_add else wide[0]
    projections = split(inputs, wide[-3], 1) + split(wide[1], wide[-2], 2)
    expected = attended(projections, wide[-1], cover, kept, dropout)
    if norm_add:
        expected = wide[0] + (expected * kept_sum.double() / (1 - dropout) if kept_sum.numel() else expected)
    assert_close(outputs, expected, reduction=WIDTH)
    assert_gradients(gradients, expected, wide, dy)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_softmax(route: Route, additive: bool, dropout: float) -> None:
    logits = torch.randn(BATCH * HEADS, LENGTH, KEYS)
    use_mask, _, pad_mask, cover = mask("additive" if additive else "padding", KEYS)
    name = "additive_mask_softmax_dropout" if additive else "mask_softmax_dropout"
    dy = torch.randn_like(logits)
    wide = logits.double().requires_grad_()
    logits, dy, pad_mask = (t.to(route.device) for t in (logits, dy, pad_mask))
    before = logits.clone(), dy.clone()
    with _library.implementation(route.implementation):
        dropped, kept, probabilities = getattr(fast_multihead_attn, f"{name}_forward")(
            use_mask, True, HEADS, logits, pad_mask, dropout
        )
        extra = () if additive else (pad_mask,)
        gradient = getattr(fast_multihead_attn, f"{name}_backward")(
            use_mask, HEADS, dy, probabilities, kept, *extra, dropout
        )
    covered = wide.view(BATCH, HEADS, LENGTH, KEYS)
    tensor = cover.tensor[:, None, None, :]
    covered = covered + tensor if additive else covered.masked_fill(tensor, -torch.inf)
    expected = torch.softmax(covered, -1).view(logits.shape)
    assert_close(probabilities, expected)
    expected = expected * kept.cpu().double() / (1 - dropout) if dropout else expected
    assert_close(dropped, expected)
    assert_close(gradient, torch.autograd.grad(expected, wide, dy.cpu().double())[0], reduction=KEYS)
    assert torch.equal(logits, before[0])
    assert torch.equal(dy, before[1])


@pytest.mark.parametrize("shape", [(4, 0, 3), (4, 3, 0), (0, 3, 3)], ids=str)
def test_softmax_of_nothing(shape: tuple[int, ...]) -> None:
    given = False, True, 2, torch.empty(shape), None, 0.5
    dropped, kept, probabilities = fast_multihead_attn.mask_softmax_dropout_forward(*given)
    assert dropped.shape == kept.shape == probabilities.shape == shape
    dy = torch.empty(shape)
    gradient = fast_multihead_attn.mask_softmax_dropout_backward(False, 2, dy, probabilities, kept, None, 0.5)
    assert gradient.shape == shape
