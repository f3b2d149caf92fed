"""Transducer joint and loss by definition, with their gradients, for tests of code that uses them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.transducer import PADDING, reference


def _accumulate(tensor: Tensor, gradient: Tensor) -> Tensor:
    """Add `gradient` to `tensor.grad`, as a backward pass does, and return the sum."""
    tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
    return tensor.grad


def transducer_loss_reference(
    x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank_idx: int, loss_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return alpha, beta, the gradient of the padded logits x (added to `x.grad`), and the losses in x's dtype."""
    inputs, settings = (x.detach(), label, f_len, y_len, None), (x.shape[1], blank_idx, True, True, True)
    losses, sums, shares, scores = reference.loss(*inputs, *settings)
    gradient = reference.loss_backward(loss_grad, *inputs, sums, shares, *settings, (True,))
    return scores[0], scores[1], _accumulate(x, gradient), losses


def transducer_joint_reference(
    f: Tensor,
    g: Tensor,
    h_grad: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    pack_output: bool,
    relu: bool,
    dropout: bool,
    dropout_prob: float = 0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h, packed if `pack_output`, and the gradients of f and g, which are added to `f.grad` and `g.grad`.

    `h_grad` and `mask` (needed with dropout) are padded, B x T x U x H. All of `h_grad` is used, so it should be zero
    in the padding.
    """
    if dropout and mask is None:
        raise NotImplementedError("mask needs to supplied to test dropout.")
    with torch.enable_grad():
        leaves = f.detach().requires_grad_(), g.detach().requires_grad_()
        h = leaves[0][:, :, None] + leaves[1][:, None]
        if relu:
            h = torch.relu(h)
        if dropout and mask is not None:
            h = h * mask * (1 / (1 - dropout_prob))
        df, dg = torch.autograd.grad(h, leaves, h_grad)
    h = h.detach()
    lengths = list(zip(f_len.tolist(), g_len.tolist(), strict=True))
    if pack_output:
        parts = [h[b, :frames, :tokens].reshape(-1, h.shape[-1]) for b, (frames, tokens) in enumerate(lengths)]
        h = torch.cat(parts)
    else:
        for b, (frames, tokens) in enumerate(lengths):
            h[b, frames:] = PADDING
            h[b, :, tokens:] = PADDING
    return h, _accumulate(f, df), _accumulate(g, dg)
