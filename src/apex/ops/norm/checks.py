"""Bad arguments of a norm, refused in clear words before anything is touched."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks import check_optional_tensors, check_tensors
from .spec import NormSpec

# Positions within a row are 32-bit in the kernels.
LONGEST_ROW = 2**31 - 2**16


def checked_shape(
    input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> tuple[int, ...]:
    """`normalized_shape` as a tuple, after every argument was found fit."""
    shape = as_tuple(normalized_shape)
    check_tensors(input=input)
    check_optional_tensors(weight=weight, bias=bias)
    if type(input.numel()) is Tensor:  # torch.jit.trace: sizes are tensors too; PyTorch's operator checks them
        return shape
    device = input.device
    if not (
        shape
        and input.shape[-len(shape) :] == shape
        and input.is_floating_point()
        and (weight is None or _fits(weight, shape, device))
        and (bias is None or (weight is not None and _fits(bias, shape, device)))
    ):
        _explain(input, shape, weight, bias)
    return shape


def as_tuple(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """The shape of a row, as a tuple."""
    if isinstance(normalized_shape, tuple):
        return normalized_shape
    if isinstance(normalized_shape, numbers.Integral):
        return (int(normalized_shape),)
    return tuple(normalized_shape)  # type: ignore[arg-type]


def _fits(parameter: Tensor, shape: tuple[int, ...], device: torch.device) -> bool:
    return parameter.shape == shape and parameter.device == device and parameter.is_floating_point()


def _explain(input: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> None:
    """Raises the error that says which argument does not fit."""
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"normalized_shape={list(shape)} must be the trailing dimensions of the input, whose shape is "
            f"{list(input.shape)}"
        )
    if not input.is_floating_point():
        raise TypeError(f"a norm needs a floating-point input, got {input.dtype}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if tuple(parameter.shape) != shape:
            raise ValueError(f"{name} has shape {list(parameter.shape)}, expected normalized_shape={list(shape)}")
        if parameter.device != input.device:
            raise ValueError(f"{name} is on {parameter.device}, the input on {input.device}")
        if not parameter.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {parameter.dtype}")
    raise ValueError("a bias needs a weight beside it")


def check_backward(dy: Tensor, saved: Tensor, statistics: Tensor, spec: NormSpec) -> None:
    """Refuses a gradient and statistics that do not belong to `saved`."""
    if dy.shape != saved.shape or dy.device != saved.device:
        raise ValueError(
            f"the gradient has shape {list(dy.shape)} on {dy.device}, the saved tensor {list(saved.shape)} on "
            f"{saved.device}"
        )
    rows = saved.numel() // max(1, spec.row_length)
    fewest = 2 if spec.subtract_mean and not spec.from_output else 1
    if (
        statistics.dim() != 2
        or statistics.shape[0] < fewest
        or statistics.shape[1] != rows
        or statistics.device != saved.device
    ):
        raise ValueError(
            f"the statistics have shape {list(statistics.shape)} on {statistics.device}, expected {fewest} for each of "
            f"{rows} rows on {saved.device}"
        )


def joined_statistics(mean: Tensor | None, rstd: Tensor, saved: Tensor, spec: NormSpec) -> Tensor:
    """The one tensor that the norms use, from statistics that a caller has apart."""
    needs_mean = spec.subtract_mean and not spec.from_output
    if needs_mean and mean is None:
        raise ValueError("the mean of each row is needed to differentiate a layer norm from its input")
    rows = saved.numel() // max(1, spec.row_length)
    for name, statistic in (("mean", mean if needs_mean else None), ("reciprocal deviation", rstd)):
        if statistic is not None and (statistic.numel() != rows or statistic.device != saved.device):
            raise ValueError(
                f"the {name} has shape {list(statistic.shape)} on {statistic.device}, expected one value for each of "
                f"{rows} rows on {saved.device}"
            )
    if mean is None or not needs_mean:
        return rstd.reshape(1, -1)
    whole = rstd._base
    if (
        whole is not None
        and whole is mean._base
        and whole.shape == (2, rows)
        and [row.data_ptr() for row in whole] == [rstd.data_ptr(), mean.data_ptr()]
    ):
        return whole  # as `norm_forward` gave them
    return torch.stack((rstd.reshape(-1), mean.reshape(-1)))


def check_row_length(shape: Sequence[int]) -> int:
    """Elements per row, if the kernels can address them."""
    row_length = math.prod(shape)
    if row_length > LONGEST_ROW:
        raise ValueError(f"a row of {row_length} elements is too long for the kernels; APEX_IMPL=torch takes it")
    return row_length
