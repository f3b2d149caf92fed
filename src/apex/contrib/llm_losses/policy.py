"""Losses of policy optimization as functions of log-probabilities: GRPO and its variants.

Letters: B sequences of T tokens. A loss is the sum over tokens of weight times loss per token (`token_weights`,
`policy_losses`). If ratios belong to tokens, not to whole sequences, the loss of a token depends on its own
log-probability alone, and a linear head computes it with its gradients in one pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops._checks import check_floats, check_tensors
from .preference import check_alike, check_given, exponent

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVELS = ("token", "sequence", "sequence_token")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


class PolicySettings(NamedTuple):
    """Settings of `policy_losses`; see `grpo_loss`."""

    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    importance_sampling_level: str = "token"
    use_bias_correction_kl: bool = False
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    dual_clip: float | None = None
    log_ratio_limit: float | None = None
    kl_type: str = "k3"

    def check(self) -> None:
        """Raise for settings that are not accepted."""
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type {self.loss_type!r} is not known; use {', '.join(LOSS_TYPES)}")
        if self.importance_sampling_level not in LEVELS:
            raise ValueError(
                f"importance_sampling_level {self.importance_sampling_level!r} is not known; use {', '.join(LEVELS)}"
            )
        if self.importance_sampling_level != "token" and self.loss_type in ("cispo", "sapo", "vespo"):
            raise ValueError(f"loss_type {self.loss_type!r} needs importance_sampling_level='token'")
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "delta", "dual_clip", "log_ratio_limit"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ValueError(f"{name}={value} must be positive")

    @property
    def is_separable(self) -> bool:
        """Whether the loss of a token depends on its own log-probability alone."""
        return self.importance_sampling_level == "token" and self.loss_type != "vespo"


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str = "k3") -> Tensor:
    """Return an estimate of KL(policy || reference) for each token, under verl's names.

    "k1" (or "kl") is the log-ratio, "abs" its absolute value, "k2" ("mse") half its square and "k3" ("low_var_kl")
    exp(-r) + r - 1. A "+" behind the name keeps the value and takes the gradient of "k2".
    """
    check_floats(log_probs=log_probs, ref_log_probs=ref_log_probs)
    ratio = log_probs - ref_log_probs
    name = kind.removesuffix("+")
    if name in ("k1", "kl"):
        value = ratio
    elif name == "abs":
        value = ratio.abs()
    elif name in ("k2", "mse"):
        value = 0.5 * ratio.square()
    elif name in ("k3", "low_var_kl"):
        value = exponent(-ratio).expm1() + ratio
    else:
        raise ValueError(f"KL estimate {kind!r} is not known; use k1, k2, k3, abs, with or without +")
    if name == kind:
        return value
    return value.detach() + (ratio - ratio.detach()) * ratio.detach()


def _either(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Return one of two numbers for each element of `condition`, in the dtype of `like`, not in the default one."""
    return torch.where(condition, like.new_full((), yes), like.new_full((), no))


def _vespo_factor(
    log_ratio: Tensor, mask: Tensor, advantages: Tensor, vllm: Tensor | None, s: PolicySettings
) -> Tensor:
    """Return VESPO's weight of each sequence, [B, 1], without gradient."""
    lowest = math.log(1e-8)
    total = (log_ratio.detach().clamp(-20.0, 20.0) * mask).sum(-1, keepdim=True)
    if vllm is not None:
        total = total + vllm.log().clamp(lowest, 20.0).sum(-1, keepdim=True)
    log_ratio = total.clamp(lowest, 20.0)
    positive = advantages >= 0
    k = _either(positive, s.vespo_k_pos, s.vespo_k_neg, log_ratio)
    rate = _either(positive, max(s.vespo_lambda_pos, 1e-4), max(s.vespo_lambda_neg, 1e-4), log_ratio)
    return torch.exp(rate + k * log_ratio - rate * log_ratio.exp()).nan_to_num(0.0, 0.0, 0.0)


