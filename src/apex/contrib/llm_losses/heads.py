"""Losses of linear heads with Liger's constructors and argument orders; none of them ever holds all logits.

`compiled` and `chunk_size` are accepted and have no effect: chunks follow from the sizes of the head. `keep_logits`
limits the bytes of logits that are kept for the backward pass (see `linear_log_probs`); logits that were not kept are
computed once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ops._checks import check_floats, check_tensors
from ...ops._library import autocast_dtype, compute_dtype
from ...ops.xentropy import linear_cross_entropy, linear_log_probs, linear_token_loss
from .policy import PolicySettings, grpo_loss, per_token, policy_losses, policy_metrics, token_weights
from .preference import (
    check_alike,
    check_dpo,
    check_given,
    cpo_loss,
    dpo_loss,
    kto_loss,
    orpo_loss,
    sequence_log_probs,
    simpo_loss,
    wpo_weights,
)


def _check(input: Tensor, weight: Tensor, bias: Tensor | None, **others: Tensor) -> None:
    """Raise TypeError for arguments of the wrong type, under the names that Liger gives them."""
    check_floats(input=input, lin_weight=weight)
    check_tensors(**others)
    check_given(bias=bias)


class _Loss(nn.Module):
    """A module that is a dataclass: its settings are fields, in the order of Liger's constructors."""

    ignore_index: int
    beta: float
    alpha: float = 1.0
    label_smoothing: float
    average_log_prob: bool
    compute_nll_loss: bool
    use_ref_model: bool = False
    keep_logits: str | bool | int

    def __post_init__(self) -> None:
        super().__init__()

    def _chosen(self, *names: str) -> dict[str, Any]:
        """Return the named settings as keyword arguments of a loss function."""
        return {name: getattr(self, name) for name in names}

    def _rows(self, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *outputs: str) -> Any:
        options: dict[str, Any] = {"ignore_index": self.ignore_index, "keep_logits": self.keep_logits}
        return linear_log_probs(input, weight, target, bias, outputs=("log_probs", *outputs), **options)

    def _reference(self, input: Tensor | None, weight: Tensor | None, target: Tensor, bias: Tensor | None) -> Any:
        """Return the reference model's log-probabilities of tokens, or None without such a model."""
        if not self.use_ref_model:
            if input is not None or weight is not None:
                warnings.warn(f"{type(self).__name__} ignores ref_input: it needs use_ref_model=True", stacklevel=4)
            return None
        if input is None or weight is None:
            raise ValueError("use_ref_model=True needs ref_input and ref_weight")
        with torch.no_grad():
            return self._rows(input, weight, target, bias).log_probs


class _PairedLoss(_Loss):
    """A loss of chosen and rejected sequences, stacked along the batch."""

    needs_nll = False

    def _loss(self, chosen: Tensor, rejected: Tensor, **more: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _forward(
        self,
        weight: Tensor,
        input: Tensor,
        target: Tensor,
        bias: Tensor | None,
        reference: tuple[Any, ...] = (None, None, None),
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        _check(input, weight, bias, target=target)
        check_given(ref_input=reference[0], ref_weight=reference[1], ref_bias=reference[2])
        if target.dim() != 2 or len(target) % 2:
            raise ValueError(f"target has shape {list(target.shape)}, expected [2 * pairs, tokens]: chosen, rejected")
        weighted = getattr(self, "use_weighting", False)
        found = self._rows(input, weight, target, bias, "mean_logits", *(["log_sum_sq_probs"] if weighted else []))
        mask = target != self.ignore_index
        options: dict[str, Any] = {"average": self.average_log_prob, "ld_alpha": getattr(self, "ld_alpha", None)}
        chosen, rejected = sequence_log_probs(found.log_probs, mask, **options).chunk(2)
        lengths = mask.sum(-1)
        sums = (found.mean_logits * mask).sum(-1).chunk(2)
        means = [total.sum() / count.sum().clamp(min=1) for total, count in zip(sums, lengths.chunk(2), strict=True)]
        nll = torch.zeros((), dtype=chosen.dtype, device=chosen.device)
        if nll_target is not None and self.compute_nll_loss:
            half = len(target) // 2
            nll = linear_cross_entropy(input[:half], weight, nll_target[:half], bias, ignore_index=self.ignore_index)
        else:
            own = found.log_probs.chunk(2)[0].sum() / lengths.chunk(2)[0].sum().clamp(min=1)
            nll = -own if self.compute_nll_loss or self.needs_nll else nll
        more: dict[str, Any] = {"nll": nll, "lengths": lengths.chunk(2)}
        ref_input, ref_weight, ref_bias = reference
        ref = self._reference(ref_input, ref_weight, target, ref_bias)
        if ref is not None:
            more["reference"] = sequence_log_probs(ref, mask, **options).chunk(2)
        if weighted:
            weights = wpo_weights(found.log_probs, found.log_sum_sq_probs, mask).chunk(2)
            more["pair_weights"] = weights[0] * weights[1]
        loss, *others = self._loss(chosen, rejected, **more)
        if self.compute_nll_loss:
            loss = loss + self.alpha * nll
        metrics = (chosen, rejected, *means, nll, *others)
        return loss, tuple(metric.detach() for metric in metrics)


@dataclass(eq=False, repr=False)
class FusedLinearDPOLoss(_PairedLoss):
    """DPO of a linear head; see `dpo_loss` for the loss types. `loss_weights` combines several of them."""

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    compute_nll_loss: bool = False
    compiled: bool = True
    use_ref_model: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1
    loss_type: str | Sequence[str] = "sigmoid"
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    _: KW_ONLY
    loss_weights: Sequence[float] | None = None
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 1.0
    ld_alpha: float | None = None
    use_weighting: bool = False
    keep_logits: str | bool | int = False

    def __post_init__(self) -> None:
        super().__post_init__()
        types = [self.loss_type] if isinstance(self.loss_type, str) else list(self.loss_type)
        check_dpo(types, self.label_smoothing, self.use_weighting, stacklevel=4)  # `__init__` calls this method
        self.needs_nll = "sft" in types

    def _loss(self, chosen: Tensor, rejected: Tensor, **more: Any) -> tuple[Tensor, ...]:
        lengths = {"chosen_lengths": more["lengths"][0], "rejected_lengths": more["lengths"][1]}
        settings = self._chosen("beta", "loss_type", "loss_weights", "label_smoothing", "discopop_tau")
        divergence = self._chosen("f_divergence_type", "f_alpha_divergence_coef")
        others = {"nll_loss": more["nll"], "pair_weights": more.get("pair_weights")}
        reference = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), more.get("reference", ()), strict=False))
        return dpo_loss(chosen, rejected, **reference, **settings, **divergence, **lengths, **others)

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss, and log-probabilities, mean logits, likelihood loss and rewards of chosen and rejected."""
        return self._forward(lin_weight, _input, target, bias, (ref_input, ref_weight, ref_bias))


@dataclass(eq=False, repr=False)
class FusedLinearCPOLoss(_PairedLoss):
    """CPO of a linear head: the preference of sums of log-probabilities, plus `alpha` times the likelihood loss."""

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1
    _: KW_ONLY
    keep_logits: str | bool | int = False

    def _loss(self, chosen: Tensor, rejected: Tensor, **more: Any) -> tuple[Tensor, ...]:
        return cpo_loss(chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing)

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss and the metrics of `FusedLinearDPOLoss`."""
        return self._forward(lin_weight, _input, target, bias)


