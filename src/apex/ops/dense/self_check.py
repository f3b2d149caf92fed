"""A quick numeric check of the dense layers on one device, for `apex doctor`."""

from __future__ import annotations

import torch

from .._tolerance import excess
from . import reference

ROWS, COLUMNS = 1100, 1000  # enough elements for the kernels to be used


def self_check(device: torch.device) -> float:
    """Largest error, as a multiple of its tolerance, of the gradients of activations and biases and of accumulation."""
    from .op import activation_backward_now, wgrad_gemm_accum

    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        dy, saved = (torch.randn(ROWS, COLUMNS, generator=generator).to(dtype) for _ in range(2))
        for activation in ("relu", "sigmoid", "gelu"):
            dz, dbias = activation_backward_now(dy.to(device), saved.to(device), activation, True, in_place=False)
            exact = reference.activation_backward(dy.double(), saved.double(), activation)
            worst = max(worst, excess(dz.cpu(), exact))
            # The bias gradient may sum what was computed (the kernels) or what was stored (PyTorch's operators).
            sums = exact.sum(0), dz.cpu().double().sum(0)
            if dbias is not None:
                worst = max(worst, min(excess(dbias.cpu(), wanted, reduction=ROWS) for wanted in sums))
        x, gradient = dy[:256, :96].contiguous(), saved[:256, :64].contiguous()
        total = torch.ones(64, 96, device=device)
        wgrad_gemm_accum(x.to(device), gradient.to(device), total)
        worst = max(worst, excess(total.cpu(), 1 + gradient.double().t() @ x.double(), reduction=256))
    return worst
