"""`TransducerJoint` and `TransducerLoss`, with upstream's names and arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import transducer as ops
from ...ops._checks import check_tensors, integer
from ...ops._host import HOST


class TransducerJoint(torch.nn.Module):
    """The joint h[b, t, u] = f[b, t] + g[b, u], followed by optional ReLU and dropout.

    `pack_output` leaves the padding out of the result. With `probe_mask`, each call appends a mask to `mask_probe`: a
    byte per element, 1 if it passed ReLU and dropout. Dropout is active in training only. `opt` and `fwd_tile_size`
    choose among upstream's kernels; here they are checked and otherwise unused.
    """

    def __init__(
        self, pack_output=False, relu=False, dropout=False, opt=1, fwd_tile_size=4, dropout_prob=0, probe_mask=False
    ) -> None:
        super().__init__()
        if opt not in (0, 1):
            raise ValueError(f"opt={opt} must be 0 or 1")
        if (relu or dropout) and opt != 1:
            raise NotImplementedError("ReLU and dropout fusion is only supported with opt=1")
        if dropout and not 0.0 <= dropout_prob <= 1.0:
            raise ValueError(f"dropout_prob={dropout_prob} must be a probability, between 0 and 1")
        self.pack_output = pack_output
        self.relu = relu
        self.dropout = dropout
        self.dropout_prob = dropout_prob
        self.opt = opt
        self.fwd_tile_size = fwd_tile_size
        self.dummy_batch_offset = torch.empty(0, dtype=torch.float32, device=HOST)
        self.mask_probe: list[Tensor] | None = [] if (relu or dropout) and probe_mask else None

    def forward(
        self,
        f: Tensor,
        g: Tensor,
        f_len: Tensor,
        g_len: Tensor,
        batch_offset: Tensor | None = None,
        packed_batch: int = 0,
    ) -> Tensor:
        """Return the joint of f (B x T x H) and g (B x U x H): B x T x U x H, or packed_batch x H if packed.

        `f_len` and `g_len` are the lengths of the sequences along T and U. Packing needs `batch_offset`,
        cumsum(f_len * g_len), and `packed_batch`, its last element or more. Padding is filled with -1, and so are the
        rows after the last sequence of a packed result.
        """
        if self.pack_output and (batch_offset is None or integer("packed_batch", packed_batch) == 0):
            raise ValueError("pack_output=True needs batch_offset and packed_batch")
        flags = (self.pack_output, self.relu, self.dropout and self.training)
        packing = (batch_offset if self.pack_output else self.dummy_batch_offset, packed_batch)
        settings = (self.opt, self.fwd_tile_size, self.dropout_prob, self.mask_probe)
        return TransducerJointFunc.apply(f, g, f_len, g_len, *flags, *packing, *settings)


class TransducerLoss(torch.nn.Module):
    """The negative log-likelihood of label sequences, summed over all their alignments with the frames, from logits.

    The gradient always goes through the softmax in one pass; `fuse_softmax_backward` does not change the result. `opt`
    chooses among upstream's kernels and is unused here. `packed_input` takes logits without padding.
    """

    def __init__(self, fuse_softmax_backward=True, opt=1, packed_input=False) -> None:
        super().__init__()
        self.fuse_softmax_backward = fuse_softmax_backward
        self.opt = opt
        self.packed_input = packed_input
        self.dummy_batch_offset = torch.empty(0, dtype=torch.float32, device=HOST)

    def forward(
        self,
        x: Tensor,
        label: Tensor,
        f_len: Tensor,
        y_len: Tensor,
        blank_idx: int,
        batch_offset: Tensor | None = None,
        max_f_len: int | None = None,
        debug_list: list | None = None,
    ) -> Tensor:
        """Return the loss of each sequence, in the dtype of x.

        x holds the logits, B x T x (labels + 1) x words, or rows x words if packed. `label` is B x labels; `f_len` and
        `y_len` count the frames and labels of each sequence. Packed logits need `batch_offset`,
        cumsum(f_len * (y_len + 1)), and `max_f_len`. If `debug_list` is an empty list, alpha and beta are appended. A
        label outside the vocabulary is an error on a CPU; on a GPU, to avoid a synchronisation, it makes the loss of
        its sequence NaN.
        """
        check_tensors(x=x)
        if self.packed_input:
            if batch_offset is None or max_f_len is None:
                raise ValueError("packed_input=True needs batch_offset and max_f_len")
            if integer("max_f_len", max_f_len) < 1:
                raise ValueError(f"max_f_len={max_f_len} must be at least 1, the longest of f_len")
        else:
            # If x has no dimension of frames, the later check of x names the problem.
            batch_offset, max_f_len = self.dummy_batch_offset, x.size(1) if x.dim() > 1 else 0
        arguments = (x, label, f_len, y_len, batch_offset, max_f_len, blank_idx)
        return TransducerLossFunc.apply(*arguments, self.fuse_softmax_backward, debug_list, self.opt, self.packed_input)


class TransducerLossFunc(torch.autograd.Function):
    """The autograd node behind `TransducerLoss`."""

    @staticmethod
    def forward(ctx, x, label, f_len, y_len, batch_offset, max_f_len, blank_idx, *settings):  # type: ignore[override]
        _fuse_softmax_backward, debug_list, _opt, packed_input = settings
        wants_scores = debug_list is not None and len(debug_list) == 0
        offset = batch_offset if packed_input else None
        sizes = integer("max_f_len", max_f_len), integer("blank_idx", blank_idx)
        inputs = x, label, f_len, y_len, offset, *sizes
        ops.check_loss(*inputs)
        arguments = (*inputs, True, ctx.needs_input_grad[0], wants_scores)
        results = ops.LOSS.run_or_trace(*arguments)
        if wants_scores:
            debug_list += results[3].unbind(0)
        return ops.LOSS.save(ctx, arguments, results)

    @staticmethod
    def backward(ctx, loss_grad):  # type: ignore[override]
        (dx,) = ops.LOSS.backward_from_saved(ctx, loss_grad)
        return dx, None, None, None, None, None, None, None, None, None, None


class TransducerJointFunc(torch.autograd.Function):
    """The autograd node behind `TransducerJoint`."""

    @staticmethod
    def forward(ctx, f, g, f_len, g_len, pack_output, relu, dropout, *settings):  # type: ignore[override]
        batch_offset, packed_batch, _opt, _fwd_tile_size, dropout_prob, mask_probe = settings
        wants_mask = mask_probe is not None and bool(relu or dropout)
        offset, rows = batch_offset if pack_output else None, integer("packed_batch", packed_batch)
        probability = float(dropout_prob) if dropout else 0.0
        arguments = ops.joint_arguments(f, g, f_len, g_len, offset, bool(relu), probability, rows, wants_mask)
        if not wants_mask:
            return ops.JOINT.forward_and_save(ctx, *arguments)
        results = ops.JOINT.run_or_trace(*arguments)
        mask_probe.append(results[1])
        return ops.JOINT.save(ctx, arguments, results)

    @staticmethod
    def backward(ctx, loss_grad):  # type: ignore[override]
        df, dg = ops.JOINT.backward_from_saved(ctx, loss_grad)
        return df, dg, None, None, None, None, None, None, None, None, None, None, None
