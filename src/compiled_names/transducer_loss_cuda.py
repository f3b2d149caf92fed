"""Upstream's compiled module of this name: the transducer loss of log-probabilities, without autograd."""

from __future__ import annotations

from torch import Tensor

from apex.ops import transducer as ops


def forward(
    x: Tensor,
    label: Tensor,
    fLen: Tensor,
    yLen: Tensor,
    batchOffset: Tensor,
    maxFLen: int,
    blankIdx: int,
    opt: int,
    packedInput: bool,
) -> list[Tensor]:
    """alpha, beta (float32, or float64 for float64) and the losses."""
    if opt not in (-1, 0, 1):
        raise ValueError(f"opt={opt} must be -1, 0 or 1")
    offset = batchOffset if packedInput else None
    ops.check_loss(x, label, fLen, yLen, offset, maxFLen, blankIdx)
    given = x, label, fLen, yLen, offset, maxFLen, blankIdx
    losses, _, scores = ops.loss_forward(*given, normalize=False, want_nodes=False, want_scores=True)
    assert scores is not None
    return [scores[0], scores[1], losses]


def backward(
    x: Tensor,
    lossGrad: Tensor,
    alpha: Tensor,
    beta: Tensor,
    fLen: Tensor,
    yLen: Tensor,
    label: Tensor,
    batchOffset: Tensor,
    maxFLen: int,
    blankIdx: int,
    opt: int,
    fuseSoftmaxBackward: bool,
    packedInput: bool,
) -> Tensor:
    """The gradient of the logits behind x, or (not fuseSoftmaxBackward) of the log-probabilities x themselves."""
    offset = batchOffset if packedInput else None
    ops.check_loss(x, label, fLen, yLen, offset, maxFLen, blankIdx)
    given = x, label, fLen, yLen, offset, blankIdx
    nodes = ops.nodes_of_scores(alpha, beta, *given)
    return ops.loss_backward(lossGrad, *given, nodes, through_softmax=fuseSoftmaxBackward)