@dataclass(eq=False, repr=False)
class FusedLinearSimPOLoss(_PairedLoss):
    """SimPO of a linear head: means of log-probabilities with a margin, plus the likelihood loss by default."""

    average_log_prob = True

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    gamma: float = 0.5
    chunk_size: int = 1
    _: KW_ONLY
    keep_logits: str | bool | int = False

    def _loss(self, chosen: Tensor, rejected: Tensor, **more: Any) -> tuple[Tensor, ...]:
        return simpo_loss(chosen, rejected, beta=self.beta, gamma=self.gamma, label_smoothing=self.label_smoothing)

    forward = FusedLinearCPOLoss.forward


@dataclass(eq=False, repr=False)
class FusedLinearORPOLoss(_PairedLoss):
    """ORPO of a linear head: the likelihood loss of the chosen sequences minus `beta` log sigmoid of the log-odds."""

    average_log_prob = True

    ignore_index: int = -100
    beta: float = 0.1
    compute_nll_loss: bool = True
    compiled: bool = True
    chunk_size: int = 1
    _: KW_ONLY
    keep_logits: str | bool | int = False

    def _loss(self, chosen: Tensor, rejected: Tensor, **more: Any) -> tuple[Tensor, ...]:
        return orpo_loss(chosen, rejected, beta=self.beta)

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss and the metrics of `FusedLinearDPOLoss`, the mean log-odds ratio and the mean log-odds."""
        return self._forward(lin_weight, _input, target, bias, nll_target=nll_target)


@dataclass(eq=False, repr=False)
class FusedLinearKTOLoss(_Loss):
    """KTO of a linear head: sequences need no pairs, only a label each, true for desirable ones."""

    ignore_index: int = -100
    beta: float = 0.1
    compiled: bool = True
    use_ref_model: bool = False
    average_log_prob: bool = False
    chunk_size: int = 1
    _: KW_ONLY
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    loss_type: str = "kto"
    keep_logits: str | bool | int = False

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss, and the sums of log-probabilities, logits and rewards of desirable and other sequences."""
        _check(_input, lin_weight, bias, target=target)
        check_given(ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias, kl=kl)
        if preference_labels is None:
            raise ValueError("preference_labels are missing: a bool for each sequence, true for desirable ones")
        check_tensors(preference_labels=preference_labels)
        found = self._rows(_input, lin_weight, target, bias, "mean_logits")
        mask = target != self.ignore_index
        logps = sequence_log_probs(found.log_probs, mask, average=self.average_log_prob)
        ref = self._reference(ref_input, ref_weight, target, ref_bias)
        ref_logps = None if ref is None else sequence_log_probs(ref, mask, average=self.average_log_prob)
        settings = self._chosen("beta", "loss_type", "desirable_weight", "undesirable_weight")
        loss, rewards = kto_loss(logps, preference_labels, ref_logps, kl, **settings)
        desirable = preference_labels.to(logps.dtype)
        logits = found.mean_logits.sum(-1) * lin_weight.shape[0]
        values = [value.detach() for value in (logps, logits, rewards)]
        return loss, tuple((value * side).sum() for value in values for side in (desirable, 1 - desirable))


