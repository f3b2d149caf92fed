"""Attention masks: the kinds that the modules take, and the form that PyTorch's attention needs.

Letters: S queries, T keys, B batches, H heads.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor


class MaskKind(Enum):
    """Kinds of masks.

    PADDING: [B, T], nonzero where a key is hidden. ADDITIVE: [B, T], added to the logits. TIME: [S, T], nonzero where a
    query may not see a key. CAUSAL: no tensor; query i sees the keys up to i.
    """

    PADDING = "key_padding_mask"
    ADDITIVE = "additive key_padding_mask"
    TIME = "attn_mask"
    CAUSAL = "causal attn_mask"


class Mask(NamedTuple):
    """A mask: its kind and, unless it is CAUSAL, its tensor."""

    kind: MaskKind
    tensor: Tensor | None = None

    def as_tensor(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the mask's tensor; make it for a CAUSAL mask."""
        if self.tensor is not None:
            return self.tensor
        return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(1)


def make_mask(mask: Tensor | None, use_time_mask: bool, additive: bool) -> Mask | None:
    """Make a mask from the three arguments that upstream's functions take."""
    if mask is None:
        return None
    if use_time_mask:
        return Mask(MaskKind.TIME, mask)
    return Mask(MaskKind.ADDITIVE if additive else MaskKind.PADDING, mask)


def check_mask(mask: Mask | None, queries: int, keys: int, batch: int, device: torch.device) -> None:
    """Raise for a mask whose shape, dtype or device does not fit S, T and B."""
    kind, tensor = mask or (None, None)
    if tensor is None or kind is None:
        return
    shape = (queries, keys) if kind is MaskKind.TIME else (batch, keys)
    if tensor.shape != shape:
        meaning = "[queries, keys]" if kind is MaskKind.TIME else "[batch, keys]"
        raise ValueError(f"the {kind.value} has shape {list(tensor.shape)}, expected {meaning} = {list(shape)}")
    if kind is MaskKind.ADDITIVE and not tensor.is_floating_point():
        raise TypeError(f"an additive mask is added to the logits and must be floating-point, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"the {kind.value} is on {tensor.device}, the queries on {device}")


def hidden(tensor: Tensor) -> Tensor:
    """Return True where a mask of any dtype is nonzero."""
    return tensor if tensor.dtype == torch.bool else tensor != 0


def broadcastable(mask: Mask | None, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Return the mask for logits [B, H, S, T] as `apex.ops.softmax` takes it: nonzero hides, floats are added."""
    if mask is None:
        return None
    kind, tensor = mask.kind, mask.as_tensor(queries, keys, device)
    if kind in (MaskKind.TIME, MaskKind.CAUSAL):
        return hidden(tensor)
    return (tensor.detach() if kind is MaskKind.ADDITIVE else hidden(tensor))[:, None, None, :]


def _from_zero(added: Tensor) -> Tensor:
    """Return the mask less the largest element of each row, which changes no probability.

    From PyTorch 2.11 on cuDNN gives NaN gradients for queries whose logits are all below -88 if there is a mask and
    half of the last tile of 128 keys is empty: masks that add -10000 to all keys of a batch would cause that.
    """
    return added - added.amax(1, keepdim=True).clamp_(min=torch.finfo(added.dtype).min)


def added_logits(mask: Mask | None, heads: int, dtype: torch.dtype, folded: bool) -> Tensor | None:
    """Return the mask as PyTorch's attention adds it to logits [B, H, S, T] or, `folded`, [1, B*H, S, T].

    Never a boolean mask: PyTorch makes a float mask from it at every call, with a finite number for hidden keys in
    cuDNN's version. A query that may see nothing would get a mean of the values and NaN for its gradient.
    """
    kind, tensor = mask or (None, None)
    if tensor is None:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if kind is MaskKind.TIME:
        return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device).masked_fill_(hidden(tensor), -torch.inf)
    batch, keys = tensor.shape
    if kind is MaskKind.ADDITIVE:
        if tensor.is_cuda and keys % 128 == 64:
            tensor = _from_zero(tensor)
        added = tensor.to(dtype)[:, None, None, :]
        return added.expand(batch, heads, 1, keys).reshape(1, batch * heads, 1, keys) if folded else added
    zeros = torch.zeros((batch, heads if folded else 1, 1, keys), dtype=dtype, device=tensor.device)
    added = zeros.masked_fill_(hidden(tensor)[:, None, None, :], -torch.inf)
    return added.view(1, batch * heads, 1, keys) if folded else added
