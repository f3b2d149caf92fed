"""Experts of a mixture: arguments and declaration. See `reference` for the letters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import at_hand, check_floats, check_shape, check_tensors
from .._op import Derivative, Kernels, Op, Saved
from . import reference
from .launches import launch_forward
from .launches_backward import launch_backward


def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    *,
    bias: tuple[Tensor | None, Tensor | None] | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Return the sum over each token's experts of weight * (down @ unit(gate_up @ x)), shaped like `x`.

    - `x` is [T, H], `gate_up` [E, 2F, H], `down` [E, H, F], all of one dtype; `transposed`: [E, H, 2F] and [E, F, H].
    - `index` [T, K] names the experts of each token, `weight` [T, K] their weights in any floating dtype. The index E
      means no expert: it adds nothing, and the gradient of its weight is zero.
    - `bias` is a pair for both products, [E, 2F] and [E, H]; either may be None.
    - The unit is activation(gate) * value with "silu", "gelu", "gelu_tanh" or "relu". "clamped" is the unit of
      gpt-oss: (v + 1) * g * sigmoid(1.702 g) with g = min(gate, 7) and v the value between -7 and 7.
    - Of the 2F columns the first F are the gate; if `interleaved`, gate and value alternate.

    The backward pass keeps `x`, the values before the unit [T K, 2F] and integers. Results have the same bits each
    time. On a GPU with Triton, nothing waits for the device: an index outside of 0 to E means no expert. On a CPU it
    is an error.
    """
    arguments = prepare(x, gate_up, down, index, weight, bias, activation, interleaved, transposed)
    if torch.compiler.is_compiling():  # one operator on every device: the reference's loop depends on values
        return MOE_EXPERTS.differentiable(*arguments)
    return MOE_EXPERTS(*arguments)


def prepare(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    bias: tuple[Tensor | None, Tensor | None] | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
) -> tuple[Any, ...]:
    """Return the arguments of `MOE_EXPERTS`, cast for autocast; raise for arguments that do not fit together."""
    gate_up_bias, down_bias = _pair(bias)
    x, gate_up, down, gate_up_bias, down_bias = _library.cast_for_autocast(x, gate_up, down, gate_up_bias, down_bias)
    _check(x, gate_up, down, index, weight, gate_up_bias, down_bias, activation, transposed)
    return x, gate_up, down, index, weight, gate_up_bias, down_bias, activation, bool(interleaved), bool(transposed)


def _pair(bias: tuple[Tensor | None, Tensor | None] | None) -> tuple[Tensor | None, Tensor | None]:
    if bias is None:
        return None, None
    if not isinstance(bias, (tuple, list)) or len(bias) != 2:
        raise TypeError(f"bias must be a pair (of gate_up, of down), each a tensor or None, got {type(bias).__name__}")
    return bias[0], bias[1]


def _check(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    transposed: bool,
) -> None:
    """Raise for arguments that do not fit together; check the indices if the host can read them without waiting."""
    check_floats(x=x, gate_up=gate_up, down=down, weight=weight)
    check_tensors(index=index)
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not known; use one of {', '.join(reference.ACTIVATIONS)}")
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be [tokens, hidden size]")
    if gate_up.dim() != 3 or gate_up.shape[2 if transposed else 1] % 2:
        form = "[experts, hidden size, 2 * width]" if transposed else "[experts, 2 * width, hidden size]"
        raise ValueError(f"gate_up has shape {list(gate_up.shape)}; it must be {form}")
    experts, hidden = gate_up.shape[0], x.shape[1]
    width = gate_up.shape[2 if transposed else 1] // 2
    check_shape("gate_up", gate_up, (experts, *_turned((2 * width, hidden), transposed)), x.device)
    check_shape("down", down, (experts, *_turned((hidden, width), transposed)), x.device)
    for name, tensor in (("gate_up", gate_up), ("down", down)):
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, x {x.dtype}; they must be alike: cast one of them")
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"index is {index.dtype}; int64 and int32 are accepted")
    if index.dim() != 2 or index.shape[0] != x.shape[0]:
        raise ValueError(f"index has shape {list(index.shape)}; it must be [{x.shape[0]} tokens, experts per token]")
    check_shape("index", index, index.shape, x.device)
    check_shape("weight", weight, index.shape, x.device)
    for name, bias, columns in (("of gate_up", gate_up_bias, 2 * width), ("of down", down_bias, hidden)):
        if bias is not None:
            check_floats(**{f"bias {name}": bias})
            check_shape(f"bias {name}", bias, (experts, columns), x.device)
    if at_hand(index) and index.numel() and not 0 <= int(index.min()) <= int(index.max()) <= experts:
        raise ValueError(
            f"index has values from {int(index.min())} to {int(index.max())}; they must be experts, 0 to "
            f"{experts - 1}, or {experts} for none"
        )


def _turned(sizes: tuple[int, int], transposed: bool) -> tuple[int, int]:
    return sizes[::-1] if transposed else sizes


def _shapes(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor, *others: Tensor | str | bool | None
) -> tuple[Tensor, ...]:
    rows, columns = index.shape[0] * index.shape[1], gate_up.shape[2 if others[-1] else 1]
    counts = (index.new_empty(size, dtype=torch.int32) for size in (rows, rows, gate_up.shape[0] + 1))
    return x.new_empty(x.shape), x.new_empty(rows, columns), *counts


FAMILY = _library.register_family(
    _library.OpFamily("moe", "experts of a mixture: sort, grouped products with a gated unit, sum per token")
)

_TENSORS = ("x", "gate_up", "down", "index", "weight", "gate_up_bias", "down_bias")

MOE_EXPERTS = Op(
    FAMILY,
    "moe_experts(Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor weight, Tensor? gate_up_bias, "
    "Tensor? down_bias, str activation, bool interleaved, bool transposed) -> "
    "(Tensor output, Tensor pre, Tensor order, Tensor inverse, Tensor offsets)",
    reference=reference.forward,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=_shapes,
    saved=Saved(*_TENSORS, "pre", "order", "inverse", "offsets"),
    derivative=Derivative(of=[name for name in _TENSORS if name != "index"], backward=reference.backward),
)
