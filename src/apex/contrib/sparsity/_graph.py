"""Follows channels through a model's traced graph and records the effect of each layer and function on them.

Only the layers and functions named here are known; `_channels.py` describes the treatment of all others.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules import batchnorm, instancenorm

from ._channels import NUMBER, Axis, ChannelGraph, Labelled, Natural

# Names of functions, methods and layers in lower case without underscores: `leaky_relu`, `LeakyReLU`, `relu_`.
_ELEMENTWISE = frozenset({
    "add", "sub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv", "neg", "pow", "square", "sqrt", "rsqrt",
    "exp", "abs", "clamp", "maximum", "minimum", "erf", "relu", "relu6", "leakyrelu", "elu", "selu", "celu", "gelu",
    "silu", "mish", "sigmoid", "tanh", "softplus", "hardsigmoid", "hardswish", "hardtanh", "logsigmoid", "softmax",
    "softmax2d", "logsoftmax", "dropout", "dropout1d", "dropout2d", "dropout3d", "alphadropout", "identity", "clone",
    "contiguous", "detach", "to", "float", "half", "double", "bfloat16",
})  # fmt: skip
# Operations over the last one, two or three dimensions, and how many.
_POOLS = ("maxpool", "avgpool", "adaptivemaxpool", "adaptiveavgpool", "zeropad", "reflectionpad", "replicationpad")
_SPATIAL = {f"{name}{dims}d": dims for name in (*_POOLS, "upsamplingnearest") for dims in (1, 2, 3)}
_SIZES = frozenset({"size", "dim", "numel", "shape", "dtype", "device", "ndim"})
_NORMS = (batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.LayerNorm, nn.RMSNorm)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class _Tracer(fx.Tracer):
    """A tracer that treats layers of PyTorch and of this package, and modules with hooks, as leaves.

    Arguments of `forward` that are not in `names` keep their defaults: they are left out of the call. torch.fx itself
    would rewrite the code of `forward` to pass them, which fails for a decorated forward.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in self.names)]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, LAYERS) and type(m).forward.__module__.startswith("torch.nn.")
        of_apex = type(m).__module__.startswith("apex.")
        return known or of_apex or _has_hooks(m) or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module, examples: tuple | None) -> fx.Graph:
    """Return the graph of a model; arguments without an example keep their defaults.

    With examples, nodes record the shapes of their results.
    """
    named = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in _POSITIONAL]
    names = [p.name for index, p in enumerate(named) if index < len(examples or ()) or p.default is p.empty]
    names += [f"argument_{index}" for index in range(len(named), len(examples or ()))]  # passed through *args
    attributes = set(vars(model))
    try:
        graph = _Tracer(names).trace(model)
        if examples is not None:
            from torch.fx.passes.shape_prop import ShapeProp

            ShapeProp(fx.GraphModule(model, graph)).propagate(*examples)
    finally:
        for name in set(vars(model)) - attributes:  # constants that tracing stored on the model
            model.__dict__.pop(name)
    return graph


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return None if shape is None else tuple(shape)


def _arguments(node: fx.Node, **defaults: Any) -> list[Any]:
    """Return the node's arguments after the first, passed by position or by name, with these defaults."""
    positional = dict(zip(defaults, node.args[1:], strict=False))
    return [positional.get(name, node.kwargs.get(name, default)) for name, default in defaults.items()]


