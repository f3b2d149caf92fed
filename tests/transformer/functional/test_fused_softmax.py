"""The softmax functions and modules as clients call them."""

import pytest
import torch
from torch import Tensor

from apex.ops import _library
from apex.transformer import functional
from apex.transformer.enums import AttnMaskType
from apex.transformer.functional import (
    FusedScaleMaskSoftmax,
    GenericFusedScaleMaskSoftmax,
    GenericScaledMaskedSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    fused_softmax,
    generic_scaled_masked_softmax,
    scaled_masked_softmax,
    scaled_softmax,
    scaled_upper_triang_masked_softmax,
)
from tests.support.harness import Route, assert_close, routes

B, NP, SQ, SK = 2, 3, 8, 8


def attention_mask_func(scores: Tensor, mask: Tensor) -> Tensor:
    """Mask scores as Megatron's `mask_func` does."""
    return scores.masked_fill(mask, -10000.0)


def scores_and_mask(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    scores = torch.randn(B, NP, SQ, SK, device=device).to(dtype).requires_grad_()
    mask = torch.rand(B, 1, SQ, SK, device=device) < 0.4
    mask[..., 0] = False
    return scores, mask


def causal_mask(device: str, sq: int = SQ, sk: int = SK) -> Tensor:
    return torch.ones(1, 1, sq, sk, dtype=torch.bool, device=device).triu(sk - sq + 1)


def expected(scores: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and gradient of a weighted sum, in float64."""
    wide = scores.detach().double().requires_grad_()
    logits = wide * scale
    output = torch.softmax(logits if mask is None else logits.masked_fill(mask, -torch.inf), -1)
    return output.detach(), torch.autograd.grad(output.square().sum(), wide)[0]


def check(output: Tensor, scores: Tensor, mask: Tensor | None, scale: float) -> None:
    wanted, wanted_gradient = expected(scores, mask, scale)
    assert output.dtype == scores.dtype
    assert_close(output, wanted)
    (gradient,) = torch.autograd.grad(output.square().sum(), scores)
    assert gradient.dtype == scores.dtype
    if scores.dtype == torch.float32:  # in half precision it is the gradient of a rounded output
        assert_close(gradient, wanted_gradient)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions(route: Route, dtype: torch.dtype) -> None:
    scores, mask = scores_and_mask(route.device, dtype)
    with _library.implementation(route.implementation):
        check(scaled_masked_softmax(scores, mask, 0.5), scores, mask, 0.5)
        check(scaled_masked_softmax(scores, mask.to(torch.uint8), 0.5), scores, mask, 0.5)
        check(scaled_masked_softmax(scores, mask[:1], 0.5), scores, mask[:1], 0.5)
        check(scaled_masked_softmax(scores, None, 0.3), scores, None, 0.3)
        check(generic_scaled_masked_softmax(scores, mask, 0.3), scores, mask, 0.3)
        check(scaled_softmax(scores, 0.3), scores, None, 0.3)
        check(scaled_upper_triang_masked_softmax(scores, None, 0.3), scores, causal_mask(route.device), 0.3)
        wide = scores.detach()[..., :5, :].clone().requires_grad_()
        check(scaled_upper_triang_masked_softmax(wide, None, 0.3), wide, causal_mask(route.device, 5), 0.3)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_autograd_functions(route: Route) -> None:
    scores, mask = scores_and_mask(route.device)
    with _library.implementation(route.implementation):
        for function in (ScaledMaskedSoftmax, GenericScaledMaskedSoftmax):
            check(function.apply(scores, mask, 0.5), scores, mask, 0.5)
        check(ScaledSoftmax.apply(scores, 0.5), scores, None, 0.5)
        flat = scores.view(-1, SQ, SK)
        output = ScaledUpperTriangMaskedSoftmax.apply(flat, torch.tensor(0.5)).view(scores.shape)
        check(output, scores, causal_mask(route.device), 0.5)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_autocast_casts_the_scores(route: Route) -> None:
    scores, mask = scores_and_mask(route.device)
    with _library.implementation(route.implementation), torch.autocast(route.device, torch.bfloat16):
        outputs = [
            scaled_masked_softmax(scores, mask, 0.5),
            scaled_softmax(scores, 0.5),
            scaled_upper_triang_masked_softmax(scores, None, 0.5),
        ]
    with torch.autocast(route.device, torch.bfloat16):  # not by a kernel: those take no float64
        assert scaled_softmax(scores.double(), 0.5).dtype == torch.float64
    for output, hidden in zip(outputs, (mask, None, causal_mask(route.device)), strict=True):
        assert output.dtype == torch.bfloat16
        assert_close(output, expected(scores.detach().bfloat16(), hidden, 0.5)[0])
        assert torch.autograd.grad(output.float().sum(), scores)[0].dtype == torch.float32


def module(mask_type: AttnMaskType = AttnMaskType.padding, **options) -> FusedScaleMaskSoftmax:
    arguments = {
        "input_in_fp16": False,
        "input_in_bf16": True,
        "attn_mask_type": mask_type,
        "scaled_masked_softmax_fusion": True,
        "mask_func": attention_mask_func,
        "softmax_in_fp32": True,
        "scale": 0.5,
    }
    return FusedScaleMaskSoftmax(**{**arguments, **options})


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("mask_type", AttnMaskType)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_module_fused_and_not(route: Route, mask_type: AttnMaskType, half: torch.dtype, scale: float | None) -> None:
    scores, mask = scores_and_mask(route.device, half)
    if mask_type == AttnMaskType.causal:
        mask = causal_mask(route.device)
    options = {"input_in_fp16": half == torch.float16, "input_in_bf16": half == torch.bfloat16, "scale": scale}
    with _library.implementation(route.implementation):
        for fusion in (True, False):
            softmax = module(mask_type, scaled_masked_softmax_fusion=fusion, **options)
            assert softmax.is_kernel_available(mask, B, NP, SQ, SK) is fusion
            check(softmax(scores, mask), scores, mask, scale or 1.0)


def test_any_size_is_fused() -> None:
    """Upstream's kernels need multiples of four and at most 16384 keys."""
    softmax = module(AttnMaskType.causal)
    for sizes in ((1, 1, 1, 1), (1, 3, 5, 7), (1, 1, 3, 100_000)):
        assert softmax.is_kernel_available(None, *sizes)


def test_scores_in_single_precision_take_the_mask_function() -> None:
    scores, mask = scores_and_mask("cpu")
    calls = []

    def mask_func(scores: Tensor, mask: Tensor) -> Tensor:
        calls.append(mask)
        return attention_mask_func(scores, mask)

    softmax = module(input_in_bf16=False, mask_func=mask_func)
    assert not softmax.is_kernel_available(mask, B, NP, SQ, SK)
    check(softmax(scores, mask), scores, mask, 0.5)
    check(softmax(scores, None), scores, None, 0.5)
    assert len(calls) == 1


def test_causal_without_a_mask_is_causal_in_either_form() -> None:
    for input_in_bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        scores, _ = scores_and_mask("cpu", dtype)
        softmax = module(AttnMaskType.causal, input_in_bf16=input_in_bf16)
        check(softmax(scores, None), scores, causal_mask("cpu"), 0.5)


def test_softmax_in_half_precision_on_request() -> None:
    scores, mask = scores_and_mask("cpu", torch.bfloat16)
    softmax = module(scaled_masked_softmax_fusion=False, softmax_in_fp32=False, scale=None)
    assert torch.equal(softmax(scores, mask), torch.softmax(attention_mask_func(scores, mask), -1))


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_generic_module(route: Route) -> None:
    with _library.implementation(route.implementation):
        for dtype, in_bf16 in ((torch.float32, False), (torch.bfloat16, True)):
            scores, mask = scores_and_mask(route.device, dtype)
            softmax = GenericFusedScaleMaskSoftmax(False, in_bf16, True, attention_mask_func, True, 0.5)
            assert softmax.is_kernel_available(mask, B, NP, SQ, SK)
            check(softmax(scores, mask), scores, mask, 0.5)
            unfused = GenericFusedScaleMaskSoftmax(False, in_bf16, False, attention_mask_func, True, 0.5)
            assert not unfused.is_kernel_available(mask, B, NP, SQ, SK)
            check(unfused(scores, mask), scores, mask, 0.5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"input_in_fp16": True}, RuntimeError, "both fp16 and bf16 flags"),
        ({"softmax_in_fp32": False}, RuntimeError, "softmax should be in fp32 when scaled"),
        ({"mask_type": "banded"}, ValueError, "Invalid attn_mask_type: 'banded'"),
    ],
)
def test_bad_options(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        module(**options)


def test_scores_must_have_four_dimensions() -> None:
    with pytest.raises(ValueError, match=r"\[b, np, sq, sk\], got shape \[3, 8, 8\]"):
        module()(torch.randn(3, 8, 8), None)


@pytest.mark.parametrize(("keys", "rows"), [(1, 256), (16, 16), (32, 8), (128, 8), (129, 4), (2048, 4)])
def test_batch_per_block(keys: int, rows: int) -> None:
    assert FusedScaleMaskSoftmax.get_batch_per_block(64, keys, 2, 4) == rows


def test_names_are_exported() -> None:
    names = [name for name in functional.__all__ if "softmax" in name.lower()]
    assert len(names) == 10
    for name in names:
        assert getattr(functional, name) is getattr(fused_softmax, name)
