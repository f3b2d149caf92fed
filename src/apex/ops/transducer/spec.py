"""What the ops of a transducer compute, beside their tensors.

Letters of the whole family: B batch, T frames of the encoder, U tokens of the predictor (labels + 1), H features of
the joint, V words. A sequence has `f_len` frames and `g_len` tokens, of at most T and U. A padded tensor is B x T x U;
a packed one has the sequences' T x U rows one after the other without the padding, sequence b ending before row
`batch_offset[b]`, where `batch_offset` is cumsum(f_len * g_len); None stands for padded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# What the joint has outside a sequence: finite, because matrix products behind it read it, and upstream's value.
PADDING = -1.0


class JointSpec(NamedTuple):
    """h = dropout(relu(f + g)); `dropout` is the probability to drop, `packed_rows` counts the rows of a packed h."""

    relu: bool = False
    dropout: float = 0.0
    packed_rows: int = 0

    @property
    def scale(self) -> float:
        """What kept elements are multiplied by."""
        return 1.0 / (1.0 - self.dropout) if self.dropout < 1.0 else 1.0


class LossNodes(NamedTuple):
    """What the backward pass of a loss needs beside its inputs, per node of B x T x U and zero where there is none.

    `sums` are the logarithms of the sums of the logits' exponentials, None where there were log-probabilities.
    `shares`, 2 x B x T x U, are the parts of the probability of all right alignments that go on from a node by blank,
    and by label.
    """

    sums: Tensor | None
    shares: Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a loss's arithmetic."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
