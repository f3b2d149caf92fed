"""Upstream's compiled module of this name: a transducer's joint, without autograd."""

from __future__ import annotations

from torch import Tensor

from apex.ops import transducer as ops


def forward(
    f, g, fLen, gLen, batchOffset, packedBatch, opt, packOutput, relu, dropout, dropoutProb, tileSize
) -> list[Tensor]:
    """Return h, and with ReLU or dropout a byte per element: 1 if it passed."""
    if opt not in (0, 1):
        raise ValueError(f"opt={opt} must be 0 or 1")
    offset, probability = batchOffset if packOutput else None, float(dropoutProb) if dropout else 0.0
    masked = relu or dropout
    arguments = ops.joint_arguments(f, g, fLen, gLen, offset, relu, probability, packedBatch, masked)
    return [result for result in ops.JOINT.run(*arguments) if result is not None]


# Upstream calls the first argument `in`, which is a keyword of Python.
def backward(input, fLen, gLen, batchOffset, maxFLen, maxGLen, packOutput, scale) -> list[Tensor | None]:
    """Return the gradients of f and g from [gradient of h (, mask)], in its dtype."""
    dh, mask = input[0], input[1] if len(input) > 1 else None
    offset = batchOffset if packOutput else None
    settings = (False, 0.0, float(scale), maxFLen, maxGLen, len(dh), False)
    return list(ops.JOINT.run_backward((dh,), (mask, fLen, gLen, offset), settings, (True, True)))