def policy_losses(
    log_probs: Tensor,
    advantages: Tensor,
    settings: PolicySettings,
    mask: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    vllm_is_ratio: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the loss of each token, the KL estimate (None without `beta`) and whether the ratio was clipped.

    All tensors have one shape, or broadcast to it; ratios of sequences need [B, T] and the mask. The old policy's
    log-probabilities are by default the policy's own, as constants.
    """
    check_floats(log_probs=log_probs, advantages=advantages)
    check_given(old_log_probs=old_log_probs, ref_log_probs=ref_log_probs, vllm_is_ratio=vllm_is_ratio)
    s = settings
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    log_ratio = log_probs - old
    if s.log_ratio_limit is not None:
        log_ratio = log_ratio.clamp(-s.log_ratio_limit, s.log_ratio_limit)
    weights = log_ratio
    if s.importance_sampling_level != "token":
        assert mask is not None
        weights = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
        if s.importance_sampling_level == "sequence_token":
            weights = (weights.detach() + log_probs - log_probs.detach()).clamp(max=10.0)
    ratio = exponent(weights).exp()
    clipped = torch.zeros_like(ratio, dtype=torch.bool)
    if s.loss_type == "cispo":
        losses = -ratio.clamp(max=s.epsilon_high).detach() * advantages * log_probs
        clipped = (ratio > s.epsilon_high) & (advantages > 0)
    elif s.loss_type == "sapo":
        temperature = _either(advantages > 0, s.sapo_temperature_pos, s.sapo_temperature_neg, ratio)
        losses = -advantages * torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature
    elif s.loss_type == "vespo":
        assert mask is not None
        losses = -_vespo_factor(log_ratio, mask, advantages, vllm_is_ratio, s) * advantages * log_probs
    else:
        low, high = 1.0 - s.epsilon_low, 1.0 + s.epsilon_high
        bounded = ratio if s.delta is None else ratio.clamp(max=s.delta)
        losses = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
        if s.dual_clip is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -s.dual_clip * advantages), losses)
        clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    if vllm_is_ratio is not None and s.loss_type != "vespo":
        losses = losses * vllm_is_ratio
    kl = None
    if s.beta:
        kl = kl_estimate(log_probs, log_probs.detach() if ref_log_probs is None else ref_log_probs, s.kl_type)
        kl = kl * ratio if s.use_bias_correction_kl else kl
        losses = losses + s.beta * kl
    return losses.expand_as(log_probs), kl, clipped.expand_as(log_probs)


def token_weights(
    mask: Tensor,
    kind: str = "dapo",
    *,
    max_completion_length: int | None = None,
    num_items_in_batch: Tensor | float | None = None,
    world_size: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight of each token in the loss, [B, T]; `kind` is a loss type or one of verl's aggregations.

    "dapo", "cispo" and "vespo" divide by `num_items_in_batch` / `world_size`, by default by the tokens of the mask.
    "dr_grpo" and "seq-mean-token-sum-norm" divide by B * `max_completion_length`.
    """
    check_tensors(mask=mask)
    m = mask.to(dtype)
    sequences, lengths = m.shape[0], m.sum(-1, keepdim=True)
    if kind in ("grpo", "sapo", "seq-mean-token-mean"):
        return m / lengths.clamp(min=1.0) / sequences
    if kind in ("bnpo", "token-mean"):
        return m / m.sum().clamp(min=1.0)
    if kind == "token-sum":
        return m
    if kind in ("luspo", "seq-mean-token-sum"):
        return m / sequences
    if kind in ("dr_grpo", "seq-mean-token-sum-norm"):
        if max_completion_length is None:
            raise ValueError(f"{kind!r} needs max_completion_length, the most tokens of a completion")
        return m / (sequences * max_completion_length)
    if kind in ("dapo", "cispo", "vespo"):
        if num_items_in_batch is None:
            return m / m.sum().clamp(min=1.0)
        items = num_items_in_batch
        items = items.to(dtype).clamp(min=1.0) if isinstance(items, Tensor) else max(items, 1.0)
        return m / (items / world_size)
    raise ValueError(f"{kind!r} is not known; use {', '.join((*LOSS_TYPES, *AGGREGATIONS))}")


def per_token(values: Any, counted: Tensor) -> Any:
    """Return values [B] as [B, 1], and values [B, T] with ones for tokens that do not count; None stays None."""
    if values is None:
        return None
    values = values[:, None] if values.dim() == 1 else values
    return values.masked_fill(~counted, 1.0) if values.shape == counted.shape else values


def grpo_loss(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    vllm_is_ratio: Tensor | None = None,
    *,
    loss_type: str = "dapo",
    aggregation: str | None = None,
    max_completion_length: int | None = None,
    num_items_in_batch: Tensor | float | None = None,
    world_size: int = 1,
    **settings: object,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the policy loss of log-probabilities [B, T], and the mean KL estimate (if `beta` is set) and clip ratio.

    `advantages` are [B] or [B, T]; `settings` are fields of `PolicySettings`. `aggregation`, one of verl's names,
    replaces the weights of tokens that belong to `loss_type`.
    """
    chosen = PolicySettings(loss_type, **settings)  # type: ignore[arg-type]
    chosen.check()
    check_floats(log_probs=log_probs, advantages=advantages)
    check_tensors(mask=mask)
    check_given(old_log_probs=old_log_probs, ref_log_probs=ref_log_probs, vllm_is_ratio=vllm_is_ratio)
    check_alike(log_probs=log_probs, mask=mask, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    if chosen.beta and ref_log_probs is None:
        raise ValueError(f"beta={chosen.beta} weighs the divergence from a reference: ref_log_probs is missing")
    counted = mask != 0
    given = [per_token(each, counted) for each in (old_log_probs, ref_log_probs, vllm_is_ratio)]
    log_probs, m = log_probs.masked_fill(~counted, 0.0), counted.to(log_probs.dtype)
    losses, kl, clipped = policy_losses(log_probs, per_token(advantages, counted), chosen, m, *given)
    weights = token_weights(
        counted,
        aggregation or loss_type,
        max_completion_length=max_completion_length,
        num_items_in_batch=num_items_in_batch,
        world_size=world_size,
        dtype=losses.dtype,
    )
    return (losses * weights).sum(), policy_metrics(counted, kl, clipped)


def policy_metrics(mask: Tensor, kl: Tensor | None, clipped: Tensor) -> tuple[Tensor, ...]:
    """Return the mean KL estimate (if there is one) and the share of clipped tokens, without gradients."""
    m = mask.float()
    share = m / m.sum().clamp(min=1.0)
    clipped_share = (clipped.detach() * share).sum()
    return (clipped_share,) if kl is None else ((kl.detach() * share).sum(), clipped_share)