class Walk:
    """A pass over a graph that fills `channels`. Its methods return None if they do not know an operation."""

    def __init__(self, model: nn.Module, graph: fx.Graph, channels: ChannelGraph) -> None:
        self.channels = channels
        self.modules = dict(model.named_modules())
        self.values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            method = getattr(self, f"_{node.op}", None)  # placeholders and the output have none
            result = None if method is None else method(node)
            if result is None:  # the result is in its natural order
                operands = [self.values[input_node] for input_node in node.all_input_nodes]
                only_numbers = bool(operands) and all(value is NUMBER for value in operands)
                result = NUMBER if only_numbers else channels.freeze(*operands)
            shape = _shape(node)
            if shape is not None and isinstance(result, Natural) and result.tensor is None:
                result = Natural(shape, len(shape))
            elif shape is not None and isinstance(result, Labelled):
                result = replace(result, rank=len(shape), exact=shape[result.dim] == len(result.ids))
            self.values[node] = result

    def _value(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, fx.Node) else NUMBER

    def _get_attr(self, node: fx.Node) -> Any:
        path, _, name = str(node.target).rpartition(".")
        tensor = getattr(self.modules[path], name, None)
        return Natural(tuple(tensor.shape), tensor.dim(), tensor) if isinstance(tensor, Tensor) else None

    def _call_module(self, node: fx.Node) -> Any:
        module: Any = self.modules[str(node.target)]
        if _has_hooks(module) or hasattr(module, "parametrizations"):
            return None
        if isinstance(module, nn.MultiheadAttention):
            return self._attention(node, module)
        if len(node.all_input_nodes) != 1 or not node.args:
            return None
        value = self._value(node.args[0])
        if isinstance(module, nn.Linear):
            self._columns(value, -1, self.channels.axis(module.weight, 1))
            return Labelled(-1, self._rows(module).ids, getattr(value, "rank", None))
        if isinstance(module, LAYERS):
            return self._convolution(value, module)
        if isinstance(module, nn.Embedding):
            self.channels.freeze(value, self.channels.axis(module.weight, 0))
            rank = getattr(value, "rank", None)
            return Labelled(-1, self.channels.axis(module.weight, 1).ids, None if rank is None else rank + 1)
        if isinstance(module, nn.Flatten):
            return self._flattened(node, value, module.start_dim, module.end_dim)
        if isinstance(module, _NORMS) or type(module).__module__.startswith("apex.normalization."):
            return self._normalized(module, value)
        names = (base.__name__.lower() for base in type(module).__mro__)
        name = next((name for name in names if name in _ELEMENTWISE or name in _SPATIAL), None)
        return None if name is None or getattr(module, "return_indices", False) else self._operation(node, name)

    def _call_method(self, node: fx.Node) -> Any:
        return self._operation(node, str(node.target))

    def _call_function(self, node: fx.Node) -> Any:
        module = (getattr(node.target, "__module__", None) or "torch").split(".")[0]
        known = module in ("torch", "_operator", "builtins") and bool(node.args)
        return self._operation(node, getattr(node.target, "__name__", "")) if known else None

    def _operation(self, node: fx.Node, name: str) -> Any:
        """Return the result of the function, method or layer of this name."""
        name = name.replace("_", "").lower()
        value = self._value(node.args[0])
        if name in _SIZES or (name == "getattr" and node.args[1] in _SIZES):
            return NUMBER
        if name in _ELEMENTWISE:
            return self.channels.elementwise([self.values[input_node] for input_node in node.all_input_nodes])
        if name == "getitem" and not isinstance(value, Labelled):
            return NUMBER if value is NUMBER else value[node.args[1]] if isinstance(value, tuple) else None
        if name in ("cat", "concat"):
            (dim,) = _arguments(node, dim=0)
            values = [self._value(input_node) for input_node in node.args[0]]  # type: ignore[union-attr]
            return self.channels.concatenated(values, dim) if isinstance(dim, int) else None
        if name == "expand":  # only along dimensions of length 1
            return value if isinstance(value, Natural) and value.tensor is not None else None
        if not isinstance(value, Labelled):
            return None
        if name in _SPATIAL:
            return value if value.dim < -_SPATIAL[name] and not node.kwargs.get("return_indices") else None
        if name == "flatten":
            return self._flattened(node, value, *_arguments(node, start_dim=0, end_dim=-1))
        if name in ("view", "reshape"):
            return self._flattened(node, value, 1, -1) if _is_flattening(node) else None
        return self._rearranged(node, value, name)

    def _rows(self, module: Any) -> Axis:
        """Join the output channels of a layer with its bias and return their axis."""
        rows = self.channels.axis(module.weight, 0)
        if isinstance(getattr(module, "bias", None), Tensor):
            self.channels.join(rows.ids, self.channels.axis(module.bias, 0).ids)
        return rows

    def _columns(self, value: Any, dim: int, columns: Axis) -> None:
        """Join the channels of a layer's input with the columns of its weight."""
        if isinstance(value, Labelled) and value.dim == dim and len(value.ids) == len(columns.ids):
            self.channels.join(value.ids, columns.ids)
        else:
            self.channels.freeze(value, columns)

    def _convolution(self, value: Any, module: Any) -> Labelled:
        dim, groups, rows = -len(module.kernel_size) - 1, module.groups, self._rows(module)
        if groups == 1:
            self._columns(value, dim, self.channels.axis(module.weight, 1))
        elif groups == module.in_channels == module.out_channels:  # a depthwise convolution
            self._columns(value, dim, rows)
        else:
            self.channels.freeze(rows)
            width, height = module.in_channels // groups, module.out_channels // groups
            fits = isinstance(value, Labelled) and value.dim == dim and len(value.ids) == module.in_channels
            for group in range(groups):
                part = replace(value, ids=value.ids[group * width : (group + 1) * width]) if fits else value
                rows_of_group = (group * height, (group + 1) * height)
                self._columns(part, dim, self.channels.axis(module.weight, 1, rows_of_group))
        return Labelled(dim, rows.ids, 1 - dim)

    def _attention(self, node: fx.Node, module: nn.MultiheadAttention) -> Any:
        """Return the result of attention.

        Columns of the input projections and rows of the output projection can be permuted.
        """
        names = ("query", "key", "value")
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if not all(name in arguments for name in names):
            return None
        inputs = [self._value(arguments.pop(name)) for name in names]
        self.channels.freeze(*(self._value(argument) for argument in arguments.values()))
        size, projections = module.embed_dim, (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        for index, (value, weight) in enumerate(zip(inputs, projections, strict=True)):
            rows = (index * size, (index + 1) * size)
            fused = module.in_proj_weight
            self._columns(value, -1, self.channels.axis(*((weight, 1) if fused is None else (fused, 1, rows))))
        self.channels.freeze(self.channels.axis(module.out_proj.weight, 1))
        return Labelled(-1, self._rows(module.out_proj).ids, getattr(inputs[0], "rank", None)), Natural()

    def _normalized(self, module: Any, value: Any) -> Labelled | None:
        """Join the channels with the parameters and statistics that a normalization has for each of them.

        If the input's rank is unknown, a BatchNorm1d is assumed to get two dimensions.
        """
        if not isinstance(value, Labelled):
            return None
        shape = tuple(getattr(module, "normalized_shape", ()))  # the sizes of the last dimensions
        if shape and -value.dim > len(shape):
            return value
        dim = len(shape) + value.dim if shape else 0
        at_one = isinstance(module, nn.BatchNorm1d) if value.rank is None else value.positive_dim == 1
        if not shape and at_one:
            shape = (getattr(module, "num_features", 0),)
        if not shape or shape[dim] != len(value.ids):
            return None
        for name in ("weight", "bias", "running_mean", "running_var"):
            if isinstance(getattr(module, name, None), Tensor):
                self.channels.join(value.ids, self.channels.axis(getattr(module, name), dim).ids)
        return value

    def _flattened(self, node: fx.Node, value: Any, start: int, end: int) -> Labelled | None:
        if not isinstance(value, Labelled) or value.rank is None:
            return None
        start, end, channel_dim = start % value.rank, end % value.rank, value.positive_dim
        if start < channel_dim <= end:
            return None
        shape = _shape(node.all_input_nodes[0])
        no_merge = (
            start != channel_dim
            or start == end
            or (shape is not None and all(size == 1 for size in shape[start + 1 :]))
        )
        return replace(value.moved([*range(start + 1), *range(end + 1, value.rank)]), exact=value.exact and no_merge)

    def _rearranged(self, node: fx.Node, value: Labelled, name: str) -> Any:
        """Return the result of a function that moves or removes dimensions."""
        if value.rank is None:
            return None
        order = list(range(value.rank))
        if name in ("transpose", "permute"):
            dims = node.args[1] if isinstance(node.args[1], list | tuple) else node.args[1:]
            if not all(isinstance(dim, int) for dim in dims):
                return None
            moved = [order[dim] for dim in dims]  # type: ignore[index]
            if name == "permute":
                return value.moved(moved)
            order[moved[0]], order[moved[1]] = moved[1], moved[0]
        elif name in ("mean", "sum", "amax", "amin"):
            dims, keepdim = _arguments(node, dim=None, keepdim=False)
            dims = (dims,) if isinstance(dims, int) else dims
            if not isinstance(dims, list | tuple):
                return None
            gone = {dim % value.rank for dim in dims}
            if value.positive_dim in gone:  # the result does not depend on the order of channels
                return Natural()
            order = [dim for dim in order if keepdim or dim not in gone]
        elif name == "getitem":  # only integers and slices that keep all channels
            entries = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            if len(entries) > value.rank or not all(isinstance(entry, int | slice) for entry in entries):
                return None
            if entries[value.positive_dim : value.positive_dim + 1] not in ((), (slice(None),)):
                return None
            gone = {dim for dim, entry in enumerate(entries) if isinstance(entry, int)}
            order = [dim for dim in order if dim not in gone]
        else:
            return None
        return value.moved(order)


def _is_flattening(node: fx.Node) -> bool:
    """Return whether the node is `x.view(x.size(0), -1)`, or the same with `x.shape[0]`."""
    if len(node.args) != 3 or node.args[2] != -1 or not isinstance(node.args[1], fx.Node):
        return False
    source, size = node.args[:2]
    shape = size.args[0] if size.args else None
    by_shape = isinstance(shape, fx.Node) and shape.args == (source, "shape") and size.args[1] == 0
    return by_shape or (size.target == "size" and tuple(size.args) == (source, 0))
