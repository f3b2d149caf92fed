"""Rules for layers and MLPs of transformers: two linear layers with an activation, residual + norm, layer scale + add.

A layer's own forward runs on a stand-in for the layer, whose children return `Lazy` objects. Children with
hooks, and children of other classes (LoRA, float8), are called as they are.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..ops.dense.reference import ACTIVATIONS, activate
from .lazy import Active, Hidden, Known, Lazy, Scaled, Sum, evaluated
from .rule import FusionRule, has_hooks, in_mode, inherits, is_linear, names_reached, nothing, random_input

# Names of the two linear layers of an MLP, of its activation, of attention, and of layer scales' factors.
_PAIRS = (
    *(("fc1", "fc2"), ("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h"), ("up_proj", "down_proj")),
    *(("pwconv1", "pwconv2"), ("linear1", "linear2"), ("lin1", "lin2")),
)
_ACTIVATIONS = ("activation_fn", "act", "act_fn", "activation", "gelu_impl")
_ATTENTION = ("self_attn", "attention", "attn", "self_attention")
_FACTORS = ("lambda1", "gamma", "scale_factor")
# Names of norms that may follow a residual's addition, in layers and in modules that add two inputs (`BertOutput`).
_NORMS = (
    *("post_attention_layernorm", "layernorm_after", "ln_2", "norm1", "norm2", "layer_norm2", "final_layer_norm"),
    *("LayerNorm", "pre_feedforward_layernorm", "sa_layer_norm", "output_layer_norm", "post_layernorm"),
)


def _factors(module: Any) -> Tensor | None:
    """Return the factors of a layer scale: the only parameter of a module `...LayerScale`; None for other modules."""
    parameters = dict(module.named_parameters()) if not has_hooks(module) else {}
    name = next(iter(parameters), "")
    is_scale = type(module).__name__.endswith("LayerScale") and len(parameters) == 1 and name in _FACTORS
    return parameters[name] if is_scale and not getattr(module, "inplace", False) else None


def _norm_arguments(module: Any) -> tuple[Any, Any, float, bool] | None:
    """Return weight, bias, eps and whether the mean is subtracted, for norms that `Sum` takes; None for others."""
    if has_hooks(module):
        return None
    if inherits(module, nn.LayerNorm) and module.weight is not None and module.weight.dim() == 1:
        return module.weight, module.bias, module.eps, True
    rule = getattr(module, "fused_rule", None)
    if rule is not None and rule.name == "layer norm written in Python":
        return module.weight, getattr(module, "bias", None), getattr(module, module.fused_settings), True
    if rule is None or not rule.name.startswith("RMS norm of"):
        return None
    weight = module.weight
    if rule.name.endswith("1 + weight"):  # in float32, as the norm alone computes it
        weight = 1 + (weight if weight.dtype == torch.float64 else weight.float())
    return weight, None, getattr(module, module.fused_settings), False


def _activation_of(function: Any) -> str:
    """Return the name of the activation that a function or module computes, "" if it is unknown."""
    if isinstance(function, nn.Module) and (has_hooks(function) or next(function.parameters(), None) is not None):
        return ""
    options: Any = {"dtype": torch.float64, "device": torch.Generator().device}
    sizes = torch.logspace(-6, 3, 37, **options)
    x = torch.cat((torch.linspace(-4, 4, 65, **options), sizes, -sizes))
    results = []
    modules = function if isinstance(function, nn.Module) else nn.Identity()
    try:
        for training in (True, False):
            with torch.no_grad(), in_mode(modules, training):
                results.append(function(x))
    except Exception:  # a foreign function may raise anything
        return ""
    for name in ACTIVATIONS[3:]:
        if all(torch.allclose(y, activate(x, name), rtol=1e-6, atol=1e-7) for y in results):
            return name
    return ""


class _Child:
    """A replacement of a layer's child in the layer's forward. Its attributes are the child's."""

    def __init__(self, module: Any, activation: str = "") -> None:
        self._module, self._activation = module, activation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if len(args) == 1 and not kwargs and isinstance(args[0], (Tensor, Lazy)):
            result = self._recorded(args[0])
            if result is not None:
                return result
        outputs = module(*tree_map(evaluated, args), **tree_map(evaluated, kwargs))
        if isinstance(outputs, tuple) and outputs and isinstance(outputs[0], Tensor):
            return Known(outputs[0]), *outputs[1:]
        return Known(outputs) if isinstance(outputs, Tensor) else outputs

    def _recorded(self, x: Any) -> Any:
        """Return the child's result as a `Lazy` object, None if the child must be called."""
        module = self._module
        if self._activation:
            return x.activated(self._activation, module) if isinstance(x, Hidden) else None
        if is_linear(module):
            return Known(x.through(module)) if isinstance(x, Active) else Hidden(evaluated(x), module)
        if inherits(module, nn.Identity):
            return x
        if inherits(module, nn.Dropout):
            return None if module.training and module.p > 0 else x
        if isinstance(x, Sum):
            arguments = _norm_arguments(module)
            keeps_dtype = getattr(module, "keeps_dtype", False)
            result = None if arguments is None else x.normalised(*arguments, keeps_dtype=keeps_dtype)
            return None if result is None else Known(result)
        factors = _factors(module)
        return None if factors is None else Scaled(evaluated(x), factors)


