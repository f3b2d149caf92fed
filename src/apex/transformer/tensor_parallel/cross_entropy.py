"""Cross-entropy of logits whose classes are split over tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._arguments import checked
from ..._distributed import exchange
from ...ops._checks import check_floats
from ...ops._library import once_differentiable
from ...ops.xentropy import XENTROPY, check_logits
from ..parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

# Target of rows without a loss, as in `torch.nn.functional.cross_entropy`.
IGNORED_TARGET = -100


@checked
def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each row of logits [..., classes / ranks], in the shape of `target`.

    The loss is float32, or float64 for float64 logits. With smoothing a wrong class has the probability label_smoothing
    / (classes - 1), over all ranks' classes. Rows whose target is -100 have no loss and no gradient. Rows with another
    target that is no class have the loss NaN.
    """
    check_floats(vocab_parallel_logits=vocab_parallel_logits)
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"target must be integers, the numbers of classes, got {target.dtype}")
    if not vocab_parallel_logits.dim():
        raise ValueError("vocab_parallel_logits must be [..., classes / ranks], got a scalar")
    ranks = get_tensor_model_parallel_world_size()
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError(
            f"target has shape {list(target.shape)}, expected {list(vocab_parallel_logits.shape[:-1])}: that of the "
            "logits without their last dimension"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
    classes = ranks * vocab_parallel_logits.shape[-1]
    uniform = label_smoothing * classes / max(1, classes - 1)
    if ranks > 1:
        return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, uniform)
    rows, labels = vocab_parallel_logits.reshape(-1, classes), target.reshape(-1)
    check_logits(rows, labels, uniform)
    return XENTROPY(rows, labels, uniform, IGNORED_TARGET).view(target.shape)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """(1 - u) times the loss of the target plus u times the mean loss of all classes.

    Each rank computes four numbers per row for its own classes: the largest logit, the sum of exponentials relative to
    it, the target's logit (0 if another rank has it) and the sum of logits. One all-gather of these numbers gives the
    loss. The backward pass recomputes the probabilities from the logits, so no float32 copy of the logits is saved.
    """

    @staticmethod
    def forward(ctx, logits, target, uniform):  # type: ignore[override]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        size = logits.shape[-1]
        local_target = target - size * get_tensor_model_parallel_rank()
        not_local = (local_target < 0) | (local_target >= size)
        local_target = local_target.masked_fill(not_local, 0)
        largest = wide.amax(-1)
        # All classes of a rank may be masked out, as in a padded vocabulary. Their sum is then 0, not NaN.
        shift = largest.masked_fill(largest == -torch.inf, 0.0)
        exponentials = (wide - shift.unsqueeze(-1)).exp().sum(-1)
        target_logit = wide.gather(-1, local_target.unsqueeze(-1)).squeeze(-1).masked_fill(not_local, 0.0)
        parts = [largest, exponentials, target_logit, *([wide.sum(-1)] if uniform else [])]
        group = get_tensor_model_parallel_group()
        statistics = exchange.gather(torch.stack(parts).unsqueeze(0), group, "the exchange of a vocab-parallel loss")
        all_largest = statistics[:, 0].amax(0)
        total = (statistics[:, 1] * (statistics[:, 0] - all_largest).exp()).sum(0)
        log_sum = all_largest + total.log()
        loss = log_sum - statistics[:, 2].sum(0)
        if uniform:
            mean = statistics[:, 3].sum(0) / (size * statistics.shape[0])
            loss = (1 - uniform) * loss + uniform * (log_sum - mean)
        ignored = target == IGNORED_TARGET
        ctx.save_for_backward(logits, log_sum, local_target, not_local, ignored)
        ctx.uniform, ctx.classes = uniform, size * statistics.shape[0]
        invalid = (target < 0) | (target >= ctx.classes)  # otherwise the logit of such a target would count as 0
        return loss.masked_fill(invalid, torch.nan).masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):  # type: ignore[override]
        logits, log_sum, local_target, not_local, ignored = ctx.saved_tensors
        gradient = (logits.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp()
        if ctx.uniform:
            gradient -= ctx.uniform / ctx.classes
        target_gradient = torch.full_like(log_sum, ctx.uniform - 1).masked_fill(not_local, 0.0)
        gradient.scatter_add_(-1, local_target.unsqueeze(-1), target_gradient.unsqueeze(-1))
        grad_loss = grad_loss.masked_fill(ignored, 0.0)
        return (gradient * grad_loss.unsqueeze(-1)).to(logits.dtype), None, None
