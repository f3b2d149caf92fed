"""Upstream's compiled module of this name: the transducer loss of log-probabilities, without autograd."""

from __future__ import annotations

from torch import Tensor

from apex.ops import transducer as ops


def forward(x, label, fLen, yLen, batchOffset, maxFLen, blankIdx, opt, packedInput) -> list[Tensor | None]:
    """Return alpha, beta (float32, or float64 for float64) and the losses."""
    if opt not in (-1, 0, 1):
        raise ValueError(f"opt={opt} must be -1, 0 or 1")
    offset = batchOffset if packedInput else None
    ops.check_loss(x, label, fLen, yLen, offset, maxFLen, blankIdx)
    losses, _, _, scores = ops.LOSS.run(x, label, fLen, yLen, offset, maxFLen, blankIdx, False, False, True)
    return [*scores, losses]  # type: ignore[misc]


def backward(
    x, lossGrad, alpha, beta, fLen, yLen, label, batchOffset, maxFLen, blankIdx, opt, fuseSoftmaxBackward, packedInput
) -> Tensor | None:
    """Return the gradient of the logits if `fuseSoftmaxBackward`, else of the log-probabilities x."""
    offset = batchOffset if packedInput else None
    ops.check_loss(x, label, fLen, yLen, offset, maxFLen, blankIdx)
    inputs = x, label, fLen, yLen, offset
    shares = ops.shares_of_scores(alpha, beta, *inputs, blankIdx)
    settings = (maxFLen, blankIdx, fuseSoftmaxBackward, True, False)
    (dx,) = ops.LOSS.run_backward((lossGrad,), (*inputs, None, shares), settings, (True,))
    return dx
