"""Losses of preferences as functions of log-probabilities.

Letters: B pairs of sequences (chosen and rejected), T tokens. A sequence's log-probability is the sum of its tokens'
log-probabilities, or their mean where stated. A log-ratio is the policy's minus the reference model's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...ops._checks import check_floats, check_tensors

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


def sequence_log_probs(
    log_probs: Tensor, mask: Tensor, *, average: bool = False, ld_alpha: float | None = None
) -> Tensor:
    """Return the log-probability of each sequence: sum or mean over tokens where `mask` is not zero, [B, T] to [B].

    With `ld_alpha`, rows are the chosen and then the rejected sequences, and the tokens of a sequence beyond the length
    of its partner count `ld_alpha` times (LD-DPO).
    """
    check_floats(log_probs=log_probs)
    check_tensors(mask=mask)
    check_alike(log_probs=log_probs, mask=mask)
    counted = mask != 0
    values, lengths = log_probs.masked_fill(~counted, 0.0), counted.sum(-1)
    if ld_alpha is not None:
        if len(lengths) % 2:
            raise ValueError(f"ld_alpha needs chosen and rejected sequences, log_probs has {len(lengths)} rows")
        shared = lengths.view(2, -1).amin(0).repeat(2)[:, None]
        values = torch.where(counted.cumsum(1) <= shared, values, ld_alpha * values)
    total = values.sum(-1)
    return total / lengths.clamp(min=1) if average else total


def wpo_weights(log_probs: Tensor, log_sum_sq_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the weight of each sequence in weighted preference optimization, [B, T] to [B], without gradient."""
    check_floats(log_probs=log_probs, log_sum_sq_probs=log_sum_sq_probs)
    check_tensors(mask=mask)
    aligned = (log_probs - log_sum_sq_probs).detach()
    return sequence_log_probs(aligned, mask, average=True).exp()


def exponent(x: Tensor) -> Tensor:
    """Return x, but at most nine tenths of the exponent that overflows.

    An infinite exponential makes NaN of a difference and of a product with 0, such as the gradient of a clipped ratio.
    """
    return x.clamp(max=math.floor(0.9 * math.log(torch.finfo(x.dtype).max)))


