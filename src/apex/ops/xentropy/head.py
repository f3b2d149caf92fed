"""Settings of a linear head, the checks of its arguments, and the outputs per row that callers ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._checks import check_floats, check_optional_tensors, check_parameters, check_tensors
from .op import check_labels
from .rows import exchange_of

# Logits of this many bytes are kept for the backward pass unless the caller sets another limit.
KEPT_BYTES = 2 << 30


class Head(NamedTuple):
    """Settings of a linear head; `compute` is the dtype of input and weight in matrix products.

    `transform` is the scale of the logits, their cap (0: none) and the temperature. `group` is the name of the process
    group that shares the classes, or empty. Logits are kept for the backward pass if they take at most `kept_bytes`.
    """

    transform: tuple[float, float, float]
    ignore_index: int
    compute: torch.dtype
    accumulation_dtype: torch.dtype | None
    chunk_rows: int | None
    group: str
    sequence_parallel: bool
    kept_bytes: float
    smoothing: float
    differentiable: bool

    def cast(self, *tensors: Tensor | None) -> list[Any]:
        """Return tensors in the dtype of the matrix products; None stays None."""
        return [None if tensor is None else tensor.to(self.compute) for tensor in tensors]


class TokenOutputs(NamedTuple):
    """Values of each row of a linear head, in float32 (float64 for float64 inputs); zero for ignored rows.

    `log_probs` is the log-probability of the target, `entropy` the entropy of the softmax, `log_sum_sq_probs` the log
    of the sum of squared probabilities, `mean_logits` the mean over the classes, `lse` the log of the sum of
    exponentials. `argmax` (int64) is the first class with the greatest logit, and `is_top1` is one if the target is
    that class. Values that were not requested are None.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    argmax: Tensor | None = None
    lse: Tensor | None = None


_STATISTICS = {
    "log_probs": ("lse", "own"),
    "entropy": ("lse", "entropy"),
    "log_sum_sq_probs": ("squares",),
    "mean_logits": ("mean",),
    "is_top1": ("top",),
    "argmax": ("top",),
    "lse": ("lse",),
}


def needed_statistics(outputs: Sequence[str], group: str) -> list[str]:
    """Return the names of the statistics that the outputs are made of."""
    names = list(dict.fromkeys(name for output in outputs for name in _STATISTICS[output]))
    return [*names, "peak"] if group and "top" in names else names  # ranks compare their greatest logits


def token_outputs(
    outputs: Sequence[str], table: Tensor, names: Sequence[str], top: Tensor, target: Tensor, ignore_index: int
) -> TokenOutputs:
    """Return the outputs from the table of statistics, in the shape of `target`."""
    found = {name: row.reshape(target.shape) for name, row in zip(names, table, strict=True)}
    ignored = target == ignore_index
    result: dict[str, Tensor] = {}
    for output in outputs:
        if output == "log_probs":
            value = found["own"] - found["lse"]
        elif output == "log_sum_sq_probs":
            value = found["squares"].detach().masked_fill(ignored, 1.0).log()
        elif output == "mean_logits":
            value = found["mean"].detach()
        elif output == "is_top1":
            value = (top.reshape(target.shape) == target).to(table.dtype).masked_fill(ignored, 0.0)
        elif output == "argmax":
            value = top.reshape(target.shape)
        else:
            value = found[output] if output == "entropy" else found[output].detach()
        result[output] = value
    return TokenOutputs(**result)


def make_head(
    input: Tensor,
    ignore_index: int,
    logit_scale: float,
    softcap: float | None,
    temperature: float,
    accumulation_dtype: torch.dtype | None,
    chunk_rows: int | None,
    group: Any,
    sequence_parallel: bool,
    keep_logits: str | bool | int,
    smoothing: float = 0.0,
) -> Head:
    """Return the settings of a head; raise for values that are not accepted."""
    check_tensors(input=input)
    for name, value in (("logit_scale", logit_scale), ("temperature", temperature), ("softcap", softcap)):
        size = value if value is None or name != "logit_scale" else abs(value)
        if size is not None and not 0.0 < size < math.inf:  # `math.isfinite` of a traced number breaks a graph
            accepted = "finite and not zero" if name == "logit_scale" else "a positive number"
            raise ValueError(f"{name}={value} must be {accepted}")
    if keep_logits == "auto":
        kept: float = KEPT_BYTES
    elif isinstance(keep_logits, bool):
        kept = math.inf if keep_logits else 0
    elif isinstance(keep_logits, int) and keep_logits >= 0:
        kept = keep_logits
    else:
        raise ValueError(f'keep_logits={keep_logits!r} must be "auto", a bool or a number of bytes')
    compute = _library.autocast_dtype(input) or input.dtype
    if input.dtype == torch.float64:
        compute = torch.float64
    return Head(
        (float(logit_scale), float(softcap or 0.0), float(temperature)),
        ignore_index,
        compute,
        accumulation_dtype,
        chunk_rows,
        "" if group is None else group if isinstance(group, str) else group.group_name,
        sequence_parallel,
        kept,
        float(smoothing),
        torch.is_grad_enabled(),
    )


