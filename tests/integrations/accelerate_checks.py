"""Checks of `apex.integrations.accelerate`; `make clients` runs them with the oldest and the newest accelerate."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

import apex
from apex.integrations.accelerate import prepare


def train(prepares: Any, precision: str) -> tuple[list[float], Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.randint(0, 4, (24,)))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=8)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    model, optimizer, loader, scheduler = prepares(accelerator, model, optimizer, loader, scheduler)
    losses = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, accelerator.unwrap_model(model), optimizer.optimizer


def check_prepare() -> str:
    """`prepare` with a loader, a scheduler and clipping, in float32 and bfloat16, three steps"""
    for precision in ("no", "bf16"):
        losses, model, optimizer = train(prepare, precision)
        expected, *_ = train(Accelerator.prepare, precision)
        assert isinstance(model[1], apex.normalization.FusedLayerNorm) or "Fused" in repr(model[1])
        assert isinstance(optimizer, apex.optimizers.FusedAdam)
        tolerance = 1e-4 if precision == "no" else 2e-2
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    return "losses equal to those of `Accelerator.prepare`"
