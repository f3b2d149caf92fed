"""`torch.ops.apex.transducer_*`: what `torch.compile` sees of the transducer."""

from __future__ import annotations

import torch

from .. import _library
from .joint import joint_backward, joint_forward
from .loss import loss_backward, loss_forward
from .spec import JointSpec, LossNodes, compute_dtype


def _joint(f, g, f_len, g_len, batch_offset, noise, relu, dropout, packed_rows, want_mask):
    spec = JointSpec(relu, dropout, packed_rows)
    h, mask = joint_forward(f, g, f_len, g_len, batch_offset, spec, noise, want_mask)
    return h, f.new_empty(0, dtype=torch.uint8) if mask is None else mask


def _joint_fake(f, g, f_len, g_len, batch_offset, noise, relu, dropout, packed_rows, want_mask):
    packed = batch_offset is not None
    shape = (packed_rows, f.shape[2]) if packed else (f.shape[0], f.shape[1], g.shape[1], f.shape[2])
    h = f.new_empty(shape, dtype=torch.promote_types(f.dtype, g.dtype))
    return h, f.new_empty(shape if want_mask else 0, dtype=torch.uint8)


def _joint_backward(dh, kept, f_len, g_len, batch_offset, frames, tokens, scale, f_dtype, g_dtype):
    with torch.no_grad():
        return joint_backward(dh, kept, f_len, g_len, batch_offset, (frames, tokens), scale, (f_dtype, g_dtype))


def _joint_backward_fake(dh, kept, f_len, g_len, batch_offset, frames, tokens, scale, f_dtype, g_dtype):
    batches, features = f_len.shape[0], dh.shape[-1]
    return (
        dh.new_empty((batches, frames, features), dtype=f_dtype),
        dh.new_empty((batches, tokens, features), dtype=g_dtype),
    )


def _loss(x, label, f_len, y_len, batch_offset, max_f_len, blank_idx, want_scores):
    losses, nodes, scores = loss_forward(
        x, label, f_len, y_len, batch_offset, max_f_len, blank_idx, want_scores=want_scores
    )
    assert nodes is not None
    return losses, *nodes, scores if want_scores else x.new_empty(0, dtype=compute_dtype(x))


def _loss_fake(x, label, f_len, y_len, batch_offset, max_f_len, blank_idx, want_scores):
    nodes, compute = (label.shape[0], max_f_len, label.shape[1] + 1), compute_dtype(x)
    sums, shares = x.new_empty(nodes, dtype=compute), x.new_empty((2, *nodes), dtype=compute)
    return x.new_empty(label.shape[0]), sums, shares, x.new_empty((2, *nodes) if want_scores else 0, dtype=compute)


def _loss_backward(grad, x, label, f_len, y_len, batch_offset, blank_idx, sums, shares):
    given = grad, x, label, f_len, y_len, batch_offset, blank_idx
    return loss_backward(*given, LossNodes(sums, shares)).contiguous()


def _loss_backward_fake(grad, x, label, f_len, y_len, batch_offset, blank_idx, sums, shares):
    return x.new_empty(x.shape)


def _refuse(ctx, *gradients):
    raise RuntimeError("torch.ops.apex.transducer_* have no derivatives; use apex.contrib.transducer")


def _nothing_to_save(ctx, inputs, output) -> None:
    pass


for _schema, _implementation, _fake in (
    (
        "transducer_joint(Tensor f, Tensor g, Tensor f_len, Tensor g_len, Tensor? batch_offset, Tensor? noise, "
        "bool relu, float dropout, SymInt packed_rows, bool want_mask) -> (Tensor, Tensor)",
        _joint,
        _joint_fake,
    ),
    (
        "transducer_joint_backward(Tensor dh, Tensor? kept, Tensor f_len, Tensor g_len, Tensor? batch_offset, "
        "SymInt frames, SymInt tokens, float scale, ScalarType f_dtype, ScalarType g_dtype) -> (Tensor, Tensor)",
        _joint_backward,
        _joint_backward_fake,
    ),
    (
        "transducer_loss(Tensor x, Tensor label, Tensor f_len, Tensor y_len, Tensor? batch_offset, SymInt max_f_len, "
        "int blank_idx, bool want_scores) -> (Tensor, Tensor, Tensor, Tensor)",
        _loss,
        _loss_fake,
    ),
    (
        "transducer_loss_backward(Tensor grad, Tensor x, Tensor label, Tensor f_len, Tensor y_len, "
        "Tensor? batch_offset, int blank_idx, Tensor sums, Tensor shares) -> Tensor",
        _loss_backward,
        _loss_backward_fake,
    ),
):
    _library.register_op(_schema, _implementation, _fake, backward=_refuse, setup_context=_nothing_to_save)
