"""Casts of models to half precision, and float32 masters of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..ops.multi_tensor import scale, zero
from ..RNN.RNNBackend import stackedRNN
from .loss_scaler import to_python_float as to_python_float

clip_grad_norm = nn.utils.clip_grad_norm_

# Dtypes of inputs that are indices or masks and are not cast.
_INDEX_TYPES = (torch.int32, torch.int64, torch.bool)


class tofp16(nn.Module):
    """A layer that casts its input to float16."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        return input.half()


def _stays_float(module: nn.Module) -> bool:
    """Return whether a module is a batch norm with parameters; these stay in float32 because of their statistics."""
    return isinstance(module, _BatchNorm) and module.affine


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast a model's batch norms that have parameters to float32, in place."""
    for part in module.modules():
        if _stays_float(part):
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Return the model in float16 except for its batch norms, preceded by a layer that casts the input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters, gradients and buffers of a module, but not its children's, in place."""
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            param.data = param.data.to(dtype)
        if param.grad is not None and param.grad.is_floating_point():
            param.grad.data = param.grad.data.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model in place, except for batch norms that have parameters."""
    for module in network.modules():
        if _stays_float(module):
            continue
        convert_module(module, dtype)
    for module in network.modules():
        if isinstance(module, nn.RNNBase | stackedRNN):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A model in float16 except for its batch norms; it casts its inputs, but no indices and masks."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Any) -> Any:
        return self.network(*map(_to_half, inputs))


def _to_half(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.dtype not in _INDEX_TYPES else value


def backwards_debug_hook(grad: Tensor) -> NoReturn:
    """Raise an error; a hook for masters, which no backward pass may reach."""
    raise RuntimeError("a master parameter received a gradient in the backward pass; only the model's parameters may")


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return the trained parameters of `model`, and float32 masters of them.

    With `flat_master` all masters lie one after the other in a single vector, the only element of the second list.
    """
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return model_params, [param.detach().float().clone().requires_grad_() for param in model_params]
    devices = sorted({str(param.device) for param in model_params})
    if len(devices) != 1:
        problem = f"are on {', '.join(devices)}" if devices else "are none"
        raise ValueError(f"flat_master needs all trained parameters on one device; here they {problem}")
    flat = torch.empty(sum(param.numel() for param in model_params), dtype=torch.float32, device=devices[0])
    scale([param.detach() for param in model_params], _parts(flat, model_params), 1.0)
    master = nn.Parameter(flat)
    master.grad = torch.zeros_like(flat)
    return model_params, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of the model's parameters to their masters, in one pass.

    A parameter without gradient leaves its master without one; in a flat master that part becomes 0.
    """
    if flat_master:
        master = master_params[0]
        if master.grad is None:
            master.grad = torch.empty_like(master)
        parts = list(zip(model_params, _parts(master.grad.detach(), model_params), strict=True))
        zero(part for param, part in parts if param.grad is None)
        pairs = [(param.grad.detach(), part) for param, part in parts if param.grad is not None]
    else:
        pairs = gradient_pairs(model_params, master_params)
    if pairs:
        gradients, master_grads = zip(*pairs, strict=True)
        scale(gradients, master_grads, 1.0)


def gradient_pairs(params: Sequence[Tensor], masters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a parameter's gradient and its master's gradient, which is allocated if it is None.

    A parameter without a gradient is left out, and its master's gradient becomes None.
    """
    pairs = []
    for param, master in zip(params, masters, strict=True):
        if param.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        pairs.append((param.grad.detach(), master.grad.detach()))
    return pairs


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters' values to the model's parameters, in one pass."""
    if not model_params:
        return
    if flat_master:
        masters = _parts(master_params[0].detach(), model_params)
    else:
        masters = [master.detach() for master in master_params]
    scale(masters, [param.detach() for param in model_params], 1.0)


def _parts(flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into views with the shapes of `params`."""
    sizes = [param.numel() for param in params]
    if flat.numel() != sum(sizes):
        raise ValueError(f"the flat master has {flat.numel()} elements, the model's parameters have {sum(sizes)}")
    return [part.view(param.shape) for part, param in zip(flat.split(sizes), params, strict=True)]
