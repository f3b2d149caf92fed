"""Gated linear units: SwiGLU, GeGLU and ReGLU, with an optional bias.

An input is `rows` x (2 * `width`): the gate in the first half of each row, the value in the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_floats, check_parameters, check_tensors
from .._device import DeviceFacts, facts, launch_rule
from .._op import Kernels, Op, Saved
from . import config, reference

kernels = _library.LazyModule(f"{__package__}.kernels")
shared_kernels = _library.LazyModule(f"{_library.__package__}._kernel_functions")

# Positions within a row are 32-bit in the kernels.
LONGEST_ROW = 2**31 - 2**17


def bias_glu(input: Tensor, bias: Tensor | None = None, activation: str = "silu") -> Tensor:
    """Return activation(gate) * value, where gate and value are the halves of the last dimension of `input` + `bias`.

    `activation` is one of "silu" (SwiGLU), "gelu", "gelu_tanh" (GeGLU) and "relu" (ReGLU). Computed in float32 (float64
    for float64 tensors); the output has the input's dtype, whatever the bias's dtype is.
    """
    check(input, bias, activation)
    if bias is not None and input.is_cuda and torch.compiler.is_compiling():
        # Inductor sums the gradient of a bias in passes of its own: bf16 16384x22016 in 1014 us, the kernel in 461.
        return GLU.differentiable(input, bias, activation)
    return GLU(input, bias, activation)


def glu_pair(gate: Tensor, value: Tensor, activation: str = "silu") -> Tensor:
    """Return activation(gate) * value for gate and value of the same shape and dtype, as two linear layers give them.

    Computed in float32 (float64 for float64 tensors) and rounded once.
    """
    check_floats(gate=gate, value=value)
    _check_activation(activation)
    if (gate.shape, gate.dtype, gate.device) != (value.shape, value.dtype, value.device):
        kinds = [f"{list(t.shape)} {t.dtype} on {t.device}" for t in (gate, value)]
        raise ValueError(f"gate is {kinds[0]}, value {kinds[1]}; they must be alike")
    return GLU_PAIR(gate, value, activation)


def check(input: Tensor, bias: Tensor | None, activation: str) -> None:
    """Raise for arguments that do not fit together."""
    if not isinstance(input, Tensor):
        check_tensors(input=input)
    _check_activation(activation)
    if not input.is_floating_point():
        raise TypeError(f"a gated linear unit needs a floating-point input, got {input.dtype}")
    shape = input.shape
    if not shape or shape[-1] % 2 or shape[-1] > LONGEST_ROW:
        raise ValueError(
            f"the last dimension of the input holds gate and value, so it must be even and at most {LONGEST_ROW}; its "
            f"shape is {list(shape)}"
        )
    check_parameters(input, shape[-1:], bias=bias)


def _check_activation(activation: str) -> None:
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not known; use one of {', '.join(reference.ACTIVATIONS)}")


def launch_forward(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    *outer, columns = input.shape
    output = torch.empty(*outer, columns // 2, dtype=input.dtype, device=input.device)
    sizes, device = (input.numel() // columns, columns // 2, input.dtype.itemsize), facts(input.device)
    _forward_launch(*sizes, activation, device)((input, None, bias, output))
    return output


@launch_rule
def _forward_launch(rows: int, width: int, itemsize: int, activation: str, device: DeviceFacts) -> Any:
    tile = config.forward_tile(rows, width, itemsize, device)
    column_blocks = -(-width // tile.block)
    return kernels.glu_forward.prepare(
        (-(-rows // tile.rows) * column_blocks,),
        (rows, width, column_blocks),
        **_constants(rows, width, activation, tile),
    )


def _constants(rows: int, width: int, activation: str, tile: config.Tile) -> dict[str, Any]:
    """Return the constants and warps that the kernels of both passes share."""
    full = rows % tile.rows == 0 and width % tile.block == 0
    kind = {"ALIGN": math.gcd(width, 16), "ACTIVATION": activation}
    return {**kind, "ROWS": tile.rows, "BLOCK": tile.block, "FULL": full, "num_warps": tile.num_warps}


def launch_backward(
    dy: Tensor, input: Tensor, bias: Tensor | None, activation: str, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | None]:
    bias_grad, columns = bias is not None and wanted[1], input.shape[-1]
    launch, sum_partials, groups = _backward_launches(
        input.numel() // columns, columns // 2, input.dtype.itemsize, activation, bias_grad, facts(input.device)
    )
    dinput = torch.empty_like(input)
    partials = torch.empty(groups, columns, dtype=torch.float32, device=input.device) if bias_grad else None
    launch((dy, input, None, bias, dinput, None, partials))
    if partials is None or bias is None:
        return dinput, None
    dbias = torch.empty_like(bias)
    sum_partials((partials, dbias))
    return dinput, dbias


@launch_rule
def _backward_launches(
    rows: int, width: int, itemsize: int, activation: str, bias_grad: bool, device: DeviceFacts
) -> tuple[Any, Any, int]:
    """Return the kernel of the backward pass, the kernel that sums for the bias, and the number of partial sums."""
    tile = config.backward_tile(rows, width, itemsize, bias_grad, device)
    column_blocks, tiles = -(-width // tile.block), -(-rows // tile.rows)
    groups = config.backward_groups(tiles, column_blocks, device) if bias_grad else tiles
    launch = kernels.glu_backward.prepare(
        (groups * column_blocks,),
        (rows, width, column_blocks, groups),
        **_constants(rows, width, activation, tile),
        STAGES=tile.num_stages,
        num_stages=tile.num_stages,
    )
    columns = 2 * width
    sums = shared_kernels.sum_bias_partials.prepare(
        (-(-columns // 32),), (groups, columns), ROWS=64, BLOCK=32, num_warps=4
    )
    return launch, sums, groups


def launch_pair_forward(gate: Tensor, value: Tensor, activation: str) -> Tensor:
    output = torch.empty_like(gate, memory_format=torch.contiguous_format)
    _forward_launch(*_pair_sizes(gate), activation, facts(gate.device))((gate, value, None, output))
    return output


def launch_pair_backward(
    dy: Tensor, gate: Tensor, value: Tensor, activation: str, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    dgate, dvalue = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (gate, value))
    launch, *_ = _backward_launches(*_pair_sizes(gate), activation, False, facts(gate.device))
    launch((dy, gate, value, None, dgate, dvalue, None))
    return dgate, dvalue


def _pair_sizes(gate: Tensor) -> tuple[int, int, int]:
    width = gate.shape[-1] if gate.dim() and gate.shape[-1] <= LONGEST_ROW else math.gcd(gate.numel(), 1024)
    return gate.numel() // width, width, gate.dtype.itemsize


FAMILY = _library.register_family(
    _library.OpFamily("glu", "gated linear units with bias: SwiGLU, GeGLU and ReGLU, forward and backward")
)

GLU = Op(
    FAMILY,
    "glu(Tensor input, Tensor? bias, str activation) -> Tensor",
    reference=reference.forward,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=lambda input, bias, activation: input.new_empty((*input.shape[:-1], input.shape[-1] // 2)),
    saved=Saved("input", "bias"),
)

GLU_PAIR = Op(
    FAMILY,
    "glu_pair(Tensor gate, Tensor value, str activation) -> Tensor",
    reference=reference.pair,
    kernels=Kernels(launch_pair_forward, launch_pair_backward),
    shapes=lambda gate, value, activation: gate.new_empty(gate.shape),
    saved=Saved("gate", "value"),
)
