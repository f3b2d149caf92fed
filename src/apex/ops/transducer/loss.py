"""The transducer loss: checks, dispatch and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from . import reference_loss
from .joint import _SUPPORTED, FAMILY, check_lengths, check_offset
from .launches import triton_loss_backward, triton_loss_forward, triton_loss_words
from .spec import LossNodes

# Words of a row and nodes of the lattices are counted in 32 bits by the kernels.
MOST = 2**31 - 2**16


def check_loss(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    max_f_len: int,
    blank_idx: int,
) -> None:
    """Refuses arguments that do not fit, in clear words."""
    if label.dim() != 2 or label.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"label must be batch x labels of int32 or int64, got {label.dtype} of shape {list(label.shape)}"
        )
    batches, tokens = label.shape[0], label.shape[1] + 1
    if x.dtype not in _SUPPORTED:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if batch_offset is None:
        if x.dim() != 4 or x.shape[0] != batches or x.shape[2] != tokens:
            raise ValueError(
                f"x must be batch x frames x (labels + 1) x words, got shape {list(x.shape)} where label has "
                f"{list(label.shape)}"
            )
        if max_f_len != x.shape[1]:
            raise ValueError(f"max_f_len={max_f_len} must be the {x.shape[1]} frames of a padded x")
    else:
        if x.dim() != 2:
            raise ValueError(f"a packed x must be rows x words, got shape {list(x.shape)}")
        check_offset(batch_offset, batches, x.device)
    if not 0 <= blank_idx < x.shape[-1]:
        raise ValueError(f"blank_idx={blank_idx} must be a word, between 0 and {x.shape[-1] - 1}")
    if max(x.shape[-1], batches * max_f_len * tokens) > MOST:
        raise ValueError(f"{batches} x {max_f_len} x {tokens} nodes of {x.shape[-1]} words are more than {MOST}")
    if label.device != x.device:
        raise ValueError(f"label is on {label.device}, x on {x.device}")
    check_lengths(f_len, "f_len", batches, max_f_len, x.device, least=1)
    check_lengths(y_len, "y_len", batches, tokens - 1, x.device)


def loss_forward(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    max_f_len: int,
    blank_idx: int,
    *,
    normalize: bool = True,
    want_alpha: bool = True,
) -> tuple[Tensor, LossNodes]:
    """Losses and nodes, without autograd; not `normalize` when x has log-probabilities."""
    sizes = (max_f_len, label.shape[1] + 1)
    with torch.no_grad():
        if x.numel() and label.shape[0] and _library.runs_triton(FAMILY, x):
            lengths = f_len.contiguous(), y_len.contiguous()
            offset = None if batch_offset is None else batch_offset.contiguous()
            return triton_loss_forward(x, label, *lengths, offset, sizes, blank_idx, normalize, want_alpha)
        if not label.shape[0]:
            empty = torch.empty(0, *sizes, dtype=reference_loss.compute_dtype(x), device=x.device)
            return x.new_empty(0), LossNodes(torch.stack([empty, empty]), empty, empty, empty)
        return reference_loss.forward(x, label, f_len, y_len, batch_offset, sizes, blank_idx, normalize)


def loss_backward(
    grad: Tensor,
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    blank_idx: int,
    saved: LossNodes,
    *,
    through_softmax: bool = True,
) -> Tensor:
    """The gradient of x from that of the losses and from what `loss_forward` gave; without autograd.

    Not `through_softmax`: of log-probabilities.
    """
    with torch.no_grad():
        if not x.numel() or not label.shape[0]:
            return torch.zeros_like(x)
        kernels = _library.runs_triton(FAMILY, x)
        run = triton_loss_backward if kernels else reference_loss.backward
        return run(
            grad,
            x,
            label,
            f_len.contiguous(),
            y_len.contiguous(),
            None if batch_offset is None else batch_offset.contiguous(),
            blank_idx,
            saved,
            through_softmax,
        )


def scores_of_words(
    log_probabilities: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    max_f_len: int,
    blank_idx: int,
) -> tuple[Tensor, Tensor]:
    """Per node, the log-probabilities of blank and of the next label; zero where there is no node."""
    sizes = (max_f_len, label.shape[1] + 1)
    given = log_probabilities.contiguous(), label.contiguous()
    with torch.no_grad():
        if log_probabilities.numel() and label.shape[0] and _library.runs_triton(FAMILY, log_probabilities):
            lengths = f_len.contiguous(), y_len.contiguous()
            _, of_blank, of_label = triton_loss_words(*given, *lengths, batch_offset, sizes, blank_idx, normalize=False)
        else:
            nodes = reference_loss.lattice(f_len, y_len, batch_offset, sizes)
            _, of_blank, of_label = reference_loss.scores_of_words(*given, nodes, blank_idx, normalize=False)
    return of_blank, of_label


def loss_forward_and_save(
    ctx: Any,
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    max_f_len: int,
    blank_idx: int,
    want_scores: bool = False,
) -> tuple[Tensor, Tensor]:
    """The forward of the loss's autograd Function: losses in x's dtype, and alpha and beta if wanted or needed."""
    check_loss(x, label, f_len, y_len, batch_offset, max_f_len, blank_idx)
    given = x, label, f_len, y_len, batch_offset
    if torch.compiler.is_compiling():
        losses, *nodes = torch.ops.apex.transducer_loss(*given, max_f_len, blank_idx)
        saved = LossNodes(*nodes)
    else:
        want_alpha = want_scores or ctx.needs_input_grad[0]
        losses, saved = loss_forward(*given, max_f_len, blank_idx, want_alpha=want_alpha)
    if ctx.needs_input_grad[0]:
        ctx.save_for_backward(*given, *saved)
    ctx.blank_idx = blank_idx
    return losses, saved.scores


def loss_backward_from_saved(ctx: Any, grad: Tensor) -> Tensor:
    """The backward of the loss's autograd Function: the gradient of x, which has no derivative itself."""
    x, label, f_len, y_len, batch_offset, *nodes = ctx.saved_tensors
    given, saved = (x, label, f_len, y_len, batch_offset), LossNodes(*nodes)
    if torch.compiler.is_compiling():
        return torch.ops.apex.transducer_loss_backward(grad, *given, ctx.blank_idx, *saved)
    if torch.is_grad_enabled():
        raise RuntimeError("the transducer loss has a first derivative only; create_graph=True is not supported")
    return loss_backward(grad, *given, ctx.blank_idx, saved)
