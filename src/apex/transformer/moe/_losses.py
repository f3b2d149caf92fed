"""Losses of a router, and the autograd function that adds them to the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._distributed.experts import router_loss_scale
from ...ops._library import compute_dtype
from .. import parallel_state


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
) -> Tensor:
    """Return coeff * E / (topk * T^2) * sum over experts of their tokens times the sum of their `probs` [tokens, E].

    `tokens_per_expert` and T, `total_num_tokens`, may count all ranks with parts of the same sequences; their losses
    then add up. Without tokens the loss is zero. `fused` is ignored.
    """
    factor = num_experts * moe_aux_loss_coeff / (topk * max(total_num_tokens, 1) ** 2)
    return (probs.sum(0) * tokens_per_expert).sum() * factor


def z_loss_func(logits: Tensor, z_loss_coeff: float) -> Tensor:
    """Return coeff * the mean over tokens of logsumexp(logits)^2; zero without tokens."""
    squares = torch.logsumexp(logits.to(compute_dtype(logits)), -1).square()
    return squares.sum() * (z_loss_coeff / max(squares.numel(), 1))


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """An autograd function that returns a tensor unchanged and adds an auxiliary loss to the backward pass.

    The gradient of the loss is the scale of the main loss times the number of context-parallel ranks, because
    `finalize_model_grads` divides by this number. Pipeline schedules set the scale, and `amp.scale_loss` and the
    Booster multiply it by the loss scale in their backward passes, unless `set_loss_scale` was called.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, aux_loss: Tensor) -> Tensor:  # type: ignore[override]
        """Return `output`; save `aux_loss` for the backward pass."""
        ctx.save_for_backward(aux_loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return `grad_output` for the output, and the scale that the class describes for the auxiliary loss."""
        (aux_loss,) = ctx.saved_tensors
        alone = parallel_state.is_unitialized()
        scale = router_loss_scale.value(1 if alone else parallel_state.get_context_parallel_world_size())
        if isinstance(scale, Tensor):
            scale = scale.to(aux_loss.dtype).to(aux_loss.device).reshape(())
        return grad_output, torch.ones_like(aux_loss) * scale

    @staticmethod
    def set_loss_scale(scale: Tensor | None) -> None:
        """Set the gradient of routers' losses in the backward pass; None restores the scale that the class describes.

        Megatron sets the loss scale times the number of context-parallel ranks, divided by the microbatches.
        """
        router_loss_scale.explicit = scale

    @staticmethod
    def loss_scale() -> Tensor | None:
        """Return the scale that `set_loss_scale` has set, or None."""
        return router_loss_scale.explicit
