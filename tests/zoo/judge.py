"""Errors of one step of a model: by `torch.autocast` and by `apex.boost`, against the same step in float32.

The error of a loss is relative. The error of the gradients is the 2-norm of all differences, divided by the 2-norm of
all gradients in float32. Both are root mean squares over several seeds, which choose weights and inputs: the error of
one loss is one random number, and the ratio of two says little. The experts that tokens are sent to differ by rounding.
"""

from __future__ import annotations

import functools
import gc
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import apex
from apex.booster import _shorthand

from .cases import Case, Entry

# "bf16" as on an accelerator, where a model computes with half-precision copies of its weights.
COPIES = "bf16 copies"
PRECISIONS = ("bf16", COPIES, "fp8", "fp16")
JUDGED = ("bf16", COPIES)
# The error of a boosted step may be so many times autocast's, plus a constant.
LOSS_BAR, GRADIENT_BAR = (2.0, 1e-4), (1.7, 1e-3)
SEEDS, _MORE = 3, 4  # a row that misses a bar has so many times more
_SKIPPED_STEPS = 20  # from 2^16 to the smallest loss scale, and some more
_FIRST_CALLS = 4  # calls before the one that is judged, which find the weights to make half-precision copies of


class Result(NamedTuple):
    """The loss of a step and the gradients of parameters by name, all in float64."""

    loss: float
    gradients: dict[str, Tensor]


class _DrawsInFloat32(TorchFunctionMode):
    """Random numbers like a half-precision tensor are those of float32, rounded.

    PyTorch draws other numbers in other dtypes, and errors of a step with other noise say nothing.
    """

    LIKE = (torch.randn_like, torch.rand_like)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in self.LIKE:
            dtype = kwargs.get("dtype") or args[0].dtype
            return function(*args, **{**kwargs, "dtype": torch.float32}).to(dtype)
        return function(*args, **kwargs)


