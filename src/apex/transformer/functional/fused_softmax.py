"""Softmax of attention scores, scaled and masked in one pass.

Scores are [b, np, sq, sk]: batch, heads, queries, keys. A bool or uint8 mask is nonzero for hidden keys. It is
broadcast to the scores, usually from [b, 1, sq, sk] or [1, 1, sq, sk]. A floating-point mask is added to the scaled
scores. Rows whose keys are all hidden give zeros. Under autocast, scores are first cast to its dtype, as upstream does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..._arguments import checked
from ..._autocast_utils import _cast_if_autocast_enabled
from ...ops import softmax
from ...ops._checks import check_floats, check_optional_tensors
from ...ops.softmax import SoftmaxSpec
from ..enums import AttnMaskType


def _forward(ctx: Any, inputs: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    check_floats(inputs=inputs)
    spec = SoftmaxSpec(float(scale), causal)
    softmax.check_arguments(inputs, mask, spec)
    return softmax.SOFTMAX.forward_and_save(ctx, inputs, mask, None, *spec)


class ScaledUpperTriangMaskedSoftmax(torch.autograd.Function):
    """Causal softmax of scores [..., sq, sk]."""

    @staticmethod
    def forward(ctx, inputs, scale):  # type: ignore[override]
        return _forward(ctx, inputs, None, scale, causal=True)

    @staticmethod
    def backward(ctx, output_grads):  # type: ignore[override]
        return *softmax.SOFTMAX.backward_from_saved(ctx, output_grads), None


class ScaledMaskedSoftmax(torch.autograd.Function):
    """Softmax of scores under a mask."""

    @staticmethod
    def forward(ctx, inputs, mask, scale):  # type: ignore[override]
        return _forward(ctx, inputs, mask, scale)

    @staticmethod
    def backward(ctx, output_grads):  # type: ignore[override]
        return *softmax.SOFTMAX.backward_from_saved(ctx, output_grads), None, None


class GenericScaledMaskedSoftmax(ScaledMaskedSoftmax):
    """`ScaledMaskedSoftmax` under the name of upstream's kernel for all lengths."""


class ScaledSoftmax(torch.autograd.Function):
    """Softmax of scores without a mask."""

    @staticmethod
    def forward(ctx, inputs, scale):  # type: ignore[override]
        return _forward(ctx, inputs, None, scale)

    @staticmethod
    def backward(ctx, output_grads):  # type: ignore[override]
        return *softmax.SOFTMAX.backward_from_saved(ctx, output_grads), None


@checked
def scaled_upper_triang_masked_softmax(inputs: Tensor, _: Any, scale: float) -> Tensor:
    """Return the causal softmax of `scale` * `inputs`: query i sees key j if j <= i + sk - sq.

    The second argument is ignored.
    """
    check_floats(inputs=inputs)
    (inputs,) = _cast_if_autocast_enabled(inputs)
    return softmax.masked_softmax(inputs, scale=float(scale), causal=True)


@checked
def scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the softmax of `scale` * `inputs` under `mask`, which may be None."""
    check_floats(inputs=inputs)
    (inputs,) = _cast_if_autocast_enabled(inputs)
    return softmax.masked_softmax(inputs, mask, scale=float(scale))


@checked
def generic_scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return `scaled_masked_softmax(inputs, mask, scale)`; neither function limits the lengths."""
    return scaled_masked_softmax(inputs, mask, scale)


@checked
def scaled_softmax(inputs: Tensor, scale: float) -> Tensor:
    """Return the softmax of `scale` * `inputs`."""
    return scaled_masked_softmax(inputs, None, scale)


class FusedScaleMaskSoftmax(nn.Module):
    """Softmax of attention scores: fused for half-precision scores, otherwise PyTorch operators with `mask_func`.

    `input_in_fp16` / `input_in_bf16` declare that the scores have this half precision. `attn_mask_type` is padding (the
    mask given to `forward`) or causal. In the causal case the fused form ignores a mask, and the unfused form applies
    it alone, as upstream's do: give a mask that hides later keys and no others, or None. `scaled_masked_softmax_fusion`
    allows the fused form. The unfused form masks scores with `mask_func(scores, mask)` and computes in float32 if
    `softmax_in_fp32`. `scale` is a factor of the scores, or None.
    """

    fused_softmax_func: Callable[[Tensor, Tensor | None, float], Tensor]

    @checked
    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType | Any,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding):
            raise ValueError(f"Invalid attn_mask_type: {attn_mask_type!r}; use AttnMaskType.padding or causal")
        if input_in_fp16 and input_in_bf16:
            raise RuntimeError("both fp16 and bf16 flags cannot be active at the same time.")
        if not (scale is None or softmax_in_fp32):
            raise RuntimeError("softmax should be in fp32 when scaled")
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        if scaled_masked_softmax_fusion:
            causal = attn_mask_type == AttnMaskType.causal
            self.fused_softmax_func = scaled_upper_triang_masked_softmax if causal else scaled_masked_softmax

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return the probabilities of scores [b, np, sq, sk]; they have the scores' dtype if it is the declared one."""
        check_floats(input=input)
        check_optional_tensors(mask=mask)
        if input.dim() != 4:
            raise ValueError(f"input must be [b, np, sq, sk], got shape {list(input.shape)}")
        if self.is_kernel_available(mask, *input.size()):
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return True if `forward` uses the fused form: it is allowed and the scores have half precision."""
        return bool(self.scaled_masked_softmax_fusion and self.input_in_float16)

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        return self.fused_softmax_func(input, mask, 1.0 if self.scale is None else self.scale)

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        if self.input_in_float16 and self.softmax_in_fp32:
            input = input.float()
        if self.scale is not None:
            input = input * self.scale
        if mask is None and self.attn_mask_type == AttnMaskType.causal:
            queries, keys = input.shape[-2:]
            mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=input.device).triu(keys - queries + 1)
        if mask is not None:
            if self.mask_func is None:
                raise ValueError("mask_func must be a function to apply a mask where the fused form is not taken")
            input = self.mask_func(input, mask)
        probabilities = torch.softmax(input, -1)
        if self.input_in_float16 and self.softmax_in_fp32:
            probabilities = probabilities.to(torch.float16 if self.input_in_fp16 else torch.bfloat16)
        return probabilities

    @staticmethod
    @checked
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """Return the rows per block of 128 threads of upstream's kernel; nothing here depends on it."""
        padded = 1 << max(0, sk - 1).bit_length()
        return 128 // min(padded, 32) * (2 if padded <= 128 else 1)


class GenericFusedScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """A `FusedScaleMaskSoftmax` with a padding mask that is fused in any precision."""

    @checked
    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__(
            input_in_fp16,
            input_in_bf16,
            AttnMaskType.padding,
            scaled_masked_softmax_fusion,
            mask_func,
            softmax_in_fp32,
            scale,
        )

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return True if `forward` uses the fused form, that is, if it is allowed."""
        return bool(self.scaled_masked_softmax_fusion)
