"""Layer norm and RMS norm over trailing dimensions, with optional weight and bias of any floating dtype.

A tensor is treated as `rows` x `row_length`. Statistics are float32: the reciprocal deviation of each row and, for
layer norm, in a second line, its mean.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._checks import check_parameters, check_tensors
from .._device import contiguous_strides, empty_on, facts, launch_rule
from .._op import Derivative, Kernels, Op, Saved
from . import config, reference

kernels_forward = _library.LazyModule(f"{__package__}.kernels_forward")
kernels_backward = _library.LazyModule(f"{__package__}.kernels_backward")
kernels_sums = _library.LazyModule(f"{__package__}.kernels_sums")

# Positions within a row are 32-bit in the kernels.
LONGEST_ROW = 2**31 - 2**16


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the layer norm over the trailing `normalized_shape`, computed in float32.

    The output has `out_dtype` (default: the input's dtype). `memory_efficient` saves the output for the backward pass
    instead of the input, so that the input can be freed.
    """
    return _norm(input, normalized_shape, weight, bias, eps, True, memory_efficient, out_dtype)


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    memory_efficient: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the RMS norm over the trailing `normalized_shape`; arguments as for `layer_norm`."""
    return _norm(input, normalized_shape, weight, None, eps, False, memory_efficient, out_dtype)


def _norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    subtract_mean: bool,
    memory_efficient: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    shape = checked_shape(input, normalized_shape, weight, bias)
    dtype, numel = input.dtype, input.numel()
    out_dtype = out_dtype or dtype
    # torch.jit.trace, which makes sizes tensors, sees operators, not kernel launches. An exported program contains
    # PyTorch's operators, which ONNX knows and which run without apex. Compiled code contains them too if the kernels
    # would need a copy of the input: Inductor reads it in place (a ConvNeXt block of 96x384x14x14 in 819 us, with a
    # copy 921).
    compiling = torch.compiler.is_compiling()
    if type(numel) is Tensor or not numel or (compiling and (reference.is_exporting() or not input.is_contiguous())):
        return reference.torch_norm(input, shape, weight, bias, eps, subtract_mean, out_dtype)
    own_node = memory_efficient and torch.is_grad_enabled()
    if own_node or numel >= config.NATIVE_BELOW or _library.requested != "auto":
        arguments = (input, weight, bias, _row_length(shape), eps, subtract_mean, memory_efficient, out_dtype, dtype)
        if own_node:
            return NORM.differentiable(*arguments)
        output = NORM.with_kernels(arguments)
        if output is not None:
            return output
    return reference.torch_norm(input, shape, weight, bias, eps, subtract_mean, out_dtype)


def forward_and_save(
    ctx: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float,
    memory_efficient: bool,
    subtract_mean: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Run as the forward of every norm's autograd Function that clients know by name."""
    row_length = _row_length(checked_shape(input, normalized_shape, weight, bias))
    settings = (row_length, eps, subtract_mean, memory_efficient, out_dtype, input.dtype)
    return NORM.forward_and_save(ctx, input, weight, bias, *settings)


