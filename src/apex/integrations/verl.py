"""The fused head of verl under its own name and signature."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..contrib.xentropy import linear_log_probs
from ..ops._checks import check_floats, check_tensors

__all__ = ["linear_cross_entropy"]

# No label has this value: verl ignores no row.
_NEVER = -(1 << 31)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the labels and entropies, as verl's function of this name does.

    `hidden` is (..., H) and `labels` (...); results are vectors over all rows, in float32. `reduction` "sum" or "mean"
    reduces the log-probabilities. With a process group, `weight` is this rank's consecutive part of the vocabulary.
    """
    check_floats(hidden=hidden)
    check_tensors(labels=labels)
    if not hidden.dim():
        raise ValueError("hidden must be (..., H), got a scalar")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction {reduction!r} is not known; use none, sum, mean")
    rows = linear_log_probs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        outputs=("log_probs", "entropy"),
        temperature=temperature,
        ignore_index=_NEVER,
        group=dist_process_group,
    )
    log_probs, entropy = rows.log_probs, rows.entropy
    assert log_probs is not None
    assert entropy is not None
    if reduction == "sum":
        log_probs = log_probs.sum()
    elif reduction == "mean":
        log_probs = log_probs.mean()
    return log_probs, entropy
