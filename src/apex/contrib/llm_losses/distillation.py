"""Losses that draw a student's distribution to a teacher's, of log-probabilities and of linear heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...ops._checks import check_floats, check_optional_tensors, check_tensors
from ...ops._library import compute_dtype
from ...ops.xentropy import chunked_logits_loss
from .preference import check_given


def _finite(log_p: Tensor) -> Tensor:
    """Return log-probabilities of which the least is finite, so that products with a probability of 0 are 0."""
    return log_p.clamp(min=max(-1e30, torch.finfo(log_p.dtype).min))


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) of each row; classes with p = 0 add nothing."""
    return (log_p.exp() * (_finite(log_p) - _finite(log_q))).sum(-1)


def divergence(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """Return the generalised Jensen-Shannon divergence of each row of log-probabilities, (..., V) to (...).

    `beta` 0 is KL(teacher || student), 1 is KL(student || teacher); in between it is
    beta * KL(teacher || mix) + (1 - beta) * KL(student || mix) with mix = beta * teacher + (1 - beta) * student.
    """
    check_floats(student=student, teacher=teacher)
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta={beta} must be between 0 and 1")
    if beta == 0.0:
        return _kl(teacher, student)
    if beta == 1.0:
        return _kl(student, teacher)
    mix = torch.logaddexp(_finite(student) + math.log1p(-beta), _finite(teacher) + math.log(beta))
    return beta * _kl(teacher, mix) + (1.0 - beta) * _kl(student, mix)


def total_variation(student: Tensor, teacher: Tensor) -> Tensor:
    """Return half the sum of absolute differences of probabilities, for each row of log-probabilities."""
    check_floats(student=student, teacher=teacher)
    return 0.5 * (student.exp() - teacher.exp()).abs().sum(-1)


def top_k_log_probs(log_probs: Tensor, indices: Tensor) -> Tensor:
    """Return the log-probabilities of the classes `indices` (..., k) and, last, of all other classes together.

    A teacher that is known by its k most likely classes is compared on these k + 1 events.
    """
    check_floats(log_probs=log_probs)
    check_tensors(indices=indices)
    return with_rest(log_probs.gather(-1, indices))


def with_rest(chosen: Tensor) -> Tensor:
    """Return log-probabilities of some classes and, last, of all others together: log(1 - sum of the probabilities)."""
    least = max(1e-30, torch.finfo(chosen.dtype).tiny)
    rest = (-torch.expm1(torch.logsumexp(chosen, -1, keepdim=True))).clamp(min=least).log()
    return torch.cat([chosen, rest], -1)


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    kind: str = "jsd",
    teacher_top_k: tuple[Tensor, Tensor] | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the mean divergence of the softmax of logits / `temperature` over rows whose label is not ignored.

    `kind` is "jsd" (`divergence` with `beta`) or "tvd" (`total_variation`). The teacher is given by logits, or by
    log-probabilities and indices of its top classes. A class that only the student or only the teacher has gets zero
    probability from the other one. `reduction` may be "sum" or "none".
    """
    check_floats(student_logits=student_logits)
    if teacher_logits is not None:
        check_floats(teacher_logits=teacher_logits)
    check_optional_tensors(labels=labels)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction {reduction!r} is not known; use mean, sum, none")
    if not temperature > 0.0:
        raise ValueError(f"temperature={temperature} must be positive")
    dtype = compute_dtype(student_logits)
    student = functional.log_softmax(student_logits.to(dtype) / temperature, -1)
    if teacher_top_k is not None:
        teacher, student = with_rest(teacher_top_k[0].to(dtype)), top_k_log_probs(student, teacher_top_k[1])
    elif teacher_logits is None:
        raise ValueError("distillation_loss needs teacher_logits or teacher_top_k")
    else:
        teacher = functional.log_softmax(teacher_logits.to(dtype) / temperature, -1)
        missing = teacher.shape[-1] - student.shape[-1]
        student = functional.pad(student, (0, max(0, missing)), value=-math.inf)
        teacher = functional.pad(teacher, (0, max(0, -missing)), value=-math.inf)
    if kind not in ("jsd", "tvd"):
        raise ValueError(f"kind {kind!r} is not known; use jsd, tvd")
    if student.shape != teacher.shape:
        raise ValueError(f"the student has rows {list(student.shape[:-1])}, the teacher {list(teacher.shape[:-1])}")
    losses = (
        divergence(student, teacher.detach(), beta) if kind == "jsd" else total_variation(student, teacher.detach())
    )
    if labels is not None and labels.shape != losses.shape:
        raise ValueError(f"labels have shape {list(labels.shape)}, expected one for each row, {list(losses.shape)}")
    counted = torch.ones_like(losses, dtype=torch.bool) if labels is None else labels != ignore_index
    losses = losses.masked_fill(~counted, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum().clamp(min=1)


@dataclass(eq=False, repr=False)
class FusedLinearDistillationLoss(torch.nn.Module):
    """Hard and soft loss of a student's linear head against a teacher, a chunk of rows at a time.

    It has the arguments of Liger's `LigerFusedLinearJSDLoss`; `kind` "tvd" takes the total variation. `compiled` has no
    effect.
    """

    weight_hard_loss: float = 0.5
    weight_soft_loss: float = 0.5
    beta: float = 0.5
    ignore_index: int = -100
    temperature: float = 1.0
    compiled: bool = True
    chunk_size: int = 1024
    return_soft_hard_loss: bool = False
    kind: str = "jsd"

    def __post_init__(self) -> None:
        super().__init__()
        if not self.temperature > 0.0:
            raise ValueError(f"temperature={self.temperature} must be positive")
        if self.kind not in ("jsd", "tvd"):
            raise ValueError(f"kind {self.kind!r} is not known; use jsd, tvd")

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor | None,
        teacher_weight: Tensor | None,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        *,
        teacher_logits: Tensor | None = None,
        teacher_top_k: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Return the weighted sum of both losses; the teacher is a linear head, logits, or its top classes."""
        check_floats(student_input=student_input, student_weight=student_weight)
        check_tensors(true_labels=true_labels)
        check_given(
            student_bias=student_bias, teacher_input=teacher_input, teacher_weight=teacher_weight,
            teacher_bias=teacher_bias, teacher_logits=teacher_logits,
        )  # fmt: skip
        if teacher_top_k is None and teacher_logits is None and (teacher_input is None or teacher_weight is None):
            raise ValueError("teacher_input and teacher_weight are missing; or give teacher_logits or teacher_top_k")
        labels = true_labels.reshape(-1)
        flat = student_input.reshape(-1, student_input.shape[-1])
        teacher_rows = None if teacher_input is None else teacher_input.reshape(-1, teacher_input.shape[-1]).detach()
        count = (labels != self.ignore_index).sum().clamp(min=1)

        def losses(logits: Tensor, part: slice) -> Tensor:
            hard = functional.cross_entropy(
                logits, labels[part].long(), ignore_index=self.ignore_index, reduction="none"
            )
            given, top = None, None
            if teacher_top_k is not None:
                top = teacher_top_k[0].reshape(len(labels), -1)[part], teacher_top_k[1].reshape(len(labels), -1)[part]
            elif teacher_logits is not None:
                given = teacher_logits.reshape(len(labels), -1)[part]
            else:
                assert teacher_rows is not None
                assert teacher_weight is not None
                given = functional.linear(teacher_rows[part], teacher_weight.detach(), teacher_bias)
            how = {"beta": self.beta, "temperature": self.temperature, "kind": self.kind}
            soft = distillation_loss(
                logits,
                given,
                labels[part],
                teacher_top_k=top,
                ignore_index=self.ignore_index,
                reduction="none",
                **how,  # type: ignore[arg-type]
            )
            return torch.stack([hard, soft])

        factors = (self.weight_hard_loss, self.weight_soft_loss)
        total, parts = chunked_logits_loss(flat, student_weight, student_bias, losses, factors, self.chunk_size)
        loss = total / count
        if not self.return_soft_hard_loss:
            return loss
        hard, soft = (parts / count).unbind()
        return loss, soft, hard