def _score(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """Return the derivative of the divergence's generator at the ratio, without constants."""
    if divergence == "forward_kl":
        return -exponent(-log_ratio).exp()
    if divergence == "js_divergence":
        return logsigmoid(log_ratio)
    if divergence == "alpha_divergence" and abs(alpha - 1.0) >= 1e-6:
        return exponent((alpha - 1.0) * log_ratio).exp() / (alpha - 1.0)
    return log_ratio


def check_given(**arguments: Tensor | None) -> None:
    """Raise TypeError for the first keyword argument that is neither a floating-point tensor nor None."""
    check_floats(**{name: value for name, value in arguments.items() if value is not None})


def check_alike(**tensors: Tensor | None) -> None:
    """Raise an error if tensors differ in shape; broadcasting would compare each sequence with all others."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if any(shape != next(iter(shapes.values())) for shape in shapes.values()):
        raise ValueError(f"{', '.join(f'{name} {shape}' for name, shape in shapes.items())} must have one shape")


class _Pairs:
    """Log-ratios and scores of pairs, and the settings that the losses below read."""

    def __init__(self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> None:
        self.chosen, self.rejected = chosen - ref_chosen, rejected - ref_rejected
        self.difference, self.ref_difference = chosen - rejected, ref_chosen - ref_rejected
        self.chosen_score = self.rejected_score = self.margin = self.chosen
        self.lengths: tuple[Tensor, Tensor] | None = None
        self.nll: Tensor | None = None
        self.beta, self.smoothing, self.tau = 0.1, 0.0, 0.05

    def mean_margin(self) -> Tensor:
        """Return the difference of scores per token."""
        if self.lengths is None:
            raise ValueError("this loss_type needs chosen_lengths and rejected_lengths, the numbers of tokens")
        chosen, rejected = (length.clamp(min=1) for length in self.lengths)
        return self.chosen_score / chosen - self.rejected_score / rejected

    def smoothed(self, margin: Tensor) -> Tensor:
        """Return the logistic loss, assuming that a share of the preferences is reversed."""
        wrong = self.smoothing
        return -(1 - wrong) * logsigmoid(self.beta * margin) - wrong * logsigmoid(-self.beta * margin)


def _robust(p: _Pairs) -> Tensor:
    right, wrong = logsigmoid(p.beta * p.margin), logsigmoid(-p.beta * p.margin)
    return (-(1 - p.smoothing) * right + p.smoothing * wrong) / (1 - 2 * p.smoothing)


def _exo_pair(p: _Pairs) -> Tensor:
    z = p.beta * p.margin
    log_right, log_wrong = torch.log1p(-z.new_tensor(p.smoothing)), torch.log(z.new_tensor(p.smoothing))
    return z.sigmoid() * (logsigmoid(z) - log_right) + (-z).sigmoid() * (logsigmoid(-z) - log_wrong)


def _nca_pair(p: _Pairs) -> Tensor:
    chosen, rejected = p.beta * p.chosen_score, p.beta * p.rejected_score
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def _discopop(p: _Pairs) -> Tensor:
    z = p.beta * p.margin
    share = z / p.tau
    return -logsigmoid(z) * torch.sigmoid(-share) + exponent(logsigmoid(share) - z).exp()


def _sft(p: _Pairs) -> Tensor:
    if p.nll is None:
        raise ValueError("loss_type 'sft' needs nll_loss, the mean loss of the chosen sequences' tokens")
    return p.nll.expand(len(p.chosen))


_DPO: dict[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": lambda p: -logsigmoid(p.beta * p.margin),
    "hinge": lambda p: torch.relu(1 - p.beta * p.margin),
    "ipo": lambda p: (p.mean_margin() - 1 / (2 * p.beta)).square(),
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": lambda p: -logsigmoid(p.beta * p.chosen_score) - logsigmoid(-p.beta * p.rejected_score),
    "sppo_hard": lambda p: (p.chosen_score - 0.5 / p.beta).square() + (p.rejected_score + 0.5 / p.beta).square(),
    "aot": lambda p: p.smoothed(p.difference.sort().values - p.ref_difference.sort().values),
    "aot_unpaired": lambda p: p.smoothed(p.chosen.sort().values - p.rejected.sort().values),
    "apo_zero": lambda p: 1 - torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected),
    "apo_down": lambda p: torch.sigmoid(p.beta * p.chosen) + 1 - torch.sigmoid(p.beta * p.margin),
    "discopop": _discopop,
    "sft": _sft,
    "sigmoid_norm": lambda p: -logsigmoid(p.beta * p.mean_margin()),
}
DPO_LOSSES = tuple(_DPO)
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")


def check_dpo(loss_types: Sequence[str], label_smoothing: float, weighted: bool, stacklevel: int = 3) -> None:
    """Raise for a loss type that is not known, or a setting that it does not accept; warn of one without effect."""
    for loss_type in loss_types:
        if loss_type not in _DPO:
            raise ValueError(f"loss_type {loss_type!r} is not known; use {', '.join(DPO_LOSSES)}")
        if loss_type == "exo_pair" and not 0.0 < label_smoothing < 1.0:
            raise ValueError(f"label_smoothing={label_smoothing} must be between 0 and 1 for loss_type 'exo_pair'")
        if loss_type == "robust" and not 0.0 <= label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={label_smoothing} must be at least 0 and below 0.5 for 'robust'")
        if weighted and loss_type in ("aot", "aot_unpaired"):
            raise ValueError(f"loss_type {loss_type!r} sorts the pairs: it takes no pair_weights, nor use_weighting")
    if label_smoothing and not set(loss_types) & set(SMOOTHED) and not torch.compiler.is_compiling():
        warnings.warn(
            f"label_smoothing={label_smoothing} has no effect on loss_type {', '.join(loss_types)}; it belongs to "
            f"{', '.join(SMOOTHED)}",
            stacklevel=stacklevel,
        )


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None = None,
    ref_rejected_logps: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 1.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    nll_loss: Tensor | None = None,
    pair_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean DPO loss over pairs, and the rewards of chosen and rejected sequences, detached.

    Log-probabilities are sums over the tokens of a sequence, [B]; without a reference model they are 0. Several loss
    types are added with their weights. "ipo" and "sigmoid_norm" need the numbers of tokens, "sft" the mean loss of the
    chosen tokens. `pair_weights` [B] multiply the losses, as the products of `wpo_weights` do.
    """
    check_floats(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    check_given(ref_chosen_logps=ref_chosen_logps, ref_rejected_logps=ref_rejected_logps)
    check_alike(
        chosen_logps=chosen_logps, rejected_logps=rejected_logps, ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths,
        pair_weights=pair_weights,
    )  # fmt: skip
    if (ref_chosen_logps is None) != (ref_rejected_logps is None):
        raise ValueError("ref_chosen_logps and ref_rejected_logps belong together: give both, or neither")
    types = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    factors = [1.0] * len(types) if loss_weights is None else list(loss_weights)
    check_dpo(types, label_smoothing, pair_weights is not None)
    if not types or len(factors) != len(types):
        raise ValueError(f"loss_weights {factors} must be one for each loss_type of {types}")
    if f_divergence_type not in DIVERGENCES:
        raise ValueError(f"f_divergence_type {f_divergence_type!r} is not known; use {', '.join(DIVERGENCES)}")
    nothing = torch.zeros_like(chosen_logps)
    references = [nothing if each is None else each for each in (ref_chosen_logps, ref_rejected_logps)]
    pairs = _Pairs(chosen_logps, rejected_logps, *references)
    pairs.chosen_score = _score(pairs.chosen, f_divergence_type, f_alpha_divergence_coef)
    pairs.rejected_score = _score(pairs.rejected, f_divergence_type, f_alpha_divergence_coef)
    pairs.margin = pairs.chosen_score - pairs.rejected_score
    pairs.beta, pairs.smoothing, pairs.tau, pairs.nll = beta, label_smoothing, discopop_tau, nll_loss
    if chosen_lengths is not None and rejected_lengths is not None:
        pairs.lengths = (chosen_lengths, rejected_lengths)
    loss = torch.zeros((), dtype=chosen_logps.dtype, device=chosen_logps.device)
    for name, factor in zip(types, factors, strict=True):
        losses = _DPO[name](pairs)
        loss = loss + factor * (losses if pair_weights is None else losses * pair_weights).mean()
    return loss, beta * pairs.chosen.detach(), beta * pairs.rejected.detach()


def cpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean CPO loss without its likelihood term, and the rewards of both sides, detached."""
    return simpo_loss(chosen_logps, rejected_logps, beta=beta, gamma=0.0, label_smoothing=label_smoothing)


def simpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    *,
    beta: float = 0.1,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean SimPO loss, and the rewards of both sides, detached; log-probabilities are means over tokens."""
    check_floats(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    check_alike(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    z = beta * (chosen_logps - rejected_logps) - gamma
    losses = -logsigmoid(z) * (1 - label_smoothing) - logsigmoid(-z) * label_smoothing
    return losses.mean(), beta * chosen_logps.detach(), beta * rejected_logps.detach()


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, exact near zero and far from it."""
    near = x > -0.693
    safe = torch.where(near, x, -0.5)
    return torch.where(near, torch.log(-torch.expm1(safe)), torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


def _uncertain(x: Tensor, doubt: float) -> Tensor:
    """Return x, and at least `-doubt` in place of 0, whose log-odds are infinite; its gradient is that of x."""
    tiny = torch.finfo(x.dtype).tiny
    return x - torch.where(x <= -tiny, 0.0, x + max(tiny, doubt)).detach()


def orpo_loss(
    chosen_logps: Tensor, rejected_logps: Tensor, *, beta: float = 0.1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the odds-ratio term of ORPO, both rewards, and the means of log sigmoid(log-odds) and of the log-odds.

    Log-probabilities are means over tokens. One that is 0 after rounding gets finite log-odds: a chosen sequence those
    of the limit, whose gradient is finite, a rejected one those of the greatest probability below 1. The likelihood
    term is not part of it.
    """
    check_floats(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    check_alike(chosen_logps=chosen_logps, rejected_logps=rejected_logps)
    doubt = torch.finfo(rejected_logps.dtype).eps / 2
    chosen, rejected = _uncertain(chosen_logps, 1e-30), _uncertain(rejected_logps, doubt)
    log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    ratio = logsigmoid(log_odds)
    rewards = beta * chosen_logps.detach(), beta * rejected_logps.detach()
    return -beta * ratio.mean(), *rewards, ratio.mean().detach(), log_odds.mean().detach()


def kto_kl(policy_kl_logps: Tensor, ref_kl_logps: Tensor, group: object = None) -> Tensor:
    """Return KTO's KL estimate: the mean log-ratio of mismatched sequences over all ranks, at least 0, detached."""
    check_floats(policy_kl_logps=policy_kl_logps, ref_kl_logps=ref_kl_logps)
    check_alike(policy_kl_logps=policy_kl_logps, ref_kl_logps=ref_kl_logps)
    mean = (policy_kl_logps - ref_kl_logps).detach().mean()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(mean, group=group)  # type: ignore[arg-type]
        mean = mean / torch.distributed.get_world_size(group)  # type: ignore[arg-type]
    return mean.clamp(min=0.0)


def kto_loss(
    logps: Tensor,
    preference_labels: Tensor,
    ref_logps: Tensor | None = None,
    kl: Tensor | None = None,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    loss_type: str = "kto",
) -> tuple[Tensor, Tensor]:
    """Return the mean KTO loss over sequences, and their rewards, detached.

    `preference_labels` [B] is true for desirable sequences. "apo_zero_unpaired" leaves the KL estimate out.
    """
    if loss_type not in ("kto", "apo_zero_unpaired"):
        raise ValueError(f"loss_type {loss_type!r} is not known; use kto, apo_zero_unpaired")
    check_floats(logps=logps)
    check_tensors(preference_labels=preference_labels)
    check_given(ref_logps=ref_logps, kl=kl)
    check_alike(logps=logps, preference_labels=preference_labels, ref_logps=ref_logps)
    desirable = preference_labels.bool()
    ratio = logps if ref_logps is None else logps - ref_logps
    shifted = ratio if kl is None or loss_type != "kto" else ratio - kl.detach()
    losses = torch.sigmoid(beta * torch.where(desirable, -shifted, shifted))
    losses = torch.where(desirable, desirable_weight * losses, undesirable_weight * losses)
    return losses.mean(), beta * ratio.detach()
