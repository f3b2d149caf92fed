"""Launches of the transducer's kernels that no example reaches, to compile for every GPU: dropout, odd sizes."""

from __future__ import annotations

import torch

from apex.ops.transducer import op_joint, op_loss

_HALF, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def record() -> None:
    """Makes, and under `record_launches` collects, forward and backward of joint and loss."""
    lengths, offset, seed = (_empty(16), _empty(16)), _empty(16, dtype=torch.int64), _empty(1, dtype=torch.int64)
    # tokens, features, dtype, offset, noise, settings
    for tokens, features, dtype, at, noise, relu, dropout, rows in (
        (201, 130, _BF16, offset, seed, True, 0.1, 5000),
        (60, 512, _HALF, None, _empty(16, 300, 60, 512, dtype=torch.uint8), False, 0.1, 0),
    ):
        f, g = _empty(16, 300, features, dtype=dtype), _empty(16, tokens, features, dtype=dtype)
        settings = (relu, dropout, 1.5, 300, tokens, rows, noise is not None)
        h, mask = op_joint.launch_forward(f, g, *lengths, at, noise, *settings)
        op_joint.launch_backward(h, h if relu else mask, *lengths, at, *settings, (True, True))
    # tokens, words, dtype, offset, softmax
    for tokens, words, dtype, at, softmax in (
        (700, 29, _F32, offset, False),
        (60, 5001, _BF16, offset, True),
    ):
        rows = (16, 300, tokens) if at is None else (16 * 300 * tokens,)
        given = _empty(*rows, words, dtype=dtype), _empty(16, tokens - 1), *lengths, at
        settings = (300, 0, softmax, True, at is not None)
        losses, sums, shares, _ = op_loss.launch_forward(*given, *settings)
        op_loss.launch_backward(losses, *given, sums, shares, *settings, (True,))
    op_loss.launch_forward(*given, 300, 0, True, False, False)
