"""Rules for convolutional networks: first convolutions, max pooling, batch norm and group norm with activations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops._library import autocast_dtype
from ..ops.batch_norm import average_factor, batch_norm, check_values
from ..ops.dense import dense_gelu_dense
from ..ops.max_pool import max_pool2d
from ..ops.stem_conv import stem_conv2d, stem_fits
from .norms import group_norm_forward
from .rule import FusionRule, has_hooks, is_linear, names_used, nothing, random_input, unless_overridden


def inherits_forward(*classes: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether a module is of one of these classes and inherits its forward."""
    return lambda module: any(isinstance(module, c) and module.__class__.forward is c.forward for c in classes)


is_batch_norm = inherits_forward(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
is_relu = inherits_forward(nn.ReLU)


is_silu = inherits_forward(nn.SiLU)


def batch_norm_active(norm: Any, input: Tensor, z: Tensor | None = None, silu: bool = False) -> Tensor:
    """Compute relu(norm(input) + z) or silu(norm(input)), and update running statistics as the module would."""
    norm._check_input_dim(input)
    uses_batch = norm.training or norm.running_mean is None
    if uses_batch:
        check_values(input, input.shape[1])
    factor = average_factor(norm.momentum, norm.num_batches_tracked) if norm.training else 0.0
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    tracks = not norm.training or norm.track_running_stats
    mean, variance = (norm.running_mean, norm.running_var) if tracks else (None, None)
    channels = (mean, variance, norm.weight, norm.bias)
    return batch_norm(input, *channels, uses_batch, factor, norm.eps, z=z, relu=not silu, silu=silu)


def _sequential_pair(first: Any, second: Any) -> str:
    """Return "batch" for a batch norm with ReLU or SiLU behind it, "group" for a group norm with SiLU, "" otherwise."""
    if has_hooks(first) or has_hooks(second):
        return ""
    if is_batch_norm(first) and (is_relu(second) or is_silu(second)):
        return "batch"
    is_group = (
        isinstance(first, nn.GroupNorm) and getattr(first, "fused_from", type(first)).forward is nn.GroupNorm.forward
    )
    return "group" if is_group and is_silu(second) else ""


def _dense_triple(modules: list[Any]) -> tuple[int, str]:
    """Return how many of the first modules are linear layer, activation[, dropout that is off], linear layer, or 0.

    The second result is the name of the activation.
    """
    if len(modules) < 3 or torch.compiler.is_compiling() or not is_linear(modules[0]):
        return 0, ""
    first, activation, *rest = modules
    if inherits_forward(nn.Dropout)(rest[0]) and not has_hooks(rest[0]) and not (rest[0].training and rest[0].p > 0):
        rest = rest[1:]
    name = _activation(type(activation), getattr(activation, "approximate", "")) if not has_hooks(activation) else ""
    if not name or not rest or not is_linear(rest[0]) or first.weight.dtype != rest[0].weight.dtype:
        return 0, ""
    return len(modules) - len(rest) + 1, name


def _activation(kind: type, approximate: str) -> str:
    names = {(nn.GELU, "none"): "gelu_erf", (nn.GELU, "tanh"): "gelu", (nn.SiLU, ""): "silu"}
    return names.get((kind, approximate), "")


def sequential_forward(self: Any, input: Any) -> Any:
    modules, i = list(self._modules.values()), 0
    while i < len(modules):
        count, activation = _dense_triple(modules[i:])
        if count and isinstance(input, Tensor) and _fits(input, modules[i].weight):
            layers = (modules[i], modules[i + count - 1])
            arguments: Any = (input, *(tensor for layer in layers for tensor in (layer.weight, layer.bias)), activation)
            input = dense_gelu_dense(*arguments)
            i += count
            continue
        first, second = modules[i], modules[i + 1] if i + 1 < len(modules) else None
        pair = "" if second is None else _sequential_pair(first, second)
        if pair == "batch":
            input = batch_norm_active(first, input, silu=is_silu(second))
        elif pair == "group":
            input = group_norm_forward(first, input, "silu")
        else:
            input = first(input)
        i += 2 if pair else 1
    return input


def _fits(input: Tensor, weight: Tensor) -> bool:
    """Return whether an input has the weight's dtype, or autocast gives both the same one."""
    return input.dim() > 1 and (input.dtype == weight.dtype or autocast_dtype(input) is not None)


def _has_pair(module: Any) -> bool:
    children = list(module._modules.values()) if inherits_forward(nn.Sequential)(module) else []
    return any(_sequential_pair(*pair) for pair in pairwise(children))


def _has_dense(module: Any) -> bool:
    children = list(module._modules.values()) if inherits_forward(nn.Sequential)(module) else []
    with_dropout = [child for child in children if not inherits_forward(nn.Dropout)(child)]
    return any(_dense_triple(with_dropout[i:])[0] for i in range(len(with_dropout)))


# Attributes that the forward of a residual block uses: torchvision's, then timm's.
_LAYERS = {"conv1", "bn1", "conv2", "bn2", "downsample"}
_MORE_LAYERS = _LAYERS | {"conv3", "bn3"}
_TIMM = {"act1", "act2", "drop_block", "aa", "se", "drop_path"}
_BLOCKS = (_LAYERS | {"relu"}, _MORE_LAYERS | {"relu"}, _LAYERS | _TIMM, _MORE_LAYERS | _TIMM | {"act3"})
_MAY_BE_ABSENT = ("drop_block", "aa", "se", "drop_path")


def _layers(module: Any) -> list[tuple[Any, Any, Any]]:
    """Return the convolution, norm and activation of every layer of a residual block."""
    relu = getattr(module, "relu", None)
    numbers = [n for n in (1, 2, 3) if hasattr(module, f"conv{n}")]
    return [(getattr(module, f"conv{n}"), getattr(module, f"bn{n}"), getattr(module, f"act{n}", relu)) for n in numbers]


def _block_reason(module: Any) -> str:
    for name in _MAY_BE_ABSENT:
        if not isinstance(getattr(module, name, None), (nn.Identity, type(None))):
            return f"it has {name}"
    for _, norm, activation in _layers(module):
        if not is_batch_norm(norm):
            return f"its norm is {type(norm).__name__}, not torch.nn's BatchNorm"
        if not is_relu(activation):
            return f"its activation is {type(activation).__name__}, not ReLU"
    return ""


def block_forward(self: Any, x: Tensor) -> Tensor:
    """Compute a residual block with each ReLU fused into its norm, and the addition into the last norm."""
    if any(has_hooks(norm) or has_hooks(activation) for _, norm, activation in _layers(self)):
        return self.fused_from.forward(self, x)  # modules with hooks, of fully_shard for example, must be called
    shortcut = x if self.downsample is None else self.downsample(x)
    *layers, (last_convolution, last_norm, _) = _layers(self)
    for convolution, norm, _ in layers:
        x = batch_norm_active(norm, convolution(x))
    return batch_norm_active(last_norm, last_convolution(x), shortcut)


# Names that the forward of timm's batch norms with an activation may use; PyTorch's batch norm uses the first ones.
_ACTIVE_NORM = {*names_used(nn.BatchNorm2d.forward), "drop", "act", "_assert", "ndim"}


def _is_active_norm(module: Any) -> bool:
    """Return whether a module is a batch norm whose own forward also calls its dropout and activation."""
    if not isinstance(module, nn.BatchNorm2d) or isinstance(getattr(module, "act", None), nn.Identity | None):
        return False
    used = set(names_used(type(module).forward))
    return {"drop", "act"} <= used <= _ACTIVE_NORM


def _active_norm_reason(module: Any) -> str:
    if not isinstance(module.drop, nn.Identity):
        return "it has dropout"
    return "" if is_relu(module.act) or is_silu(module.act) else f"its activation is {type(module.act).__name__}"


def active_norm_forward(original: Any) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if has_hooks(self.act) or has_hooks(self.drop):
            return original.forward(self, x)
        return batch_norm_active(self, x, silu=is_silu(self.act))

    return forward


def _block_probe(module: Any) -> Tensor:
    return random_input(module, 2, module.conv1.in_channels, 8, 8)


def _is_stem(module: Any) -> bool:
    """Return whether a module is a convolution of images with few channels that `stem_conv2d` supports."""
    if not isinstance(module, nn.Conv2d):
        return False
    plain = (*module.dilation, module.groups, module.padding_mode) == (1, 1, 1, "zeros")
    strides, paddings = {*module.stride}, {*module.padding}  # the padding may be a string
    if not plain or len(strides) > 1 or len(paddings) > 1:
        return False
    sizes: Any = (module.out_channels, module.in_channels, module.kernel_size, *strides, *paddings)
    return stem_fits(*sizes)


def stem_forward(self: Any, input: Tensor) -> Tensor:
    return stem_conv2d(input, self.weight, self.bias, self.stride[0], self.padding[0])


def _pool_reason(module: Any) -> str:
    if not all(isinstance(size, int) for size in (module.kernel_size, module.stride, module.padding)):
        return "its windows are not square"
    return "it has dilation, ceil_mode or return_indices" if _pool_options(module) != (1, False, False) else ""


def _pool_options(module: Any) -> tuple[Any, ...]:
    return module.dilation, module.ceil_mode, module.return_indices


def pool_forward(self: Any, input: Tensor) -> Tensor:
    if input.dim() != 4 or not input.is_floating_point():
        return functional.max_pool2d(input, self.kernel_size, self.stride, self.padding)
    return max_pool2d(input, self.kernel_size, self.stride, self.padding)


RULES = [
    FusionRule("convolution of few channels", _is_stem, unless_overridden(nn.Conv2d), lambda original: stem_forward),
    FusionRule(
        "max pooling",
        lambda module: isinstance(module, nn.MaxPool2d),
        unless_overridden(nn.MaxPool2d, _pool_reason),
        lambda original: pool_forward,
    ),
    FusionRule(
        "residual block: batch norm + add + ReLU",
        lambda module: set(names_used(type(module).forward)) in _BLOCKS,
        _block_reason,
        lambda original: block_forward,
        _block_probe,
    ),
    FusionRule(
        "batch norm + activation",
        _is_active_norm,
        _active_norm_reason,
        active_norm_forward,
        lambda module: random_input(module, 3, module.num_features, 4, 4),
    ),
    FusionRule("norm + activation in a row", _has_pair, nothing, lambda original: sequential_forward),
    FusionRule("dense + activation + dense in a row", _has_dense, nothing, lambda original: sequential_forward),
]
