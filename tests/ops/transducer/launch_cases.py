"""Launches of the transducer's kernels to compile for every GPU: padded and packed, aligned and odd sizes."""

from __future__ import annotations

import torch

from apex.ops.transducer import JointSpec, launches

_HALF, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def record() -> None:
    """Plans and (under `recording`) collects forward and backward of joint and loss."""
    lengths, offset, seed = (_empty(16), _empty(16)), _empty(16, dtype=torch.int64), _empty(1, dtype=torch.int64)
    # tokens, features, dtype, offset, spec, noise: as in the benchmark; packed with all that can be fused
    for tokens, features, dtype, at, spec, noise in (
        (60, 512, _HALF, None, JointSpec(), None),
        (201, 130, _BF16, offset, JointSpec(True, 0.1, 5000), seed),
        (60, 512, _HALF, None, JointSpec(False, 0.1), _empty(16, 300, 60, 512, dtype=torch.uint8)),
    ):
        f, g = _empty(16, 300, features, dtype=dtype), _empty(16, tokens, features, dtype=dtype)
        h, mask = launches.triton_joint_forward(f, g, *lengths, at, spec, noise, want_mask=noise is not None)
        kept = h if spec.relu else mask
        launches.triton_joint_backward(h, kept, *lengths, at, (300, tokens), spec.scale, (dtype, dtype))
    # tokens, words, dtype, offset, normalize
    for tokens, words, dtype, at, normalize in (
        (60, 1024, _HALF, None, True),
        (700, 29, _F32, offset, False),
        (60, 5001, _BF16, offset, True),
    ):
        rows = (16, 300, tokens) if at is None else (16 * 300 * tokens,)
        x, label = _empty(*rows, words, dtype=dtype), _empty(16, tokens - 1)
        given = x, label, *lengths, at
        losses, saved, _ = launches.triton_loss_forward(*given, (300, tokens), 0, normalize, True, at is not None)
        launches.triton_loss_backward(losses, *given, 0, saved, normalize)
    launches.triton_loss_forward(*given, (300, tokens), 0, True, want_nodes=False, want_scores=False)
