"""Conversion of a model's linear layers to float8 products, and the reasons why some layers stay unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._arguments import Index, checked
from ..ops import float8
from .gather import gather_as_usual, gather_in_float8
from .linear import LAYERS, check_scaling, linear, make_history, size_divisor

# For weights with fewer elements, the casts take longer than the products save.
SMALLEST_WEIGHT = 2**21


class Converted(NamedTuple):
    """A weight that `convert` examined; `reason` says why its layer was not converted, and is empty if it was.

    `name` is the layer's name, or the weight's name if the layer has several weights.
    """

    name: str
    in_features: int
    out_features: int
    reason: str


@checked
def convert(
    model: nn.Module,
    scaling: str = "tensorwise",
    *,
    choose: Callable[[str, nn.Module], bool] | None = None,
    smallest_weight: Index = SMALLEST_WEIGHT,
    power_of_2: bool = False,
    gradients: str | None = None,
    float8_all_gather: bool = False,
    emulate: bool = False,
) -> list[Converted]:
    """Make the linear layers of `model` multiply in float8, in place, and return the outcome for each of them.

    `scaling` is "tensorwise" (fastest), "rowwise" (a scale per row), "blockwise" (a scale per 128 numbers, and per 128
    x 128 of a weight; with `power_of_2` powers of two), "delayed" (scales from earlier steps) or "mxfp8" (a power of
    two per 32 numbers, only with `emulate`). Linear layers are torch.nn.Linear, the layers of apex.fused_dense and the
    two of apex.transformer.tensor_parallel. A layer is not converted if a size is no multiple of 16 (of 128 for
    "blockwise", 32 for "mxfp8"), if a weight has fewer than `smallest_weight` elements, or if `choose(name, layer)` is
    false, for example for an output layer. Parameters, hooks and state dict are not changed. `gradients` is the format
    of outputs' gradients, "e4m3" or "e5m2"; by default e5m2 if a matrix has one scale, else e4m3.

    Call it before `fully_shard`. With `float8_all_gather` FSDP2 then gathers weights in float8, half the bytes.
    With "blockwise" this replaces the layers' weights by other parameters, so make the optimizer afterwards;
    weights that layers share are left alone, and shards whose rows are no multiple of 128 are gathered as usual.
    With "tensorwise" it uses torchao's layers, and needs torchao.

    A device without float8 raises an error, unless `emulate` asks for the same numbers without the speed, for tests.
    """
    check_scaling(scaling, power_of_2, gradients)
    if gradients is not None and float8_all_gather and scaling == "tensorwise":
        raise ValueError(f"gradients={gradients!r} has no effect on torchao's layers, which float8_all_gather uses")
    layers = [(name, module) for name, module in model.named_modules() if _is_linear(module)]
    if scaling == "mxfp8" and not emulate:
        raise RuntimeError(
            "scaling='mxfp8' needs compute capability 10.0, and this release only emulates it: test with emulate=True, "
            "or train with 'blockwise'"
        )
    if not emulate:
        for device in {weight.device for _, module in layers for weight in _weights(module).values()}:
            problem = float8.obstacle(device)
            if problem:
                raise RuntimeError(f"{problem}; train in bfloat16 there, or test with emulate=True")
    divisor = size_divisor(scaling)
    reasons = {
        name: _reason(name, module, choose, smallest_weight, divisor, float8_all_gather) for name, module in layers
    }
    if float8_all_gather:  # it replaces weights, so that a tied one would be trained apart
        owners = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
        for name, module in layers:
            if any(owners[id(weight)] > 1 for weight in _weights(module).values()):
                reasons[name] = reasons[name] or "float8_all_gather would untie its weight, which another layer shares"
    report = [
        Converted(
            name if which == "weight" else f"{name}.{which}".lstrip("."),
            weight.shape[1],
            weight.shape[0],
            reasons[name],
        )
        for name, module in layers
        for which, weight in _weights(module).items()
    ]
    if float8_all_gather and scaling != "blockwise":
        _convert_with_torchao(model, scaling, {name for name, reason in reasons.items() if not reason}, emulate)
        return report
    for name, module in layers:
        if not reasons[name]:
            _convert_layer(module, scaling, power_of_2, gradients)
            if float8_all_gather:
                gather_in_float8(module, power_of_2)
    return report


def _convert_with_torchao(model: nn.Module, scaling: str, names: set[str], emulate: bool) -> None:
    if scaling != "tensorwise":
        raise ValueError(f"float8_all_gather goes with scaling='tensorwise' or 'blockwise', not {scaling!r}")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ImportError("float8_all_gather needs torchao: pip install torchao") from error
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in names)


@checked
def revert(model: nn.Module) -> None:
    """Undo `convert`."""
    module: Any
    for module in model.modules():
        if type(module) in LAYERS.values():
            module.__class__ = module.usual
            for name in ("scaling", "power_of_2", "gradients"):
                module.__dict__.pop(name, None)
            gather_as_usual(module)
            module._buffers.pop("history", None)
        elif isinstance(getattr(module, "_linear", None), _ParallelProduct):
            module._linear = module._linear.usual


@checked
def table(report: list[Converted]) -> str:
    """Return the result of `convert` as text, one line for each layer."""
    width = max([5, *(len(row.name) for row in report)])
    lines = [f"{'layer':{width}}  {'in':>6} {'out':>6}  float8"]
    for row in report:
        lines.append(f"{row.name:{width}}  {row.in_features:6} {row.out_features:6}  {row.reason or 'yes'}")
    return "\n".join(lines)


def _is_linear(module: nn.Module) -> bool:
    from ..transformer.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    kinds = (*LAYERS, *LAYERS.values())
    return type(module) in kinds or isinstance(module, (ColumnParallelLinear, RowParallelLinear))


def _weights(module: Any) -> dict[str, Tensor]:
    names = getattr(LAYERS.get(type(module), type(module)), "weights", ("weight",))
    return {name: getattr(module, name) for name in names}


def _reason(
    name: str,
    module: Any,
    choose: Callable[[str, nn.Module], bool] | None,
    smallest: int,
    divisor: int,
    by_torchao: bool,
) -> str:
    """Return why a layer is not converted; "" if it is."""
    weights = _weights(module).values()
    if any(weight.dtype == torch.float64 for weight in weights):
        return "float64 is multiplied as it is"
    if any(size % divisor for weight in weights for size in weight.shape):
        return f"a size is no multiple of {divisor}"
    if any(weight.numel() < smallest for weight in weights):
        return f"fewer than {smallest:,} weights: the casts take longer than the products win"
    if getattr(module, "gradient_accumulation_fusion", False):
        return "gradient_accumulation_fusion adds gradients as it multiplies, which float8 products do not"
    if by_torchao and not isinstance(module, nn.Linear):
        return "float8_all_gather has torch.nn.Linear only"
    if choose is not None and not choose(name, module):
        return "left out by choose"
    return ""


def _convert_layer(module: Any, scaling: str, power_of_2: bool, gradients: str | None) -> None:
    """Make one layer multiply in float8."""
    if type(module) in (*LAYERS, *LAYERS.values()):
        module.__class__ = LAYERS.get(type(module), type(module))
        module.set_scaling(scaling, power_of_2, gradients)
    else:
        usual = getattr(module._linear, "usual", module._linear)
        options = {"power_of_2": power_of_2, "gradients": gradients}
        module._linear = _ParallelProduct(usual, scaling, options, make_history(module.weight, scaling))


class _ParallelProduct:
    """The product of a tensor-parallel layer after conversion: float8 matrices, with the same exchanges around it."""

    def __init__(
        self, usual: Callable[..., Tensor], scaling: str, options: dict[str, Any], history: Tensor | None
    ) -> None:
        self.usual, self.scaling, self.options, self.history = usual, scaling, options, history

    def __call__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, fusion: bool, all_reduce: bool, sequence: bool
    ) -> Tensor:
        from ..transformer.tensor_parallel import mappings

        if sequence:
            input = mappings.gather_from_sequence_parallel_region(input)
        elif all_reduce:
            input = mappings.copy_to_tensor_model_parallel_region(input)
        history = self.history
        if history is not None:
            if history.device != input.device:  # the layer was moved
                history = self.history = history.to(input.device)
            history = history.view(torch.float32)
        return linear(input, weight, bias, self.scaling, history, **self.options)
