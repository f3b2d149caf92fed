"""Loaders of Adam's kernels."""

from __future__ import annotations

import pytest
import torch

from apex.kernel.kernel_loader import CPUAdamLoader, FusedOptimizerLoader
from apex.utils import multi_tensor_applier


@pytest.mark.parametrize("scale", [-1.0, 4.0])
@pytest.mark.parametrize("adamw", [True, False])
def test_both_kernels_are_torchs_adam(adamw: bool, scale: float) -> None:
    torch.manual_seed(0)
    start, gradients = torch.rand(16, dtype=torch.float64), torch.rand(3, 16, dtype=torch.float64)
    param = torch.nn.Parameter(start.clone())
    peer = (torch.optim.AdamW if adamw else torch.optim.Adam)([param], lr=0.1, weight_decay=0.1)
    fused, flat = start.clone(), start.clone()
    moments = [torch.zeros(16, dtype=torch.float64) for _ in range(4)]
    flag = torch.zeros(1, dtype=torch.int32)
    on_host = CPUAdamLoader().load().CPUAdamOptimizer(0.1, 0.9, 0.999, 1e-8, 0.1, adamw)
    for step, gradient in enumerate(gradients, 1):
        param.grad = gradient / scale if scale > 0 else gradient.clone()
        peer.step()
        lists = [[gradient.clone()], [fused], [moments[0]], [moments[1]]]
        numbers = (0.1, 0.9, 0.999, 1e-8, step, adamw, True, 0.1, scale)
        multi_tensor_applier(FusedOptimizerLoader().load().multi_tensor_adam, flag, lists, *numbers)
        on_host.step(step, 0.1, 0.9, 0.999, 1e-8, 0.1, True, flat, gradient, *moments[2:], scale)
    torch.testing.assert_close(fused, param.detach())
    torch.testing.assert_close(flat, param.detach())