def checked_shape(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> tuple[int, ...]:
    """Return `normalized_shape` as a tuple; raise if an argument does not fit."""
    if type(input) not in _library.PLAIN:
        check_tensors(input=input)
    if isinstance(normalized_shape, tuple):
        shape = normalized_shape
    elif isinstance(normalized_shape, numbers.Integral):
        shape = (int(normalized_shape),)
    else:
        if isinstance(normalized_shape, Tensor) or not hasattr(normalized_shape, "__iter__"):
            kind = type(normalized_shape).__name__
            raise TypeError(f"normalized_shape must be an integer or a list of integers, got {kind}")
        shape = tuple(normalized_shape)  # type: ignore[arg-type]
    sizes = input.shape
    if sizes and type(sizes[-1]) is Tensor:  # in torch.jit.trace; PyTorch's operator checks them
        return shape
    if not shape or tuple(sizes)[-len(shape) :] != shape:  # slicing a torch.Size takes three times as long
        raise ValueError(
            f"normalized_shape={list(shape)} must be the trailing dimensions of the input, whose shape is {list(sizes)}"
        )
    if input.dtype not in _library.TRITON_DTYPES and not input.dtype.is_floating_point:
        raise TypeError(f"a norm needs a floating-point input, got {input.dtype}")
    device = input.device
    for parameter in (weight, bias):
        if parameter is not None and (
            type(parameter) not in _library.PLAIN
            or parameter.dtype not in _library.TRITON_DTYPES
            or parameter.shape != shape
            or parameter.device != device
        ):
            check_parameters(input, shape, weight=weight, bias=bias)
    if bias is not None and weight is None:
        raise ValueError("a bias needs a weight beside it")
    return shape


def _row_length(shape: Sequence[int]) -> int:
    """Return the elements per row; raise if the kernels cannot address them."""
    row_length = math.prod(shape)
    if row_length > LONGEST_ROW:
        raise ValueError(f"a row of {row_length} elements is too long for the kernels; APEX_IMPL=torch takes it")
    return row_length


def joined_statistics(
    mean: Tensor | None, rstd: Tensor, saved: Tensor, row_length: int, subtract_mean: bool, from_output: bool
) -> Tensor:
    """Return mean and reciprocal deviation, which a caller has in separate tensors, as one tensor."""
    needs_mean = subtract_mean and not from_output
    if needs_mean and mean is None:
        raise ValueError("the mean of each row is needed to differentiate a layer norm from its input")
    rows = saved.numel() // max(1, row_length)
    for name, statistic in (("mean", mean if needs_mean else None), ("reciprocal deviation", rstd)):
        if statistic is not None and (statistic.numel() != rows or statistic.device != saved.device):
            raise ValueError(
                f"the {name} has shape {list(statistic.shape)} on {statistic.device}, expected one value for each of "
                f"{rows} rows on {saved.device}"
            )
    lines = [rstd.reshape(-1), mean.reshape(-1)] if needs_mean and mean is not None else [rstd.reshape(-1)]
    return torch.stack(lines).to(torch.float64 if saved.dtype == torch.float64 else torch.float32)


def launch_forward(input: Tensor, weight: Tensor | None, bias: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
    """Return output and statistics, as `reference.forward` does."""
    row_length, eps, subtract_mean, _, out_dtype, input_dtype = settings
    device = input.device
    dtypes = (input_dtype, out_dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    launches = _forward_launch(input.shape, row_length, dtypes, subtract_mean, device)
    empty = empty_on(device)
    output = empty(launches.shape, launches.strides, out_dtype)
    statistics = empty(launches.statistics, launches.statistics_strides, torch.float32)
    added = (None, None, None) if launches.rows else ()
    launches.main((input, weight, bias, *added, output, statistics), (eps,))
    return output, statistics


class ForwardLaunch(NamedTuple):
    """The prepared kernel of a forward pass, without tensors and eps, and layouts of output and statistics."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    statistics: tuple[int, int]
    statistics_strides: tuple[int, int]
    main: Any
    rows: bool  # whether the kernel is `norm_forward_rows`, which can add a residual


@launch_rule
def _forward_launch(
    shape: tuple[int, ...],
    row_length: int,
    dtypes: tuple[Any, ...],
    subtract_mean: bool,
    device: torch.device,
) -> ForwardLaunch:
    dtype, out_dtype, *_ = dtypes
    rows = math.prod(shape) // row_length
    chosen = config.forward_config(rows, row_length, dtype.itemsize, subtract_mean, facts(device))
    flags: dict[str, Any] = {"ALIGN": math.gcd(16, row_length), "SUBTRACT_MEAN": subtract_mean}
    flags |= {"BLOCK": chosen.block, "num_warps": chosen.num_warps}
    if chosen.rows_per_program:
        launch = kernels_forward.norm_forward_rows.prepare(
            (-(-rows // chosen.rows_per_program),),
            (rows, row_length),
            ROWS=chosen.rows_per_program,
            FULL=config.unmasked(chosen, rows, row_length),
            **flags,
        )
    else:
        launch = kernels_forward.norm_forward_long.prepare(
            (rows,),
            (row_length,),
            FULL=row_length % chosen.block == 0,
            STREAM=rows * row_length * out_dtype.itemsize >= config.STREAMED,
            **flags,
        )
    shape = tuple(shape)
    whole_rows = chosen.rows_per_program > 0
    return ForwardLaunch(shape, contiguous_strides(shape), (1 + subtract_mean, rows), (rows, 1), launch, whole_rows)


def launch_backward(
    dy: Tensor, saved: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, *settings: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias, as `reference.backward` does.

    Each program writes partial sums of the gradients of weight and bias, and a second kernel sums them.
    """
    row_length, _, subtract_mean, from_output, _, input_dtype, wanted = settings
    device, weight_dtype = saved.device, None if weight is None else weight.dtype
    bias_dtype = None if bias is None else bias.dtype
    param_grads = weight is not None and (wanted[1] or wanted[2])
    dtypes = (saved.dtype, dy.dtype, input_dtype, weight_dtype, bias_dtype)
    flags = (subtract_mean, from_output, param_grads)
    launches = _backward_launches(saved.shape, row_length, dtypes, flags, device)
    empty = empty_on(device)
    dx = empty(launches.shape, launches.strides, input_dtype)
    partials = dweight = dbias = None
    if param_grads:
        sizes = tuple(weight.shape)  # type: ignore[union-attr]
        strides = (1,) if len(sizes) == 1 else contiguous_strides(sizes)
        dweight = empty(sizes, strides, weight_dtype)  # type: ignore[arg-type]
        dbias = None if bias_dtype is None else empty(sizes, strides, bias_dtype)
        partials = empty((launches.partials,), (1,), torch.float32)
    tensors, limit = (dy, saved, weight, bias, statistics), launches.limit
    if launches.kind == "rows":
        launches.main((*tensors, None, dx, partials), limit)
    elif launches.kind == "columns":
        rows = saved.numel() // row_length
        row_means = empty((2, rows), (rows, 1), torch.float32)
        launches.row_means((*tensors, row_means), limit)
        launches.main((*tensors, row_means, dx, partials), limit)
    else:
        launches.main((*tensors, dx, partials), limit)
    if launches.sums is not None:
        launches.sums((partials, dweight, dbias, None))
    return dx, dweight, dbias


class BackwardLaunches(NamedTuple):
    """The prepared kernels of a backward pass, without their tensors."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: str
    partials: int  # elements of memory for partial sums of the gradients of weight and bias
    limit: tuple[float]  # largest absolute value that a normalised value can have
    main: Any
    row_means: Any = None  # launched before the main kernel
    sums: Any = None  # launched last, for the sums of the partial sums


@launch_rule
def _backward_launches(
    shape: tuple[int, ...], row_length: int, dtypes: tuple[Any, ...], flags: tuple[bool, ...], device: torch.device
) -> BackwardLaunches:
    (dtype, *_, bias_dtype), (subtract_mean, from_output, param_grads, *has_added) = dtypes, flags
    has_bias = bias_dtype is not None
    kinds = 1 + has_bias + sum(has_added)
    shape, rows, here = tuple(shape), math.prod(shape) // row_length, facts(device)
    chosen = config.backward_config(rows, row_length, dtype.itemsize, has_bias and param_grads, here)
    sizes, align = (rows, row_length), math.gcd(16, row_length)
    common: dict[str, Any] = {"ALIGN": align, "SUBTRACT_MEAN": subtract_mean, "FROM_OUTPUT": from_output}
    # With a residual one tensor more is loaded ahead, for which five stages have no shared memory.
    stages = min(3, chosen.num_stages) if has_added else chosen.num_stages
    main = {**common, "BLOCK": chosen.block, "num_warps": chosen.num_warps, "num_stages": stages}
    row_means = sums = None
    if chosen.kind == "rows":
        launch = kernels_backward.norm_backward_rows.prepare(
            (chosen.programs if param_grads else config.plain_programs(chosen, rows),),
            sizes,
            ROWS=chosen.rows_per_program,
            FULL=config.unmasked(chosen, rows, row_length),
            STAGES=chosen.num_stages,
            FOLD=config.folds(chosen, row_length, dtype.itemsize, here),
            ADDED=any(has_added),
            **main,
        )
    elif chosen.kind == "wide":
        launch = kernels_backward.norm_backward_wide.prepare(
            (chosen.programs,),
            sizes,
            CHUNKS=chosen.chunks,
            HELD=chosen.held,
            FULL=row_length == chosen.block * chosen.chunks,
            **main,
        )
    elif chosen.kind == "held":
        launch = kernels_backward.norm_backward_held.prepare(
            (chosen.programs,),
            sizes,
            FULL=row_length == chosen.block,
            STAGES=chosen.num_stages,
            NVIDIA=here.backend == "cuda",
            **main,
        )
    else:
        row_means = kernels_backward.norm_backward_row_means.prepare(
            (rows,), (row_length,), **common, BLOCK=4096, num_warps=2 * chosen.num_warps
        )
        launch = kernels_backward.norm_backward_columns.prepare(
            (-(-row_length // chosen.block), chosen.programs), sizes, ROWS=chosen.rows_per_program, **main
        )
    if param_grads:
        block = 16 if here.backend != "interpreter" else 256  # the interpreter takes as long for a program of any size
        sums = kernels_sums.sum_partials.prepare(
            (-(-row_length // block), kinds),
            (chosen.programs, row_length),
            ALIGN=align,
            ROWS=256,  # nearly all in one step: 2 us less than 64 by 32 at 16384x1024, no more elsewhere
            BLOCK=block,
            num_warps=4,
        )
    elements, limit = chosen.programs * row_length * kinds, (math.sqrt(row_length),)
    return BackwardLaunches(shape, contiguous_strides(shape), chosen.kind, elements, limit, launch, row_means, sums)


def _save(arguments: tuple, results: tuple) -> tuple:
    input, weight, bias, *_ = arguments
    from_output = arguments[6]
    return results[0] if from_output else input, weight, bias, results[1]


def _fake(input, weight, bias, row_length, eps, subtract_mean, from_output, out_dtype, input_dtype):  # type: ignore[no-untyped-def]
    rows = input.numel() // max(1, row_length)
    statistics = input.new_empty((2 if subtract_mean else 1, rows), dtype=_library.compute_dtype(input))
    return input.new_empty(input.shape, dtype=out_dtype), statistics


def _backward_fake(dy, saved, weight, bias, statistics, *settings):  # type: ignore[no-untyped-def]
    *_, input_dtype, wanted = settings
    dx = saved.new_empty(saved.shape, dtype=input_dtype) if wanted[0] else None
    return dx, *(p.new_empty(p.shape) if asked else None for p, asked in zip((weight, bias), wanted[1:], strict=True))


def _no_second_derivative(row_length, eps, subtract_mean, from_output, *dtypes) -> str | None:  # type: ignore[no-untyped-def]
    if not from_output:
        return None
    return (
        "memory_efficient=True keeps only the output of the norm, which is not enough for a second derivative; use "
        "memory_efficient=False where create_graph=True is needed"
    )


FAMILY = _library.register_family(
    _library.OpFamily(
        "norm",
        "layer norm and RMS norm, forward and backward",
        small_inputs=f"PyTorch's operator below {config.NATIVE_BELOW:,} elements",
    )
)


NORM = Op(
    FAMILY,
    "norm(Tensor input, Tensor? weight, Tensor? bias, int row_length, float eps, bool subtract_mean, bool from_output, "
    "ScalarType out_dtype, ScalarType input_dtype) -> (Tensor output, Tensor statistics)",
    reference=reference.forward,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=_fake,
    saved=Saved("saved", "weight", "bias", "statistics", choose=_save),
    derivative=Derivative(backward=reference.backward, shapes=_backward_fake, once=_no_second_derivative),
)
