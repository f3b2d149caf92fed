"""Follows channels through the traced graph of a model: what each layer and function does to them.

Only layers and functions named here are known; `_channels.py` says what happens at all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules import batchnorm, instancenorm

from ._channels import (
    NUMBER,
    Attribute,
    Channels,
    Labelled,
    Many,
    Natural,
    concatenated,
    elementwise,
    flattened,
    indexed,
    rearranged,
    reduced,
)

_ELEMENTWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Softplus, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LogSigmoid, nn.Softmax, nn.Softmax2d, nn.LogSoftmax,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity,
)  # fmt: skip
# How many of the last dimensions they look at together.
_SPATIAL_MODULES: dict[type, int] = {
    nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3,
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3, nn.AdaptiveMaxPool1d: 1,
    nn.AdaptiveMaxPool2d: 2, nn.AdaptiveMaxPool3d: 3, nn.ZeroPad2d: 2, nn.ReflectionPad2d: 2, nn.ReplicationPad2d: 2,
}  # fmt: skip
_ELEMENTWISE = frozenset({
    "add", "sub", "mul", "div", "truediv", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "abs", "clamp", "maximum",
    "minimum", "erf", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh",
    "softplus", "hardsigmoid", "hardswish", "hardtanh", "logsigmoid", "softmax", "log_softmax", "dropout", "dropout1d",
    "dropout2d", "dropout3d", "alpha_dropout", "clone", "contiguous", "detach", "to", "float", "half", "double",
    "bfloat16", "iadd", "isub", "imul", "itruediv", "radd", "rsub", "rmul",
})  # fmt: skip
_SPATIAL = {
    f"{kind}{count}d": count
    for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
    for count in (1, 2, 3)
}
_SIZES = frozenset({"size", "dim", "numel", "ndimension", "shape", "dtype", "device", "ndim"})
_KNOWN_MODULES = ("torch", "_operator", "builtins", "math")


class _Tracer(fx.Tracer):
    """Does not look into the layers of this package, nor into what has hooks, which a graph does not show."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        hooked = bool(m._forward_hooks or m._forward_pre_hooks)
        return hooked or type(m).__module__.startswith("apex.") or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module, example_inputs: tuple | None) -> fx.Graph:
    """The graph of the model with what its arguments are by default, but for those that examples are given for.

    With examples, nodes know the shapes of their results.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())
    given = 0 if example_inputs is None else len(example_inputs)
    defaults = {
        parameter.name: parameter.default
        for place, parameter in enumerate(parameters)
        if parameter.default is not parameter.empty and place >= given
    }
    attributes = set(vars(model))
    try:
        graph = _Tracer().trace(model, concrete_args=defaults or None)
    finally:
        for name in set(vars(model)) - attributes:  # constants of the graph
            model.__dict__.pop(name)
    if example_inputs is not None:
        from torch.fx.passes.shape_prop import ShapeProp

        placeholders = sum(node.op == "placeholder" for node in graph.nodes)
        rest = [defaults.get(parameter.name) for parameter in parameters[given:placeholders]]
        ShapeProp(fx.GraphModule(model, graph)).propagate(*example_inputs, *rest)
    return graph


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return None if shape is None else tuple(shape)


class Walk:
    """One walk along a graph, which fills `channels`."""

    def __init__(self, model: nn.Module, graph: fx.Graph, channels: Channels) -> None:
        self.model, self.channels = model, channels
        self.modules = dict(model.named_modules())
        self.values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            found = getattr(self, f"_{node.op}")(node)
            shape = _shape(node)
            if shape is not None and isinstance(found, Natural):
                found = Natural(len(shape), shape)
            elif shape is not None and isinstance(found, Labelled):
                found = replace(found, rank=len(shape), exact=shape[found.dim] == len(found.ids))
            self.values[node] = found

    def _value(self, argument: Any) -> Any:
        """The value of an argument: of a node, or a constant."""
        return self.values[argument] if isinstance(argument, fx.Node) else NUMBER

    def _unknown(self, node: fx.Node) -> Any:
        """Freezes all arguments: what comes out is in its natural order."""
        given = [self.values[each] for each in node.all_input_nodes]
        if given and all(value is NUMBER for value in given):
            return NUMBER
        for value in given:
            self.channels.freeze(value)
        return Natural()

    # Nodes ------------------------------------------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Any:
        return Natural()

    def _output(self, node: fx.Node) -> Any:
        return self._unknown(node)

    def _get_attr(self, node: fx.Node) -> Any:
        path, _, name = str(node.target).rpartition(".")
        module = self.modules[path]
        tensor = getattr(module, name, None)
        return Attribute(module, name, tensor) if isinstance(tensor, Tensor) else Natural()

    def _call_module(self, node: fx.Node) -> Any:
        module = self.modules[str(node.target)]
        value = self._value(node.args[0]) if node.args else Natural()
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
            return self._unknown(node)
        if isinstance(module, nn.MultiheadAttention):
            return self._attention(node, module)
        if len(node.all_input_nodes) != 1:
            return self._unknown(node)
        if isinstance(module, nn.Linear):
            return self._linear(value, self._weight(module), module.weight)
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return self._convolution(value, module)
        if isinstance(module, nn.Embedding):
            self.channels.freeze(value)
            self.channels.freeze(self.channels.axis(module, "weight", 0))
            return Labelled(-1, self.channels.axis(module, "weight", 1).ids, _raised(value))
        if isinstance(module, _ELEMENTWISE_MODULES):
            return elementwise(self.channels, [value])
        if not isinstance(value, Labelled):
            return self._unknown(node)
        if isinstance(module, batchnorm._BatchNorm | instancenorm._InstanceNorm):
            at_one = value.place == 1 or (value.rank is None and isinstance(module, nn.BatchNorm1d))
            return value if at_one and self._per_channel(module, value, module.num_features) else self._unknown(node)
        if hasattr(module, "normalized_shape"):
            return self._last_dimensions_norm(node, module, value)
        if isinstance(module, nn.PReLU):
            if module.num_parameters == 1 or (
                value.place == 1 and self._per_channel(module, value, module.num_parameters)
            ):
                return value
            return self._unknown(node)
        if isinstance(module, nn.Flatten):
            return self._flatten(node, value, module.start_dim, module.end_dim)
        for kind, dims in _SPATIAL_MODULES.items():
            if isinstance(module, kind):
                return value if value.dim < -dims else self._unknown(node)
        if isinstance(module, nn.Upsample):
            return value if value.place == 1 else self._unknown(node)
        return self._unknown(node)

    def _call_method(self, node: fx.Node) -> Any:
        return self._function(node, str(node.target))

    def _call_function(self, node: fx.Node) -> Any:
        module = getattr(node.target, "__module__", None)
        if module is not None and module.split(".")[0] not in _KNOWN_MODULES:
            return self._unknown(node)
        return self._function(node, getattr(node.target, "__name__", ""))

    def _function(self, node: fx.Node, name: str) -> Any:
        name = name.rstrip("_")
        if name in _SIZES or (name == "getattr" and node.args[1] in _SIZES):
            return NUMBER
        if name in _ELEMENTWISE:
            return elementwise(self.channels, [self.values[each] for each in node.all_input_nodes])
        if name in _SPATIAL and len(node.all_input_nodes) == 1:
            value = self._value(node.args[0])
            return value if isinstance(value, Labelled) and value.dim < -_SPATIAL[name] else self._unknown(node)
        handler: Callable[..., Any] | None = getattr(self, f"_f_{name}", None)
        if handler is None:
            return self._unknown(node)
        found = handler(node, self._value(node.args[0]) if node.args else None)
        return self._unknown(node) if found is None else found

    # Layers -----------------------------------------------------------------------------------------------------------

    def _weight(self, module: nn.Module) -> Attribute:
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            self.channels.join(self.channels.axis(module, "weight", 0).ids, self.channels.axis(module, "bias", 0).ids)
        return Attribute(module, "weight", module.weight)  # type: ignore[arg-type]

    def _columns(self, value: Any, dim: int, columns: Any) -> None:
        """Joins the channels of a layer's input with the columns of its weight."""
        if isinstance(value, Labelled) and value.dim == dim and len(value.ids) == columns.width:
            self.channels.join(value.ids, columns.ids)
        else:
            self.channels.freeze(value)
            self.channels.freeze(columns)

    def _linear(self, value: Any, weight: Attribute, tensor: Tensor) -> Labelled:
        self._columns(value, -1, self.channels.axis(weight.module, weight.name, 1, tensor=tensor))
        rows = self.channels.axis(weight.module, weight.name, 0, tensor=tensor)
        return Labelled(-1, rows.ids, getattr(value, "rank", None))

    def _convolution(self, value: Any, module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> Any:
        spatial = len(module.kernel_size)
        dim, groups = -(spatial + 1), module.groups
        self._weight(module)
        rows = self.channels.axis(module, "weight", 0)
        if groups == 1:
            self._columns(value, dim, self.channels.axis(module, "weight", 1))
        elif groups == module.in_channels == module.out_channels:  # a filter for each channel
            self._columns(value, dim, rows)
        else:
            self.channels.freeze(rows)
            width, height = module.in_channels // groups, module.out_channels // groups
            fits = isinstance(value, Labelled) and value.dim == dim and len(value.ids) == module.in_channels
            for group in range(groups):
                columns = self.channels.axis(module, "weight", 1, (group * height, (group + 1) * height))
                part = replace(value, ids=value.ids[group * width : (group + 1) * width]) if fits else value
                self._columns(part, dim, columns)
        return Labelled(dim, rows.ids, spatial + 2)

    def _attention(self, node: fx.Node, module: nn.MultiheadAttention) -> Any:
        """Columns of the projections of query, key and value, and rows of the last one, can be permuted."""
        names = ("query", "key", "value")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if not all(name in given for name in names):
            return self._unknown(node)
        inputs = [self._value(given[name]) for name in names]
        for each in node.all_input_nodes:
            if each not in [given[name] for name in names]:
                self.channels.freeze(self.values[each])
        size = module.embed_dim
        for place, (kind, value) in enumerate(zip("qkv", inputs, strict=True)):
            if module.in_proj_weight is not None:
                columns = self.channels.axis(module, "in_proj_weight", 1, (place * size, (place + 1) * size))
            else:
                columns = self.channels.axis(module, f"{kind}_proj_weight", 1)
            self._columns(value, -1, columns)
        rank = getattr(inputs[0], "rank", None)
        projection = self._weight(module.out_proj)
        self.channels.freeze(self.channels.axis(module.out_proj, "weight", 1))
        rows = self.channels.axis(projection.module, "weight", 0)
        return Many(None, (Labelled(-1, rows.ids, rank), Natural()))

    def _per_channel(self, module: nn.Module, value: Labelled, width: int) -> bool:
        """Joins the channels with what a layer has one number of for each; False if it has another number of them."""
        if width != len(value.ids):
            return False
        for name in ("weight", "bias", "running_mean", "running_var"):
            if isinstance(getattr(module, name, None), Tensor):
                self.channels.join(value.ids, self.channels.axis(module, name, 0).ids)
        return True

    def _last_dimensions_norm(self, node: fx.Node, module: Any, value: Labelled) -> Any:
        """Layer and RMS norms, of PyTorch and of this package."""
        shape = tuple(module.normalized_shape)
        known = isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__module__.startswith(
            "apex.normalization"
        )
        if not known or (-value.dim <= len(shape) and shape[value.dim] != len(value.ids)):
            return self._unknown(node)
        for name in ("weight", "bias") if -value.dim <= len(shape) else ():
            if isinstance(getattr(module, name, None), Tensor):
                self.channels.join(value.ids, self.channels.axis(module, name, len(shape) + value.dim).ids)
        return value

    # Functions and methods, by name: None where they cannot be followed ---------------------------------------------

    def _flatten(self, node: fx.Node, value: Any, start: int, end: int) -> Any:
        shape = _shape(node.all_input_nodes[0])
        ones = shape is not None and isinstance(value, Labelled) and all(size == 1 for size in shape[value.dim :][1:])
        found = flattened(value, start, end, ones) if isinstance(value, Labelled) else None
        return self._unknown(node) if found is None else found

    def _f_flatten(self, node: fx.Node, value: Any) -> Any:
        start, end = _arguments(node, ("start_dim", 0), ("end_dim", -1))
        return self._flatten(node, value, start, end)

    def _f_view(self, node: fx.Node, value: Any) -> Any:
        """`x.view(x.size(0), -1)` is `x.flatten(1)`."""
        if len(node.args) != 3 or node.args[2] != -1 or not isinstance(node.args[1], fx.Node):
            return None
        size, source = node.args[1], node.args[0]
        by_method = size.target == "size" and tuple(size.args) == (source, 0)
        shape = size.args[0] if size.args else None
        by_shape = isinstance(shape, fx.Node) and shape.args == (source, "shape") and size.args[1] == 0
        return self._flatten(node, value, 1, -1) if by_method or by_shape else None

    _f_reshape = _f_view

    def _f_transpose(self, node: fx.Node, value: Any) -> Any:
        if not isinstance(value, Labelled) or value.rank is None:
            return None
        order = list(range(value.rank))
        one, other = (dim % value.rank for dim in _arguments(node, ("dim0", None), ("dim1", None)))
        order[one], order[other] = order[other], order[one]
        return rearranged(value, order)

    def _f_permute(self, node: fx.Node, value: Any) -> Any:
        dims = node.kwargs.get("dims", node.args[1] if len(node.args) == 2 else node.args[1:])
        if not isinstance(value, Labelled) or value.rank != len(dims):  # type: ignore[arg-type]
            return None
        return rearranged(value, [dim % value.rank for dim in dims])  # type: ignore[union-attr, operator, misc]

    def _f_unsqueeze(self, node: fx.Node, value: Any) -> Any:
        (dim,) = _arguments(node, ("dim", None))
        if not isinstance(value, Labelled) or (dim >= 0 and value.rank is None):
            return None
        dim = dim - value.rank - 1 if dim >= 0 else dim  # type: ignore[operator]
        rank = None if value.rank is None else value.rank + 1
        return replace(value, rank=rank, dim=value.dim - 1 if -value.dim >= -dim else value.dim)

    def _reduction(self, node: fx.Node, value: Any) -> Any:
        dims, keepdim = _arguments(node, ("dim", None), ("keepdim", False))
        if not isinstance(value, Labelled) or dims is None or isinstance(dims, fx.Node):
            return None
        return reduced(value, (dims,) if isinstance(dims, int) else tuple(dims), bool(keepdim))

    _f_mean = _f_sum = _f_amax = _f_amin = _reduction

    def _f_getitem(self, node: fx.Node, value: Any) -> Any:
        index = node.args[1]
        if value is NUMBER:
            return NUMBER
        if isinstance(value, Many):
            if not isinstance(index, int):
                return None
            return value.each if value.values is None else value.values[index]
        return indexed(value, index) if isinstance(value, Labelled) else None

    def _f_cat(self, node: fx.Node, value: Any) -> Any:
        tensors, dim = node.args[0], _arguments(node, ("dim", 0))[0]
        if not isinstance(tensors, list | tuple) or isinstance(dim, fx.Node):
            return None
        return concatenated(self.channels, [self._value(each) for each in tensors], dim)

    _f_concat = _f_cat

    def _f_chunk(self, node: fx.Node, value: Any) -> Any:
        count, dim = _arguments(node, ("chunks", None), ("dim", 0))
        if not isinstance(value, Labelled) or not isinstance(count, int):
            return None
        return self._divided(value, -(-len(value.ids) // count), dim)

    def _f_split(self, node: fx.Node, value: Any) -> Any:
        sizes, dim = _arguments(node, ("split_size_or_sections", None), ("dim", 0))
        return self._divided(value, sizes, dim) if isinstance(value, Labelled) else None

    def _divided(self, value: Labelled, sizes: Any, dim: int) -> Any:
        if dim >= 0 and value.rank is None:
            return None
        if (dim if dim < 0 else dim - value.rank) != value.dim:  # type: ignore[operator]
            return Many(value)
        if not value.exact or not (isinstance(sizes, int) or all(isinstance(size, int) for size in sizes)):
            return None
        sizes = sizes if isinstance(sizes, int) else list(sizes)
        return Many(None, tuple(replace(value, ids=ids) for ids in value.ids.split(sizes)))

    def _f_expand(self, node: fx.Node, value: Any) -> Any:
        """An attribute that is repeated in dimensions of length 1."""
        return value if isinstance(value, Attribute) else None

    def _f_linear(self, node: fx.Node, value: Any) -> Any:
        weight, bias = (self._value(each) for each in _arguments(node, ("weight", None), ("bias", None)))
        if not isinstance(weight, Attribute) or not (bias is NUMBER or isinstance(bias, Attribute)):
            return None
        found = self._linear(value, weight, weight.tensor)
        if isinstance(bias, Attribute):
            self.channels.join(found.ids, self.channels.axis(bias.module, bias.name, 0, tensor=bias.tensor).ids)
        return found

    def _f_matmul(self, node: fx.Node, value: Any) -> Any:
        weight = self._value(node.args[1])
        if not isinstance(weight, Attribute) or weight.tensor.dim() != 2:
            return None
        rows, columns = (self.channels.axis(weight.module, weight.name, dim, tensor=weight.tensor) for dim in (0, 1))
        self._columns(value, -1, rows)
        return Labelled(-1, columns.ids, getattr(value, "rank", None))


def _raised(value: Any) -> int | None:
    rank = getattr(value, "rank", None)
    return None if rank is None else rank + 1


def _arguments(node: fx.Node, *wanted: tuple[str, Any]) -> list[Any]:
    """Arguments after the first, by position or name."""
    given = dict(zip((name for name, _ in wanted), node.args[1:], strict=False))
    return [given.get(name, node.kwargs.get(name, default)) for name, default in wanted]
