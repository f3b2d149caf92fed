"""Losses for training language models from preferences, rewards and teachers.

Functions of log-probabilities, which `apex.contrib.xentropy.linear_log_probs` computes, and modules of linear heads
with the constructors of Liger's. Upstream has none of them.
"""

from .distillation import (
    FusedLinearDistillationLoss,
    distillation_loss,
    divergence,
    top_k_log_probs,
    total_variation,
)
from .heads import (
    FusedLinearCPOLoss,
    FusedLinearDPOLoss,
    FusedLinearGRPOLoss,
    FusedLinearKTOLoss,
    FusedLinearORPOLoss,
    FusedLinearSimPOLoss,
)
from .policy import PolicySettings, grpo_loss, kl_estimate, policy_losses, token_weights
from .preference import (
    cpo_loss,
    dpo_loss,
    kto_kl,
    kto_loss,
    orpo_loss,
    sequence_log_probs,
    simpo_loss,
    wpo_weights,
)

__all__ = [
    "FusedLinearCPOLoss",
    "FusedLinearDPOLoss",
    "FusedLinearDistillationLoss",
    "FusedLinearGRPOLoss",
    "FusedLinearKTOLoss",
    "FusedLinearORPOLoss",
    "FusedLinearSimPOLoss",
    "PolicySettings",
    "cpo_loss",
    "distillation_loss",
    "divergence",
    "dpo_loss",
    "grpo_loss",
    "kl_estimate",
    "kto_kl",
    "kto_loss",
    "orpo_loss",
    "policy_losses",
    "sequence_log_probs",
    "simpo_loss",
    "token_weights",
    "top_k_log_probs",
    "total_variation",
    "wpo_weights",
]