@dataclass(eq=False, repr=False)
class FusedLinearGRPOLoss(_Loss):
    """GRPO and its variants of a linear head; see `PolicySettings` and `token_weights` for the loss types.

    Losses with ratios of tokens take one pass over the head. Ratios of sequences need all of a sequence's tokens first:
    the backward pass reads the logits again if they were kept, else it computes them once more.
    """

    ignore_index = -100

    beta: float = 0.04
    compiled: bool = True
    use_ref_model: bool = True
    chunk_size: int = 1
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "dapo"
    max_completion_length: int | None = None
    importance_sampling_level: str = "token"
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    _: KW_ONLY
    dual_clip: float | None = None
    log_ratio_limit: float | None = None
    kl_type: str = "k3"
    keep_logits: str | bool | int = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settings = PolicySettings(**self._chosen(*PolicySettings._fields))
        self.settings.check()
        if self.beta and not self.use_ref_model:
            warnings.warn(f"beta={self.beta} has no effect without a reference: set use_ref_model=True", stacklevel=3)

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss and its metrics: the mean KL estimate if `beta` is not zero, and the share of clipped tokens.

        Input is [B, T, H], ids and mask [B, T], advantages [B] or [B, T].
        """
        _check(_input, lin_weight, bias, selected_token_ids=selected_token_ids, attention_mask=attention_mask)
        check_floats(advantages=advantages)
        check_given(
            ref_per_token_logps=ref_per_token_logps, old_per_token_logps=old_per_token_logps, ref_input=ref_input,
            ref_weight=ref_weight, ref_bias=ref_bias, vllm_is_ratio=vllm_is_ratio,
        )  # fmt: skip
        check_alike(
            selected_token_ids=selected_token_ids, attention_mask=attention_mask,
            ref_per_token_logps=ref_per_token_logps, old_per_token_logps=old_per_token_logps,
        )  # fmt: skip
        settings = self.settings
        head: dict[str, Any] = {"temperature": self.temperature, "ignore_index": self.ignore_index}
        counted = attention_mask != 0
        target = selected_token_ids.masked_fill(~counted, self.ignore_index)
        if settings.beta and self.use_ref_model and ref_per_token_logps is None:
            if ref_input is None or ref_weight is None:
                raise ValueError("use_ref_model=True needs ref_per_token_logps, or ref_input and ref_weight")
            with torch.no_grad():
                ref_per_token_logps = linear_log_probs(ref_input, ref_weight, target, ref_bias, **head).log_probs
        if not (settings.beta and self.use_ref_model):
            ref_per_token_logps = None
        ranks = 1
        if num_items_in_batch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            ranks = torch.distributed.get_world_size()
        normalisers: dict[str, Any] = {
            "max_completion_length": self.max_completion_length,
            "num_items_in_batch": num_items_in_batch,
            "world_size": ranks,
        }
        if not settings.is_separable:
            rows: Any = linear_log_probs(_input, lin_weight, target, bias, keep_logits=self.keep_logits, **head)
            options = {**settings._asdict(), **normalisers, "vllm_is_ratio": vllm_is_ratio}
            if settings.beta and ref_per_token_logps is None:
                ref_per_token_logps = rows.log_probs.detach()
            references = (old_per_token_logps, ref_per_token_logps)
            return grpo_loss(rows.log_probs, counted, advantages, *references, **options)
        weights = token_weights(counted, settings.loss_type, dtype=compute_dtype(_input), **normalisers)
        given: list[Any] = [
            None if each is None else per_token(each, counted).expand_as(counted)
            for each in (advantages, old_per_token_logps, ref_per_token_logps, vllm_is_ratio)
        ]
        advantages, *others = given
        largest = None
        # In float16 small weights would vanish in the gradient of the logits.
        if torch.float16 in (autocast_dtype(_input), _input.dtype):
            largest = weights.amax().clamp(min=1e-30)
            weights = weights / largest
        flat: list[Any] = [None if each is None else each.reshape(-1) for each in (weights, advantages, *others)]

        def losses_of(log_probs: Tensor, part: slice) -> Tensor:
            chosen: list[Any] = [None if each is None else each[part] for each in flat]
            weight, advantage, *rest = chosen
            return policy_losses(log_probs, advantage, settings, None, *rest)[0] * weight

        total, log_probs = linear_token_loss(_input, lin_weight, target, bias, losses_of, **head)
        with torch.no_grad():
            _, kl, clipped = policy_losses(log_probs, advantages, settings, None, *others)
        return total if largest is None else total * largest, policy_metrics(counted, kl, clipped)
