"""Checks of `apex.integrations.kernels`; `make clients` runs them with the oldest and the newest kernels."""

from __future__ import annotations

import copy
from typing import Any

import kernels
import torch
from torch import Tensor, nn

import apex
from apex.integrations import kernels as integration


def as_layer(name: str, layer: Any) -> Any:
    """Mark a class as a layer of this name, as transformers' models do."""
    kernels.replace_kernel_forward_from_hub(layer, name)
    return layer


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1.0 + 0.1 * torch.randn(16)), 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class ShiftedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(0.1 * torch.randn(16)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, 1.0 + self.weight, self.eps)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class GeluMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


LAYERS = {"RMSNorm": Norm, "RMSNormZeroCentered": ShiftedNorm, "SwiGLUMLP": MLP, "GeGLUMLP": GeluMLP}


def check_mapping() -> str:
    """`kernelize` with `mapping()`: every layer, forward and backward pass"""
    for name, layer in LAYERS.items():
        as_layer(name, layer)
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer() for layer in LAYERS.values()))
    mapped: Any = copy.deepcopy(plain)
    with kernels.use_kernel_mapping(integration.mapping("cpu")):
        mapped = kernels.kernelize(mapped, mode=kernels.Mode.TRAINING, device="cpu")
    names = [module.forward.__func__.__qualname__ for module in mapped]
    assert names == [f"{name}.forward" for name in LAYERS], names
    x = torch.randn(6, 16)
    results = []
    for model in (plain, mapped):
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        results.append([output, *(param.grad for param in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    report = apex.fuse(mapped, verbose=False)
    assert all("its forward was replaced in this instance" in row.reason for row in report)
    return f"{len(names)} layers: outputs and gradients equal; `apex.fuse` names the replaced forwards"