class _Stub:
    """A replacement of attention in trials: returns its input. Has the attributes of attention."""

    def __init__(self, module: Any, returns_tuple: bool) -> None:
        self._module, self._returns_tuple = module, returns_tuple

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        output = kwargs.get("hidden_states", x)
        return (output, None) if self._returns_tuple else output


class _StandIn:
    """A replacement of a layer in its own forward. Its methods are bound to it, and its children are `_Child`.

    For a trial, a `_Stub` replaces attention unless `stub` is None, and children stay as they are if not `is_lazy`.
    """

    forward = None  # decorators of transformers compare it with themselves

    def __init__(self, layer: Any, settings: dict[str, Any], stub: bool | None = None, is_lazy: bool = True) -> None:
        self._layer, self._settings, self._stub, self._is_lazy = layer, settings, stub, is_lazy

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_layer", "_settings", "_stub", "_is_lazy"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._layer, name, evaluated(value))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._layer, name)
        if self._stub is not None and name in _ATTENTION:
            return _Stub(value, self._stub)
        if isinstance(value, types.MethodType) and value.__self__ is self._layer and not hasattr(nn.Module, name):
            return types.MethodType(value.__func__, self)
        if not self._is_lazy:
            return value
        if name in self._settings:
            activation, identity = self._settings[name]
            return _Child(value, activation if _identity(value) == identity else "") if callable(value) else value
        is_child = isinstance(value, nn.Module) and not isinstance(value, (nn.ModuleList, nn.ModuleDict))
        return _Child(value) if is_child else value


def _identity(function: Any) -> Any:
    """Return a value that changes if an activation is replaced; None if the activation has hooks."""
    if not isinstance(function, nn.Module):
        return function
    return None if has_hooks(function) else (type(function), function.extra_repr())


def _settings(module: Any) -> dict[str, tuple[str, Any]]:
    """Return (activation name, `_identity`) of each activation of a layer, by attribute name."""
    activations = {}
    for name in _ACTIVATIONS:
        function = getattr(module, name, None)
        activation = _activation_of(function) if callable(function) else ""
        if activation:
            activations[name] = (activation, _identity(function))
    return activations


@functools.cache
def _names(kind: Any) -> frozenset[str]:
    return frozenset(names_reached(kind))


def _linear_pair(module: Any) -> tuple[Any, Any] | None:
    """Return the two linear layers that the forward of a module uses, None if there are none."""
    kind: Any = type(module)
    for pair in _PAIRS:
        layers = [getattr(module, name, None) for name in pair]
        if set(pair) <= _names(kind) and all(layer is not None and is_linear(layer) for layer in layers):
            return layers[0], layers[1]
    return None


def _has_residual_norm(module: Any) -> bool:
    """Return whether a module's forward uses attention or dropout beside a norm of the kinds that `Sum` takes."""
    kind: Any = type(module)
    names = _names(kind)
    others = names & {*_ATTENTION, "dropout", "dropout1", "layer_scale1"}
    norms = [getattr(module, name, None) for name in _NORMS if name in names]
    return bool(others) and any(isinstance(norm, nn.Module) and _norm_arguments(norm) is not None for norm in norms)


def _is_candidate(module: Any) -> bool:
    return isinstance(getattr(type(module), "forward", None), types.FunctionType) and bool(module._modules)


