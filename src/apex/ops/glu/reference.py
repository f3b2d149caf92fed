"""Gated linear units in PyTorch operators: the definition, and the implementation where there is no kernel.

Runs on any device in any floating dtype; half precision is computed in float32, float64 in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def gate_and_value(input: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """The two halves of each row, the bias added."""
    if input.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32):
        gate, value = (input if bias is None else input + bias).chunk(2, -1)  # derivatives of slices fill and add
        if activation == "gelu_tanh" and gate.is_cpu:
            gate = gate.contiguous()  # whose gelu takes 0.3 times as long
        return gate, value
    compute = compute_dtype(input, bias)
    if activation == "gelu":  # PyTorch's derivative of which takes six times as long for a contiguous gate on Arm
        wide = input.to(compute)
        gate, value = (wide if bias is None else wide + bias.to(compute)).chunk(2, -1)
        return gate, value
    # Cast apart, so that gradients are rounded before they are joined.
    gate, value = (half.to(compute) for half in input.chunk(2, -1))
    if bias is not None:
        of_gate, of_value = bias.to(compute).chunk(2, -1)
        gate, value = gate + of_gate, value + of_value
    return gate, value


def activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return functional.silu(gate)
    if activation == "relu":
        return functional.relu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def _activation_backward(gradient: Tensor, gate: Tensor, activation: str, out: Tensor) -> None:
    """Writes `gradient` times the derivative of the activation at `gate` to `out`."""
    backward = torch.ops.aten
    if activation == "silu":
        backward.silu_backward.grad_input(gradient, gate, grad_input=out)
    elif activation == "relu":
        backward.threshold_backward.grad_input(gradient, gate, 0, grad_input=out)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        backward.gelu_backward.grad_input(gradient, gate, approximate=approximate, grad_input=out)


def forward(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(gate) * value in the input's dtype; differentiable."""
    gate, value = gate_and_value(input, bias, activation)
    return (activated(gate, activation) * value).to(input.dtype)


def backward(
    dy: Tensor, input: Tensor, bias: Tensor | None, activation: str, bias_grad: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Gradients of input and bias; not differentiable."""
    gate, value = gate_and_value(input, bias, activation)
    gradient = dy.to(gate.dtype)
    width = input.shape[-1] // 2
    dinput = torch.empty(input.shape, dtype=gate.dtype, device=input.device)
    _activation_backward(gradient * value, gate, activation, dinput[..., :width])
    torch.mul(gradient, activated(gate, activation), out=dinput[..., width:])
    dbias = None
    if bias is not None and bias_grad:
        dbias = dinput.reshape(-1, 2 * width).sum(0).to(bias.dtype) if width else torch.zeros_like(bias)
    return dinput.to(input.dtype), dbias
