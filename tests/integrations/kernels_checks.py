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


def rotated_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotated_neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def rotation_by(turned: Any) -> Any:
    """Return a function with the arguments of transformers' rotations."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + turned(q) * sin, k * cos + turned(k) * sin

    return rotate


def check_rotations() -> str:
    """`kernelize` with `mapping()`: functions that rotate halves and neighbours, and one that does something else"""
    if not hasattr(kernels, "use_kernelized_func"):
        return "this release of kernels replaces no functions"
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (3, 1))
    angles = torch.randn(1, 5, 4)
    for turned in (rotated_halves, rotated_neighbours, torch.sin):
        rotate = rotation_by(turned)
        function = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(rotate)

        @kernels.use_kernelized_func(function)
        class Attention(nn.Module):
            def forward(self, *args: Any, function: Any = function) -> Any:
                return function(*args)

        angle = angles.repeat_interleave(2, -1) if turned is rotated_neighbours else torch.cat((angles, angles), -1)
        inputs, results = (q, k, angle.cos(), angle.sin()), []
        attention: Any = Attention()
        for is_mapped in (False, True):
            if is_mapped:
                with kernels.use_kernel_mapping(integration.mapping("cpu")):
                    kernels.kernelize(attention, mode=kernels.Mode.TRAINING, device="cpu")
                assert function.forward.__func__ is integration.RotaryPositionEmbedding.forward
            outputs = attention(*inputs)
            results.append([*outputs, *torch.autograd.grad(outputs, (q, k), [x.detach().cos() for x in outputs])])
        torch.testing.assert_close(*results)
        fused = integration._rotation(type(function)).__module__ == "apex._fuse.rotation"
        assert fused == (turned is not torch.sin)
    return "3 functions: outputs and gradients equal; the one with another formula is called"
