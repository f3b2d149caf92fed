"""Gradient clipping in two passes: one computes the norm, one scales by a factor that stays on the device."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..._distributed.norms import total_norm
from ..._distributed.shards import local
from ...ops._checks import number
from ...ops.multi_tensor import clip, clipped_before, l2norm, scale
from ...ops.multi_tensor import max_norm as maximum

# PyTorch adds this number to the norm before it divides by the norm.
MARGIN = 1e-6

_grad_of = operator.attrgetter("grad")
_DTYPES = {torch.float16, torch.bfloat16, torch.float32}


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    Returns the norm before clipping, in float32 for half-precision gradients too. Calls PyTorch's own function for
    norms other than 2 and infinity, and for gradients that are float64, sparse or passed twice. Gradients may be
    DTensors of any meshes, beside plain ones: each element counts once, and all processes get the same norm. As
    PyTorch's, it is a DTensor if all gradients are DTensors of one mesh.
    """
    if not isinstance(parameters, Tensor | Iterable):
        raise TypeError(f"parameters must be a tensor or tensors, got {type(parameters).__name__}")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    try:
        gradients = [gradient for gradient in map(_grad_of, parameters) if gradient is not None]
    except AttributeError:
        wrong = next(type(parameter).__name__ for parameter in parameters if not isinstance(parameter, Tensor))
        raise TypeError(f"parameters must be a tensor or tensors, got {wrong}") from None
    known = clipped_before(gradients)
    if known is None:
        for gradient in gradients:
            if not (gradient.is_floating_point() or gradient.is_complex()):
                raise TypeError(f"parameters have a gradient of {gradient.dtype}, which has no norm to clip")
    norm_type = number("norm_type", norm_type)
    if not isinstance(max_norm, Tensor):
        max_norm = number("max_norm", max_norm)
    elif max_norm.numel() != 1:
        raise ValueError(f"max_norm must be one number, got a tensor of shape {list(max_norm.shape)}")
    if known is None and any(local(gradient) is not gradient for gradient in gradients):
        return _clip_shards(gradients, max_norm, norm_type, error_if_nonfinite)
    if not gradients or norm_type not in (2.0, torch.inf) or (known is None and not _are_plain(gradients)):
        if norm_type == torch.inf:  # PyTorch raises for the maximum of a gradient without elements
            parameters = [parameter for parameter in parameters if parameter.grad is None or parameter.grad.numel()]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    if not error_if_nonfinite and not isinstance(max_norm, Tensor):
        return clip(gradients, max_norm, MARGIN, maximum=norm_type != 2.0, known=known).reshape(())
    norm = (l2norm if norm_type == 2.0 else maximum)(gradients)[0].reshape(())
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    scale(gradients, gradients, torch.clamp(max_norm / (norm + MARGIN), max=1.0))
    return norm


@torch.no_grad()
def _clip_shards(
    gradients: list[Tensor], max_norm: float | Tensor, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Scale gradients that are distributed in different ways; return their joint norm before that."""
    norm = total_norm(gradients, norm_type).reshape(())
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    factor = torch.clamp(max_norm / (norm + MARGIN), max=1.0)
    for gradient in map(local, gradients):
        gradient.mul_(factor.to(gradient.device))
    meshes: list[Any] = [getattr(gradient, "device_mesh", None) for gradient in gradients]
    if any(mesh is None or mesh != meshes[0] for mesh in meshes):
        return norm
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(norm, meshes[0], [Replicate()] * meshes[0].ndim, run_check=False)


def _check_finite(norm: Tensor, norm_type: float) -> None:
    if not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients is {norm.item()}, to which they cannot be clipped; "
            "with error_if_nonfinite=False they are scaled by it nevertheless"
        )


def _are_plain(gradients: list[Tensor]) -> bool:
    return (
        {type(gradient) for gradient in gradients} <= {Tensor}
        and {gradient.dtype for gradient in gradients} <= _DTYPES
        and {gradient.layout for gradient in gradients} <= {torch.strided}
        # PyTorch scales a gradient once for each time it is passed; one pass over all would write it concurrently.
        and len(set(map(id, gradients))) == len(gradients)
    )
