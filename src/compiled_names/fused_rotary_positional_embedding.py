"""Upstream's compiled module of this name: rotary position embeddings, forward and backward, without autograd.

Shapes are as in `apex.transformer.functional`, except that images are [b, img_h, img_w, h, d] and results
[b, img_h * img_w, h, d]. With `transpose_output` the first two dimensions of the result, also of a gradient, are
swapped in memory.
"""

from __future__ import annotations

from torch import Tensor

from apex.ops.rope import RopeSpec, rotate_now


def forward(input: Tensor, freqs: Tensor, transpose_output: bool) -> Tensor:
    return rotate_now(input, (freqs,), RopeSpec("sbhd", bool(transpose_output)))


def backward(output_grads: Tensor, freqs: Tensor, transpose_output: bool) -> Tensor:
    return rotate_now(output_grads, (freqs,), RopeSpec("sbhd", bool(transpose_output), inverse=True))


def forward_cached(input: Tensor, cos: Tensor, sin: Tensor, transpose_output: bool) -> Tensor:
    return rotate_now(input, (cos, sin), RopeSpec("sbhd", bool(transpose_output)))


def backward_cached(output_grads: Tensor, cos: Tensor, sin: Tensor, transpose_output: bool) -> Tensor:
    return rotate_now(output_grads, (cos, sin), RopeSpec("sbhd", bool(transpose_output), inverse=True))


def forward_thd(input: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
    return rotate_now(input, (freqs,), RopeSpec("thd"), cu_seqlens)


def backward_thd(output_grads: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
    return rotate_now(output_grads, (freqs,), RopeSpec("thd", inverse=True), cu_seqlens)


def forward_2d(input: Tensor, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor) -> Tensor:
    return _rotate_image(input, (cos_h, sin_h, cos_w, sin_w), inverse=False)


def backward_2d(output_grads: Tensor, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor) -> Tensor:
    return _rotate_image(output_grads, (cos_h, sin_h, cos_w, sin_w), inverse=True)


def _rotate_image(image: Tensor, tables: tuple[Tensor, ...], inverse: bool) -> Tensor:
    if image.dim() != 5:
        raise ValueError(f"an image has shape {list(image.shape)}, expected [b, img_h, img_w, h, d]")
    return rotate_now(image.flatten(1, 2), tables, RopeSpec("image", inverse=inverse, width=image.shape[2]))
