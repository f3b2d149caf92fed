"""The parts of dense layers beside their matrix products, without autograd.

The products are PyTorch's, whose epilogues add the bias and apply relu (and, if no gradient is wanted, gelu). The
remaining steps take one pass each: gelu that keeps its input, the gradients of an activation and of the bias before
it, and, for a PyTorch without such a product, the accumulation of weight gradients in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._device import empty_on, facts, launch_rule
from .._tickets import TICKETS, tickets_on
from . import config, reference

kernels = _library.LazyModule(f"{__package__}.kernels")
shared_kernels = _library.LazyModule(f"{_library.__package__}._kernel_functions")

_HALF = (torch.float16, torch.bfloat16)
# Number of programs whose partial sums the last of them adds up.
UNION = 32


def as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor [..., features] as a 2-D matrix."""
    if tensor.dim() == 2:
        return tensor
    return tensor[None] if tensor.dim() == 1 else tensor.flatten(0, -2)


def gelu(input: Tensor, activation: str = "gelu") -> Tensor:
    """Return gelu in its tanh form, as the BLAS libraries compute it, or another activation of its kind."""
    if torch.compiler.is_compiling():
        return reference.gelu_by_sigmoid(input) if activation == "gelu" else reference.activate(input, activation)
    if config.is_large(input.numel(), between_layers=True) and _library.runs_triton(FAMILY, input):
        return launch_gelu(input.contiguous(), activation)
    return reference.activate(input, activation)


