"""Connections to other packages: with the packages that are installed, and with stand-ins for what needs none.

`make clients` runs the same checks with the oldest and the newest release of each package.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import apex
from apex.integrations import accelerate, kernels

PACKAGES = ("accelerate", "kernels", "lightning", "transformers")


@pytest.mark.parametrize("package", PACKAGES)
def test_with_the_package(package: str) -> None:
    pytest.importorskip(package)
    module = importlib.import_module(f"tests.integrations.{package}_checks")
    checks = [check for name, check in vars(module).items() if name.startswith("check_")]
    assert checks
    for check in checks:
        check()


@pytest.mark.parametrize("package", ["lightning", "transformers"])
def test_without_the_package_the_import_says_what_is_missing(package: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ImportError, match=rf"apex.integrations.{package} needs .*pip install {package}"):
        importlib.import_module(f"apex.integrations.{package}")


class Accelerator:
    def prepare(self, *objects: Any, **options: Any) -> Any:
        return objects, options


def test_prepare_fuses_models_and_optimizers_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer, loader = torch.optim.AdamW(model.parameters()), [1, 2]
    objects, options = accelerate.prepare(Accelerator(), model, optimizer, loader, device_placement=[True] * 3)
    assert objects == (model, optimizer, loader)
    assert options == {"device_placement": [True] * 3}
    assert isinstance(optimizer, apex.optimizers.FusedAdam)
    assert "Fused" in repr(model[1])
    with pytest.raises(TypeError, match=r"accelerator must be .* not a Sequential"):
        accelerate.prepare(model)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)


class Norm(nn.Module):
    def __init__(self, epsilon: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(16))
        setattr(self, epsilon, 1e-6)


def expected(name: str, module: Any, x: torch.Tensor) -> torch.Tensor:
    if name == "RMSNorm":
        return nn.functional.rms_norm(x, (16,), module.weight, 1e-6)
    if name == "RMSNormZeroCentered":
        return nn.functional.rms_norm(x, (16,), 1.0 + module.weight, 1e-6)
    gate = module.gate_proj(x)
    gate = nn.functional.silu(gate) if name == "SwiGLUMLP" else nn.functional.gelu(gate, approximate="tanh")
    return module.down_proj(gate * module.up_proj(x))


@pytest.mark.parametrize("name", list(kernels.mapping()))
def test_layers_of_the_mapping(name: str) -> None:
    """A layer keeps the package's rules: no constructor, no members of its own, a backward pass."""
    torch.manual_seed(0)
    mapping = kernels.mapping()
    assert list(mapping[name]) == ["cuda", "rocm"]
    assert list(kernels.mapping("cpu")[name]) == ["cpu"]
    layer: Any = mapping[name]["cuda"].load()
    assert layer.__init__ is nn.Module.__init__
    own = {member for member, _ in inspect.getmembers(layer)} - {member for member, _ in inspect.getmembers(nn.Module)}
    assert own == {"can_torch_compile", "has_backward"}
    if name == "rotary_pos_emb":
        return  # a function, which the tests below try
    epsilon = "variance_epsilon" if name == "RMSNorm" else "eps"
    module: Any = Norm(epsilon) if name.startswith("RMSNorm") else MLP()
    x = torch.randn(6, 16)
    right = expected(name, module, x)
    gradients = torch.autograd.grad(right.square().sum(), list(module.parameters()))
    module.forward = MethodType(layer.forward, module)
    output = module(x)
    torch.testing.assert_close(output, right)
    again = torch.autograd.grad(output.square().sum(), list(module.parameters()))
    torch.testing.assert_close(again, gradients, rtol=1e-4, atol=1e-5)


class Rotation(nn.Module):
    """What `kernels` makes of a function that rotates the two halves of all channels."""

    def forward(self, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(x * cos + self.turned(x) * sin for x in (q, k))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)


class NeighbourRotation(Rotation):
    def turned(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


class OtherRotation(Rotation):
    def turned(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [Rotation, NeighbourRotation, OtherRotation])
def test_rotations_of_the_mapping(kind: Any, compiled: bool) -> None:
    """Functions of one name differ: a trial tells what each computes."""
    torch.manual_seed(0)
    layer: Any = kernels.mapping("cpu")["rotary_pos_emb"]["cpu"].load()
    q, k = (torch.randn(2, 5, heads, 8, requires_grad=True) for heads in (3, 1))
    angles = torch.randn(1, 5, 4)
    angles = angles.repeat_interleave(2, -1) if kind is NeighbourRotation else torch.cat((angles, angles), -1)
    module, results = kind(), []
    for forward in (kind.forward, layer.forward):
        module.forward = MethodType(forward, module)
        call = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
        outputs = call(q, k, angles.cos(), angles.sin(), unsqueeze_dim=2)
        results.append([*outputs, *torch.autograd.grad(outputs, (q, k), [x.detach().cos() for x in outputs])])
    torch.testing.assert_close(*results)
    assert (kernels._rotation(kind).__module__ == "apex._fuse.rotation") == (kind is not OtherRotation)