def judge(entry: Entry, device: str, precisions: tuple[str, ...] = PRECISIONS, seeds: int = SEEDS) -> dict[str, Any]:
    """Return the errors of an entry: {"autocast": {"loss": 1e-4, "gradient": 4e-3}, "bf16": {"error": "..."}, ...}.

    An error that is not finite is None. An entry that does not run in float32 has only "absent", with the reason. A
    row that misses a bar is judged again with more seeds, because the ratio of errors of a few is random.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    row: dict[str, Any] = {}
    for seed in range(_MORE * seeds):
        try:
            truth = _step(entry, device, seed, _plain)
            _check(truth)
        except Exception as error:
            return {"absent": _one_line(error)}
        row |= {"seeds": seed + 1, "truth": {"loss": truth.loss, "tensors": len(truth.gradients)}}
        for name in ("autocast", *precisions):
            if "error" in row.get(name, {}) or (seed >= seeds and name not in ("autocast", *JUDGED)):
                continue
            try:
                way = _autocast if name == "autocast" else _boosted(name)
                pairs.setdefault(name, []).append(_errors(_step(entry, device, seed, way), truth))
                row[name] = _root_mean_squares(pairs[name])
            except Exception as error:
                row[name] = {"error": _one_line(error)}
        if seed + 1 >= seeds and not any(set(misses(row, name)) - {"raises"} for name in precisions):
            break
    gc.collect()
    return row


def _root_mean_squares(pairs: list[tuple[float, float]]) -> dict[str, float | None]:
    loss, gradient = (math.sqrt(sum(value**2 for value in each) / len(each)) for each in zip(*pairs, strict=True))
    return {"loss": _rounded(loss), "gradient": _rounded(gradient)}


def misses(row: dict[str, Any], precision: str) -> list[str]:
    """Return which bars a row misses in a precision: "raises", "loss", "gradient"."""
    autocast, boosted = row.get("autocast", {}), row.get(precision, {})
    if "error" in autocast or not autocast or not boosted:
        return []
    if "error" in boosted:
        return ["raises"]
    if precision not in JUDGED:
        return []
    missed = []
    for name, (times, more) in (("loss", LOSS_BAR), ("gradient", GRADIENT_BAR)):
        if autocast[name] is not None and (boosted[name] is None or boosted[name] > times * autocast[name] + more):
            missed.append(name)
    return missed


def _step(entry: Entry, device: str, seed: int, way: Callable[..., Result]) -> Result:
    """Make a case, the same for each way, and return the result of a step."""
    _seed(seed)
    case = entry.make()
    model = case.model.train()
    _without_dropout(model)
    _fill_zeros(model)
    model.to(device)
    inputs = _moved(case.inputs, torch.device(device))
    with _DrawsInFloat32():
        return way(Case(model, inputs, case.loss), device, lambda: _seed(seed + 1000))


def _plain(case: Case, device: str, reseed: Callable[[], None]) -> Result:
    reseed()
    loss = case.loss(case.model, *case.inputs)
    loss.backward()
    return _result(loss, case.model)


def _autocast(case: Case, device: str, reseed: Callable[[], None]) -> Result:
    reseed()
    with torch.autocast(device, torch.bfloat16):
        loss = case.loss(case.model, *case.inputs)
    loss.backward()
    return _result(loss, case.model)


def _boosted(precision: str) -> Callable[..., Result]:
    """Return the way of a user of `apex.boost`: a decorated step, whose gradients are read before they are used.

    "fp8" leaves linear layers in bfloat16 that are too small to become quicker; here none is too small.
    """

    def way(case: Case, device: str, reseed: Callable[[], None]) -> Result:
        optimizer: Any = torch.optim.AdamW(case.model.parameters(), lr=0.0, weight_decay=0.0)
        has_copies = precision == COPIES or (_shorthand._runs_on_accelerator(device) and precision != "fp16")
        first_calls = _FIRST_CALLS if has_copies else 0
        with (
            mock.patch.object(apex.fp8, "convert", functools.partial(apex.fp8.convert, smallest_weight=1)),
            mock.patch.object(_shorthand, "_runs_on_accelerator", return_value=has_copies),
        ):
            model, optimizer, step = apex.boost(case.model, optimizer, precision.split()[0], device=device)
        found: list[Result] = []

        @step
        def train_step(*inputs: Any) -> Tensor:
            loss = case.loss(model, *inputs)
            optimizer.zero_grad()
            optimizer.backward(loss)
            scale = getattr(optimizer, "scaler", None)
            found.append(_result(loss, model, 1.0 if scale is None else float(scale.get_scale())))
            optimizer.step()
            return loss

        before = {name: buffer.clone() for name, buffer in case.model.named_buffers()}
        for call in range(_SKIPPED_STEPS):
            reseed()
            train_step(*case.inputs)
            # A step whose gradients overflow is skipped, and lowers the loss scale.
            is_finite = all(grad.isfinite().all() for grad in found[-1].gradients.values())
            if call >= first_calls and (precision != "fp16" or is_finite):
                break
            for name, buffer in case.model.named_buffers():
                if name in before and before[name].shape == buffer.shape:  # some are made in the first call
                    buffer.data.copy_(before[name])
        return found[-1]

    return way


def _result(loss: Tensor, model: nn.Module, scale: float = 1.0) -> Result:
    named = ((name, param.grad) for name, param in model.named_parameters())
    gradients = {name: _float64(grad).div(scale) for name, grad in named if grad is not None}
    return Result(float(loss.detach()), gradients)


def _float64(grad: Tensor) -> Tensor:
    grad = grad.detach()
    grad = grad.to_dense() if grad.layout != torch.strided else grad
    grad = torch.view_as_real(grad) if grad.is_complex() else grad
    return grad.to("cpu", torch.float64)


def _check(truth: Result) -> None:
    """Raise if the numbers of a step in float32 are no measure for others."""
    if not math.isfinite(truth.loss) or not all(grad.isfinite().all() for grad in truth.gradients.values()):
        raise ArithmeticError(f"not finite in float32, loss {truth.loss}")
    if truth.loss == 0 or _norm(truth.gradients.values()) == 0:
        raise ArithmeticError("loss or gradients are zero in float32")


def _errors(result: Result, truth: Result) -> tuple[float, float]:
    if result.gradients.keys() - truth.gradients.keys():
        raise KeyError(f"gradients of other names: {sorted(result.gradients.keys() - truth.gradients.keys())[:3]}")
    # A parameter without a gradient has a gradient of zeros, as optimizers see it.
    differences = (
        grad if name not in result.gradients else result.gradients[name] - grad
        for name, grad in truth.gradients.items()
    )
    error = _norm(differences) / _norm(truth.gradients.values())
    return abs(result.loss - truth.loss) / abs(truth.loss), error


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def _rounded(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy

        numpy.random.seed(seed)
    except ImportError:
        pass


def _without_dropout(model: nn.Module) -> None:
    """Set the rates of all layers of dropout to zero: masks of other dtypes would differ."""
    for module in model.modules():
        kind = type(module).__name__.lower()
        if "drop" in kind or kind == "stochasticdepth":
            for name in ("p", "drop_prob"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0


@torch.no_grad()
def _fill_zeros(model: nn.Module) -> None:
    """Put small numbers into parameters that are all zero: behind a gate of zeros a model computes nothing."""
    for param in model.parameters():
        if param.is_floating_point() and param.numel() and not param.any():
            param.copy_(torch.randn(param.shape) * 0.02)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(each, device) for each in value)
    return value