def check_head(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    outputs: Sequence[str],
    head: Head,
) -> None:
    """Raise for arguments that do not fit together."""
    check_tensors(weight=weight, target=target)
    check_optional_tensors(bias=bias, class_weight=class_weight)
    unknown = [output for output in outputs if output not in _STATISTICS]
    if isinstance(outputs, str) or unknown:
        raise ValueError(f"outputs {outputs!r} must be a sequence of {', '.join(_STATISTICS)}")
    if head.chunk_rows is not None and head.chunk_rows < 1:
        raise ValueError(f"chunk_rows={head.chunk_rows} must be at least 1")
    if head.accumulation_dtype is not None and not head.accumulation_dtype.is_floating_point:
        raise TypeError(f"accumulation_dtype must be floating-point, got {head.accumulation_dtype}")
    if input.dim() < 1 or weight.dim() != 2 or weight.shape[1] != input.shape[-1] or not weight.shape[0]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}, expected [classes, {input.shape[-1] if input.dim() else '?'}] for "
            f"input of shape {list(input.shape)}"
        )
    expected = list(input.shape[:-1])
    if head.sequence_parallel:
        if not head.group:
            raise ValueError("sequence_parallel=True needs a process group")
        if not expected:
            raise ValueError("sequence_parallel=True needs an input with rows")
        expected[0] *= exchange_of(head.group).ranks  # type: ignore[union-attr]
    if list(target.shape) != expected:
        raise ValueError(f"target has shape {list(target.shape)}, expected {expected} as the input's rows")
    check_labels(target, input.device, head.smoothing)
    check_floats(input=input)
    check_parameters(input, weight.shape, weight=weight)
    check_parameters(input, weight.shape[:1], bias=bias)
    if class_weight is not None:
        # With a process group, class weights are of all ranks' classes, whose number this rank does not know.
        shape = class_weight.shape if head.group and class_weight.dim() == 1 else weight.shape[:1]
        check_parameters(input, shape, class_weight=class_weight)
        if class_weight.requires_grad:
            raise ValueError("class_weight requires a gradient, which this loss does not compute: detach it")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype != input.dtype and _library.autocast_dtype(input) is None:
            raise TypeError(f"{name} is {parameter.dtype}, the input {input.dtype}; outside autocast they must agree")


def localised(input: Any, weight: Any, bias: Any, group: Any) -> tuple[Tensor, Tensor, Tensor | None, Any]:
    """Return plain tensors and the process group for a head that is a DTensor; other heads as they are.

    If the input is a DTensor too, or a group is given, each rank computes with its own classes (tensor parallelism).
    Otherwise ranks have different rows (FSDP): each gathers the whole head, and the gradients are summed.
    """
    if type(weight).__name__ != "DTensor":
        return input, weight, bias, group
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 and (group is not None or isinstance(input, DTensor)):
        raise ValueError(f"a tensor-parallel head must lie on a mesh of one dimension, got {mesh}")
    if group is None and not isinstance(input, DTensor):
        everywhere = [Replicate()] * mesh.ndim
        summed = [Partial()] * mesh.ndim
        whole = weight.redistribute(placements=everywhere).to_local(grad_placements=summed)
        if isinstance(bias, DTensor):
            bias = bias.redistribute(placements=everywhere).to_local(grad_placements=summed)
        return input, whole, bias, None
    if placements != (Shard(0),):
        raise ValueError(f"a tensor-parallel head must be Shard(0), got {list(placements)}")
    if isinstance(bias, DTensor):
        bias = bias.redistribute(placements=placements).to_local()
    if isinstance(input, DTensor):
        if input.placements != (Replicate(),):
            raise ValueError(f"the input of a tensor-parallel head must be Replicate(), got {list(input.placements)}")
        input = input.to_local(grad_placements=[Replicate()])
    return input, weight.to_local(), bias, group or mesh.get_group()