def launch_gelu(input: Tensor, activation: str = "gelu") -> Tensor:
    output = torch.empty_like(input)
    elements, block = input.numel(), config.GELU_BLOCK
    number = reference.ACTIVATIONS.index(activation)
    arguments = (-(-elements // block),), (input, output), (elements,)
    kernels.gelu_forward(*arguments, ACTIVATION=number, BLOCK=block, num_warps=4)
    return output


def activated_linear(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return a dense layer with its activation, for a 2-D `input`."""
    # Only on a GPU: elsewhere another operator follows the product in any case.
    if bias is not None and (input.is_cuda or _library.is_stand_in(input)):
        if activation == "relu":
            return torch._addmm_activation(bias, input, weight.t())
        if activation == "gelu":
            return torch._addmm_activation(bias, input, weight.t(), use_gelu=True)
    output = functional.linear(input, weight, bias)
    if activation in reference.ACTIVATIONS[3:]:
        return gelu(output, activation)
    # Not in place in compiled code: Inductor of PyTorch 2.11 then gave wrong gradients on an H200, and it chooses
    # what to overwrite by itself.
    if activation == "relu":
        return output.relu() if torch.compiler.is_compiling() else output.relu_()
    if activation == "sigmoid":
        return output.sigmoid() if torch.compiler.is_compiling() else output.sigmoid_()
    return output


def activation_backward(
    dy: Tensor, saved: Tensor | None, activation: str, bias_grad: bool, in_place: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient before an activation, and the gradient of the bias; all matrices are 2-D.

    `saved` is the output of relu and sigmoid, the input of gelu and its kind, None without activation. With
    `in_place`, `dy` may be overwritten.
    """
    if activation == "none" or saved is None:
        return dy, dy.sum(0) if bias_grad else None
    if torch.compiler.is_compiling():
        dz, *dbias = torch.ops.apex.activation_backward(dy, saved, activation, bias_grad)
        return dz, dbias[0] if bias_grad else None
    return _activation_backward(dy, saved, activation, bias_grad, False, in_place)[:2]


def gelu_backward(
    dy: Tensor, input: Tensor, bias_grad: bool, activation: str = "gelu"
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients before gelu and of the bias, and gelu's output, so that it need not be saved.

    May overwrite `dy`. `activation` is gelu or another activation of its kind.
    """
    if torch.compiler.is_compiling():
        dz, *dbias, active = torch.ops.apex.activation_backward(dy, input, activation, bias_grad, True)
        return dz, dbias[0] if bias_grad else None, active
    return _activation_backward(dy, input, activation, bias_grad, True, True)  # type: ignore[return-value]


def takes_kernel(dy: Tensor, saved: Tensor) -> bool:
    """Return whether `launch_activation_backward` takes these tensors, outside of a compiled graph."""
    return dy.numel() > 0 and dy.dtype == saved.dtype and _library.runs_triton_now(FAMILY, dy)


def _activation_backward(
    dy: Tensor, saved: Tensor, activation: str, bias_grad: bool, again: bool = False, in_place: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients before an activation and of the bias, and, if `again`, the output of gelu or its kind."""
    if takes_kernel(dy, saved):
        if not dy.is_contiguous():
            dy, in_place = dy.contiguous(), True
        dz, saved = dy if in_place else torch.empty_like(dy), saved.contiguous()
        active = torch.empty_like(saved) if again else None
        rows, columns = dy.shape
        return dz, launch_activation_backward(dy, saved, dz, activation, rows, columns, bias_grad, active), active
    active = reference.activate(saved, activation) if again else None
    has_operator = activation in ("relu", "gelu", "gelu_erf")
    if dy.dtype in _HALF and (not has_operator or not dy.is_cuda):  # PyTorch would round every step
        dz, dbias, _ = _activation_backward(dy.float(), saved.float(), activation, bias_grad)
        return dz.to(dy.dtype), None if dbias is None else dbias.to(dy.dtype), active
    if activation == "relu":
        dz = torch.ops.aten.threshold_backward(dy, saved, 0)
    elif activation == "sigmoid":
        dz = torch.ops.aten.sigmoid_backward(dy, saved)
    elif activation in ("gelu", "gelu_erf"):
        dz = torch.ops.aten.gelu_backward(dy, saved, approximate="tanh" if activation == "gelu" else "none")
    else:
        dz = reference.activation_backward(dy, saved, activation)
    return dz, dz.sum(0) if bias_grad else None, active


def launch_activation_backward(
    dy: Tensor,
    saved: Tensor,
    dz: Tensor,
    activation: str,
    rows: int,
    columns: int,
    bias_grad: bool,
    active: Tensor | None = None,
) -> Tensor | None:
    """Fill `dz`, which may be `dy`, and `active` with gelu's output; return the gradient of the bias.

    All tensors lie in memory as contiguous `rows` by `columns` matrices of one dtype, whatever their dimensions.
    """
    device, dtype = dy.device, dy.dtype
    flags = (bias_grad, active is not None)
    launch, add_up, partials = _activation_launches(rows, columns, activation, flags, dtype, device)
    dbias = empty_on(device)((columns,), (1,), dtype) if bias_grad else None
    if not partials:
        launch((dy, saved, dz, active, dbias, None, None))
        return dbias
    sums = empty_on(device)((partials,), (1,), torch.float32)
    if add_up is None:
        launch((dy, saved, dz, active, sums, tickets_on(device), dbias))
    else:
        launch((dy, saved, dz, active, sums, None, None))
        add_up((sums, dbias))
    return dbias


@launch_rule
def _activation_launches(
    rows: int, columns: int, activation: str, flags: tuple[bool, bool], dtype: torch.dtype, device: torch.device
) -> tuple[Any, Any, int]:
    """Return the kernel, a second kernel for the sum of partial results if needed, and the elements of these."""
    (bias_grad, active), here = flags, facts(device)
    tile = config.activation_tile(rows, columns, active, dtype.itemsize, here)
    rows_per_program = -(-rows // (tile.rows * tile.groups)) * tile.rows
    groups, blocks = -(-rows // rows_per_program), -(-columns // tile.block)
    unions = -(-groups // UNION)
    partials = (groups + unions) * columns if bias_grad and groups > 1 else 0
    finish = UNION if partials and here.publishes_for_all and blocks * (1 + unions) <= TICKETS else 0
    launch = kernels.activation_backward.prepare(
        (blocks, groups),
        (rows, columns, rows_per_program),
        ALIGN=math.gcd(columns, 16),
        ACTIVATION=reference.ACTIVATIONS.index(activation),
        ROWS=tile.rows,
        BLOCK=tile.block,
        STAGES=tile.stages,
        FULL=columns % tile.block == 0 and rows % tile.rows == 0,
        FINISH=finish,
        num_warps=tile.num_warps,
    )
    if not partials or finish:
        return launch, None, partials
    add_up = shared_kernels.sum_bias_partials.prepare(
        (-(-columns // 64),), (groups, columns), ROWS=32, BLOCK=64, num_warps=4
    )
    return launch, add_up, partials


def wgrad_gemm_accum(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """Add d_output [..., out]^T input [..., in] to d_weight [out, in] in place, accumulating in float32.

    `d_weight` has the dtype of the others, or is float32 if they are in half precision.
    """
    input, d_output = as_rows(input), as_rows(d_output)
    if input.shape[0] != d_output.shape[0] or d_weight.shape != (d_output.shape[1], input.shape[1]):
        raise ValueError(
            f"d_weight has shape {list(d_weight.shape)}, expected [out, in] for input {list(input.shape)} and d_output "
            f"{list(d_output.shape)}, which must have as many rows"
        )
    half = input.dtype in _HALF
    if input.dtype != d_output.dtype or not (d_weight.dtype == input.dtype or (half and d_weight.dtype == torch.float)):
        raise TypeError(
            f"input is {input.dtype}, d_output {d_output.dtype} and d_weight {d_weight.dtype}; the first two must be "
            "the same, and d_weight that too, or float32 beside half precision"
        )
    if torch.compiler.is_compiling():
        torch.ops.apex.wgrad_gemm_accum(input, d_output, d_weight)
        return
    with torch.no_grad():
        _accumulate(input, d_output, d_weight)


def _accumulate(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    if d_weight.dtype == input.dtype:
        d_weight.addmm_(d_output.t(), input)
    elif _library.runs_triton(FAMILY, input) and d_weight.numel() and input.shape[0]:
        if _library.requested == "auto" and _torch_accumulates(input.device, input.dtype):
            torch.addmm(d_weight, d_output.t(), input, out_dtype=torch.float32, out=d_weight)
        elif d_weight.is_contiguous():
            launch_accumulation(input.contiguous(), d_output.contiguous(), d_weight)
        else:
            product = torch.zeros_like(d_weight, memory_format=torch.contiguous_format)
            launch_accumulation(input.contiguous(), d_output.contiguous(), product)
            d_weight += product
    else:
        d_weight.addmm_(d_output.t().to(d_weight.dtype), input.to(d_weight.dtype))


def launch_accumulation(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """Launch d_weight += d_output^T input on contiguous matrices: d_weight in float32, the others in half precision."""
    (rows, ins), outs = input.shape, d_output.shape[1]
    device = facts(input.device)
    tile = config.product_tile(outs, ins, device)
    kernels.accumulate_weight_gradient(
        (-(-outs // tile.out) * -(-ins // tile.into),),
        (d_output, input, d_weight),
        (rows, outs, ins),
        BLOCK_OUT=tile.out,
        BLOCK_IN=tile.into,
        BLOCK_ROWS=tile.rows,
        BAND=8,
        FULL=outs % tile.out == 0 and ins % tile.into == 0 and rows % tile.rows == 0,
        WIDEN=device.backend == "interpreter",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@launch_rule
def _torch_accumulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this PyTorch can add a half-precision product to a float32 matrix in one call (CUDA since 2.9)."""
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


FAMILY = _library.register_family(
    _library.OpFamily(
        "dense",
        "dense layers, gelu, MLP: gradients of activation and bias in one pass",
        small_inputs=f"PyTorch's operators below {config.SMALL:,} elements per layer of a perceptron, "
        f"{config.SMALL_BETWEEN_LAYERS:,} between dense layers",
    )
)


def _refuse_derivative(ctx, *gradients):
    raise RuntimeError(
        "the gradient of an activation has no derivative; dense_gelu_dense and mlp of apex.ops.dense have second "
        "derivatives where they are not compiled"
    )


# Operators that `torch.compile` sees beside plain matrix products.
_library.register_op(
    "activation_backward(Tensor dy, Tensor saved, str activation, bool bias_grad, bool again=False) -> Tensor[]",
    lambda *arguments: [each.contiguous() for each in _activation_backward(*arguments) if each is not None],
    lambda dy, saved, activation, bias_grad, again=False: [
        dy.new_empty(dy.shape),
        *([dy.new_empty(dy.shape[1])] if bias_grad else []),
        *([saved.new_empty(saved.shape)] if again else []),
    ],
    backward=_refuse_derivative,
)
_library.register_op(
    "wgrad_gemm_accum(Tensor input, Tensor d_output, Tensor(a!) d_weight) -> ()",
    _accumulate,
    lambda input, d_output, d_weight: None,
)
