"""Layers and losses on tensors that PyTorch has distributed (DTensor), against the same on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.fused_dense import FusedDense, FusedDenseGeluDense
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.transformer.functional import fused_apply_rotary_pos_emb
from tests.parallel.processes import Check

PLACEMENTS = (Shard(0), Shard(1), Shard(2), Replicate())
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: FusedLayerNorm(8),
    "layer_norm_memory_efficient": lambda: FusedLayerNorm(8, memory_efficient=True),
    "rms_norm": lambda: FusedRMSNorm(8),
    "dense": lambda: FusedDense(8, 12),
    "dense_gelu_dense": lambda: FusedDenseGeluDense(8, 12, 8),
}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(function: Callable[[Tensor], Tensor], x: Tensor, distributed: Tensor) -> None:
    """Compare output and gradient of the input."""
    plain = x.clone().requires_grad_()
    results = []
    for each in (plain, distributed.requires_grad_()):
        output = function(each)
        output.square().sum().backward()
        results.append((whole(output.detach()), whole(each.grad)))
    torch.testing.assert_close(*results)


def layer(make: Callable[[], nn.Module]) -> Check:
    def check(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in PLACEMENTS:
            torch.manual_seed(0)
            x, modules = torch.randn(4, 6, 8), [make(), make()]
            modules[1].load_state_dict(modules[0].state_dict())
            distribute_module(modules[1], mesh)
            run = lambda t, modules=modules: modules[isinstance(t, DTensor)](t)  # noqa: E731
            compare(run, x, distribute_tensor(x, mesh, [placement]))
            for one, other in zip(*(module.parameters() for module in modules), strict=True):
                torch.testing.assert_close(whole(other.grad), one.grad)

    return check


def rotation(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    x, angles = torch.randn(4, 2, 6, 8), torch.linspace(0, 1, 32).view(4, 1, 1, 8)
    everywhere = distribute_tensor(angles, mesh, [Replicate()])
    run = lambda t: fused_apply_rotary_pos_emb(t, everywhere if isinstance(t, DTensor) else angles)  # noqa: E731
    torch.manual_seed(0)
    for placement in (Shard(1), Shard(2), Replicate()):
        x = distribute_tensor(x, mesh, [Replicate()]).full_tensor()  # the same values in both processes
        compare(run, x, distribute_tensor(x, mesh, [placement]))
    with pytest.raises(TypeError, match="freqs is a plain tensor beside a DTensor"):
        fused_apply_rotary_pos_emb(distribute_tensor(x, mesh, [Shard(1)]), angles)
    with pytest.raises(TypeError, match="t is a plain tensor beside a DTensor"):
        fused_apply_rotary_pos_emb(x, everywhere)


def cross_entropy(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 10), torch.tensor([1, 2, 3, 4, 0, 5])
    for placement in (Shard(0), Replicate()):
        own = distribute_tensor(labels, mesh, [placement])

        def run(t: Tensor, own: Any = own) -> Tensor:
            return SoftmaxCrossEntropyLoss.apply(t, own if isinstance(t, DTensor) else labels, 0.1, 0)

        compare(run, logits, distribute_tensor(logits, mesh, [placement]))
    with pytest.raises(ValueError, match="cut over its classes"):
        SoftmaxCrossEntropyLoss.apply(distribute_tensor(logits, mesh, [Shard(1)]), own, 0.1, 0)


CHECKS: dict[str, Check] = {
    **{name: layer(make) for name, make in LAYERS.items()},
    "rotation": rotation,
    "cross_entropy": cross_entropy,
}