def _is_mlp(module: Any) -> bool:
    if not _is_candidate(module) or _linear_pair(module) is None or _has_residual_norm(module):
        return False
    return not hasattr(module, "gate_proj") and bool(_settings(module))


def _is_layer(module: Any) -> bool:
    return _is_candidate(module) and _has_residual_norm(module) and not isinstance(module, nn.TransformerEncoderLayer)


def _has_dropout(module: Any) -> bool:
    """Return whether a child of a layer drops values in training.

    Such a layer is left alone: steps of a BERT-base with dropout took 43.9 ms with joined additions, 40.2 without.
    """
    return any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.children())


def _examples(module: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs for a trial, each with an input for a second argument (a residual)."""
    norms = [c.weight for c in module.children() if "norm" in type(c).__name__.lower() and hasattr(c, "weight")]
    sizes = [weight.shape[0] for weight in norms if weight is not None and weight.dim() == 1]
    layers = [layer for layer in module.children() if is_linear(layer)]
    sizes += [layer.weight.shape[1 if isinstance(layer, nn.Linear) else 0] for layer in layers]
    for size in dict.fromkeys(sizes):
        yield random_input(module, 2, 3, size), random_input(module, 2, 3, sizes[0])
        if any(isinstance(child, nn.Conv2d) for child in module.children()):
            yield random_input(module, 2, size, 4, 4), random_input(module, 2, size, 4, 4)


def _layer_reason(module: Any) -> str:
    """Try a layer, with a stub instead of attention; return the reason why it cannot be fused, "" if it can."""
    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        return "its weights are sharded, so that it cannot be tried; fuse before fully_shard"
    if any(parameter.is_meta for parameter in module.parameters()):
        return "its weights are on no device yet, so that it cannot be tried"
    if _is_layer(module) and _has_dropout(module):
        return "it has dropout"
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    reason = ""
    for example, second in _examples(module):
        for returns_tuple in (True, False):
            try:
                return _difference(module, returns_tuple, example, [second] * len(required))
            except Exception as problem:  # a foreign module may raise anything
                reason = reason or f"it cannot be tried: {type(problem).__name__}: {problem}"
    return reason or "it cannot be tried"


def _difference(module: Any, returns_tuple: bool, example: Tensor, others: list[Tensor]) -> str:
    """Describe the first result of a layer's forward that differs if its children are lazy; "" if none does."""
    rtol, atol = (2e-2, 2e-2) if example.dtype.itemsize == 2 else (1e-4, 1e-5)
    method, settings = type(module).forward, _settings(module)
    inputs = {"usual": example, "negative": -example.abs(), "large": example * 2.0**5, "tiny": example * 2.0**-10}
    for training, (kind, x) in itertools.product((True, False), inputs.items()):
        results = []
        for is_lazy in (True, False):
            leaf = x.clone().requires_grad_()
            with in_mode(module, training), torch.random.fork_rng(), torch.enable_grad():
                torch.manual_seed(0)
                output = tree_map(evaluated, method(_StandIn(module, settings, returns_tuple, is_lazy), leaf, *others))
                output = output[0] if isinstance(output, tuple) else output
                (gradient,) = torch.autograd.grad(output, leaf, output.detach().cos())
            results.append((output.detach(), gradient))
        for name, actual, expected in zip(("output", "gradient"), *results, strict=True):
            limit = atol * max(1.0, float(expected.abs().max()))
            if actual.dtype != expected.dtype or not torch.allclose(actual, expected, rtol=rtol, atol=limit):
                mode = "training" if training else "evaluation"
                return f"its forward computes something else ({name} differs in {mode} mode for {kind} inputs)"
    return ""


def _layer_forward(is_layer: bool, original: Any) -> Callable[..., Any]:
    """Return the fused forward of a class of layers, or of MLPs if not `is_layer`."""
    method = original.forward

    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # Inductor fuses these steps itself
        if is_traced or (is_layer and self.training and _has_dropout(self)):
            return method(self, *args, **kwargs)
        return tree_map(evaluated, method(_StandIn(self, self.fused_settings), *args, **kwargs))

    return forward


RULES = [
    FusionRule(name, matches, _layer_reason, functools.partial(_layer_forward, is_layer), nothing, _settings, (), True)
    for name, matches, is_layer in (
        ("dense + activation + dense", _is_mlp, False),
        ("residual + norm", _is_layer, True),
    )
]
