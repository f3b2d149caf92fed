"""The transducer loss: checks, dispatch and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors, integer, values_at_hand
from . import reference_loss
from .joint import _SUPPORTED, FAMILY, check_lengths, check_offset
from .launches import can_walk, triton_loss_backward, triton_loss_forward
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
    """Refuses arguments that do not fit, in clear words; lengths and labels where reading them costs nothing."""
    check_tensors(x=x, label=label)
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
    if not 0 <= integer("blank_idx", blank_idx) < x.shape[-1]:
        raise ValueError(f"blank_idx={blank_idx} must be a word, between 0 and {x.shape[-1] - 1}")
    if max(x.shape[-1], batches * max_f_len * tokens) > MOST:
        raise ValueError(f"{batches} x {max_f_len} x {tokens} nodes of {x.shape[-1]} words are more than {MOST}")
    if label.device != x.device:
        raise ValueError(f"label is on {label.device}, x on {x.device}")
    check_lengths(f_len, "f_len", batches, max_f_len, x.device, least=1)
    check_lengths(y_len, "y_len", batches, tokens - 1, x.device)
    if batch_offset is not None:
        check_offset(batch_offset, batches, x.device, f_len, y_len + 1, x.shape[0])
    if values_at_hand(label) is not None and values_at_hand(y_len) is not None:
        used = torch.arange(tokens - 1, dtype=torch.int64, device=label.device) < y_len[:, None]
        wrong = label[used & ((label < 0) | (label >= x.shape[-1]))]
        if len(wrong):
            raise ValueError(f"label must hold words, between 0 and {x.shape[-1] - 1}, got {int(wrong[0])}")


def _runs_kernels(x: Tensor) -> bool:
    """Whether kernels take the loss: not those of Triton 3.2, for which the joint's are fine."""
    if not _library.runs_triton(FAMILY, x):
        return False
    if can_walk():
        return True
    if _library.requested() == "triton":
        raise RuntimeError("APEX_IMPL=triton was asked for, but the transducer loss needs Triton 3.3 or later")
    return False


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
    want_nodes: bool = True,
    want_scores: bool = False,
) -> tuple[Tensor, LossNodes | None, Tensor | None]:
    """Losses, what `loss_backward` needs, and alpha and beta (2 x B x T x U); the latter two are None if not wanted.

    Without autograd. Not `normalize` when x has log-probabilities.
    """
    sizes = (max_f_len, label.shape[1] + 1)
    with torch.no_grad():
        if x.numel() and label.shape[0] and _runs_kernels(x):
            lengths = f_len.contiguous(), y_len.contiguous()
            offset = None if batch_offset is None else batch_offset.contiguous()
            given = x, label, *lengths, offset, sizes, blank_idx
            return triton_loss_forward(*given, normalize, want_nodes, want_scores)
        if label.shape[0]:
            return reference_loss.forward(x, label, f_len, y_len, batch_offset, sizes, blank_idx, normalize)
        empty = torch.empty(2, 0, *sizes, dtype=reference_loss.compute_dtype(x), device=x.device)
        return x.new_empty(0), LossNodes(empty[0].clone() if normalize else None, empty), empty.clone()


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
        run = triton_loss_backward if _runs_kernels(x) else reference_loss.backward
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


def nodes_of_scores(
    alpha: Tensor,
    beta: Tensor,
    log_probabilities: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    blank_idx: int,
) -> LossNodes:
    """What `loss_backward` needs, from alpha and beta (B x T x U) of log-probabilities."""
    with torch.no_grad():
        nodes = reference_loss.lattice(f_len, y_len, batch_offset, (alpha.shape[1], alpha.shape[2]))
        words = reference_loss.scores_of_words(log_probabilities, label, nodes, blank_idx, normalize=False)[1:]
        return LossNodes(None, reference_loss.shares_of_words(alpha, beta, *words, nodes))


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
) -> tuple[Tensor, Tensor | None]:
    """The forward of the loss's autograd Function: losses in x's dtype, and alpha and beta if wanted."""
    check_loss(x, label, f_len, y_len, batch_offset, max_f_len, blank_idx)
    given = x, label, f_len, y_len, batch_offset
    nodes: LossNodes | None
    scores: Tensor | None
    if torch.compiler.is_compiling():
        losses, *kept, scores = torch.ops.apex.transducer_loss(*given, max_f_len, blank_idx, want_scores)
        nodes = LossNodes(*kept)
    else:
        losses, nodes, scores = loss_forward(
            *given, max_f_len, blank_idx, want_nodes=ctx.needs_input_grad[0], want_scores=want_scores
        )
    if ctx.needs_input_grad[0] and nodes is not None:
        ctx.save_for_backward(*given, *nodes)
    ctx.blank_idx = blank_idx
    return losses, scores


def loss_backward_from_saved(ctx: Any, grad: Tensor) -> Tensor:
    """The backward of the loss's autograd Function: the gradient of x, which has no derivative itself."""
    x, label, f_len, y_len, batch_offset, *nodes = ctx.saved_tensors
    given, saved = (x, label, f_len, y_len, batch_offset), LossNodes(*nodes)
    if torch.compiler.is_compiling():
        return torch.ops.apex.transducer_loss_backward(grad, *given, ctx.blank_idx, *saved)
    if torch.is_grad_enabled():
        raise RuntimeError("the transducer loss has a first derivative only; create_graph=True is not supported")
    return loss_backward(grad, *given, ctx.blank_idx, saved)
