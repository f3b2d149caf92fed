"""What a softmax computes, beside its tensors."""

from __future__ import annotations

from typing import NamedTuple


class SoftmaxSpec(NamedTuple):
    """softmax(`scale` * input) over the last dimension, then dropout with probability `dropout`.

    `causal`: query i sees key j where j <= i + keys - queries, so that the last query sees every key.
    """

    scale: float = 1.0
    causal: bool = False
    dropout: float = 0.0

    @property
    def kept_scale(self) -> float:
        """What dropout multiplies the kept elements by."""
        return 1.0 / (1.0 - self.dropout) if self.dropout < 1.0 else 0.0
