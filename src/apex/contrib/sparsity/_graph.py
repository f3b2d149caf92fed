"""Follows channels through the traced graph of a model: what each layer and function does to them.

Only layers and functions named here are known; `_channels.py` says what happens at all others.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules import batchnorm, instancenorm

from ._channels import NUMBER, Attribute, Axis, Channels, Labelled, Natural

_ELEMENTWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh,
    nn.Softplus, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LogSigmoid, nn.Softmax, nn.Softmax2d, nn.LogSoftmax,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity,
)  # fmt: skip
# How many of the last dimensions they look at together.
_SPATIAL_MODULES: dict[type, int] = {
    nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3, nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3,
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3, nn.AdaptiveMaxPool2d: 2,
    nn.ZeroPad2d: 2, nn.ReflectionPad2d: 2, nn.ReplicationPad2d: 2, nn.UpsamplingNearest2d: 2,
}  # fmt: skip
_ELEMENTWISE = frozenset({
    "add", "sub", "mul", "div", "truediv", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "abs", "clamp", "maximum",
    "minimum", "erf", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh",
    "softplus", "hardsigmoid", "hardswish", "hardtanh", "logsigmoid", "softmax", "log_softmax", "dropout", "dropout1d",
    "dropout2d", "dropout3d", "alpha_dropout", "clone", "contiguous", "detach", "to", "float", "half", "double",
    "bfloat16", "iadd", "isub", "imul", "itruediv", "radd", "rsub", "rmul",
})  # fmt: skip
_SPATIAL = {f"{kind}_pool{n}d": n for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)}
_SIZES = frozenset({"size", "dim", "numel", "shape", "dtype", "device", "ndim"})
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _Tracer(fx.Tracer):
    """Does not look into the layers of this package, nor into what has hooks, which a graph does not show."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        hooked = bool(m._forward_hooks or m._forward_pre_hooks)
        return hooked or type(m).__module__.startswith("apex.") or super().is_leaf_module(m, module_qualified_name)


def trace(model: nn.Module, examples: tuple | None) -> fx.Graph:
    """The graph of the model with what its arguments are by default, but for those that examples are given for.

    With examples, nodes know the shapes of their results.
    """
    parameters = list(inspect.signature(model.forward).parameters.values())[len(examples or ()) :]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    attributes = set(vars(model))
    try:
        graph = _Tracer().trace(model, concrete_args=defaults or None)
        if examples is not None:
            from torch.fx.passes.shape_prop import ShapeProp

            ShapeProp(fx.GraphModule(model, graph)).propagate(*examples, *defaults.values())
    finally:
        for name in set(vars(model)) - attributes:  # constants of the graph
            model.__dict__.pop(name)
    return graph


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return None if shape is None else tuple(shape)


def _arguments(node: fx.Node, **wanted: Any) -> list[Any]:
    """Arguments after the first, by position or name."""
    given = dict(zip(wanted, node.args[1:], strict=False))
    return [given.get(name, node.kwargs.get(name, default)) for name, default in wanted.items()]


class Walk:
    """One walk along a graph, which fills `channels`."""

    def __init__(self, model: nn.Module, graph: fx.Graph, channels: Channels) -> None:
        self.channels = channels
        self.modules = dict(model.named_modules())
        self.values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            found = getattr(self, f"_{node.op}")(node)
            found = self._unknown(node) if found is None else found
            shape = _shape(node)
            if shape is not None and isinstance(found, Natural):
                found = Natural(len(shape), shape)
            elif shape is not None and isinstance(found, Labelled):
                found = replace(found, rank=len(shape), exact=shape[found.dim] == len(found.ids))
            self.values[node] = found

    def _value(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, fx.Node) else NUMBER

    def _unknown(self, node: fx.Node) -> Any:
        """Freezes all arguments: what comes out is in its natural order."""
        given = [self.values[each] for each in node.all_input_nodes]
        only_numbers = bool(given) and all(value is NUMBER for value in given)
        return NUMBER if only_numbers else self.channels.freeze(*given)

    # Nodes: None where they are not known -----------------------------------------------------------------------------

    def _placeholder(self, node: fx.Node) -> Any:
        return Natural()

    def _output(self, node: fx.Node) -> Any:
        return None

    def _get_attr(self, node: fx.Node) -> Any:
        path, _, name = str(node.target).rpartition(".")
        tensor = getattr(self.modules[path], name, None)
        return Attribute(self.modules[path], name, tensor) if isinstance(tensor, Tensor) else None

    def _call_module(self, node: fx.Node) -> Any:
        module: Any = self.modules[str(node.target)]
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
            return None
        if isinstance(module, nn.MultiheadAttention):
            return self._attention(node, module)
        if len(node.all_input_nodes) != 1 or not node.args:
            return None
        value = self._value(node.args[0])
        if isinstance(module, nn.Linear):
            self._columns(value, -1, self.channels.axis(module, "weight", 1))
            return Labelled(-1, self._rows(module).ids, getattr(value, "rank", None))
        if isinstance(module, _CONVOLUTIONS):
            return self._convolution(value, module)
        if isinstance(module, nn.Embedding):
            self.channels.freeze(value, self.channels.axis(module, "weight", 0))
            rank = getattr(value, "rank", None)
            return Labelled(-1, self.channels.axis(module, "weight", 1).ids, None if rank is None else rank + 1)
        if isinstance(module, _ELEMENTWISE_MODULES):
            return self.channels.elementwise([value])
        if not isinstance(value, Labelled):
            return None
        if isinstance(module, batchnorm._BatchNorm | instancenorm._InstanceNorm):
            at_one = value.place == 1 or (value.rank is None and isinstance(module, nn.BatchNorm1d))
            fits = at_one and module.num_features == len(value.ids)
            return (
                self._per_channel(module, value, 0, "weight", "bias", "running_mean", "running_var") if fits else None
            )
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__module__.startswith("apex.normalization."):
            shape = tuple(getattr(module, "normalized_shape", ()))
            if not shape or -value.dim > len(shape):
                return value if shape else None
            fits = shape[value.dim] == len(value.ids)
            return self._per_channel(module, value, len(shape) + value.dim, "weight", "bias") if fits else None
        if isinstance(module, nn.Flatten):
            return self._flattened(node, value, module.start_dim, module.end_dim)
        looks_at = next((dims for kind, dims in _SPATIAL_MODULES.items() if isinstance(module, kind)), None)
        return value if looks_at is not None and value.dim < -looks_at else None

    def _call_method(self, node: fx.Node) -> Any:
        name = str(node.target).rstrip("_")
        value = self._value(node.args[0])
        if name in _SIZES or (name == "getattr" and node.args[1] in _SIZES):
            return NUMBER
        if name in _ELEMENTWISE:
            return self.channels.elementwise([self.values[each] for each in node.all_input_nodes])
        if name == "getitem":
            return self._item(value, node.args[1])
        if name in ("cat", "concat"):
            (dim,) = _arguments(node, dim=0)
            values = [self._value(each) for each in node.args[0]]  # type: ignore[union-attr]
            return self.channels.concatenated(values, dim) if isinstance(dim, int) else None
        if name == "expand":  # in dimensions of length 1
            return value if isinstance(value, Attribute) else None
        if not isinstance(value, Labelled):
            return None
        if name in _SPATIAL:
            return value if value.dim < -_SPATIAL[name] else None
        if name == "flatten":
            return self._flattened(node, value, *_arguments(node, start_dim=0, end_dim=-1))
        if name in ("view", "reshape"):
            return self._flattened(node, value, 1, -1) if _is_flattening(node) else None
        if name in ("transpose", "permute"):
            return self._rearranged(node, value, name)
        return self._reduced(node, value) if name in ("mean", "sum", "amax", "amin") else None

    def _call_function(self, node: fx.Node) -> Any:
        module = (getattr(node.target, "__module__", None) or "torch").split(".")[0]
        if module not in ("torch", "_operator", "builtins") or not node.args:
            return None
        return self._call_method(_Named(node, getattr(node.target, "__name__", "")))  # type: ignore[arg-type]

    # Layers -----------------------------------------------------------------------------------------------------------

    def _rows(self, module: nn.Module) -> Axis:
        """The output channels of a layer, joined with its bias."""
        rows = self.channels.axis(module, "weight", 0)
        if isinstance(getattr(module, "bias", None), Tensor):
            self.channels.join(rows.ids, self.channels.axis(module, "bias", 0).ids)
        return rows

    def _columns(self, value: Any, dim: int, columns: Axis) -> None:
        """Joins the channels of a layer's input with the columns of its weight."""
        if isinstance(value, Labelled) and value.dim == dim and len(value.ids) == len(columns.ids):
            self.channels.join(value.ids, columns.ids)
        else:
            self.channels.freeze(value, columns)

    def _convolution(self, value: Any, module: Any) -> Labelled:
        dim, groups, rows = -len(module.kernel_size) - 1, module.groups, self._rows(module)
        if groups == 1:
            self._columns(value, dim, self.channels.axis(module, "weight", 1))
        elif groups == module.in_channels == module.out_channels:  # a filter for each channel
            self._columns(value, dim, rows)
        else:
            self.channels.freeze(rows)
            width, height = module.in_channels // groups, module.out_channels // groups
            fits = isinstance(value, Labelled) and value.dim == dim and len(value.ids) == module.in_channels
            for group in range(groups):
                part = replace(value, ids=value.ids[group * width : (group + 1) * width]) if fits else value
                rows_of_group = (group * height, (group + 1) * height)
                self._columns(part, dim, self.channels.axis(module, "weight", 1, rows_of_group))
        return Labelled(dim, rows.ids, 1 - dim)

    def _attention(self, node: fx.Node, module: nn.MultiheadAttention) -> Any:
        """Columns of the projections of query, key and value, and rows of the last one, can be permuted."""
        names = ("query", "key", "value")
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if not all(name in given for name in names):
            return None
        inputs = [self._value(given.pop(name)) for name in names]
        self.channels.freeze(*(self._value(each) for each in given.values()))
        size = module.embed_dim
        for place, value in enumerate(inputs):
            if module.in_proj_weight is not None:
                columns = self.channels.axis(module, "in_proj_weight", 1, (place * size, (place + 1) * size))
            else:
                columns = self.channels.axis(module, f"{names[place][0]}_proj_weight", 1)
            self._columns(value, -1, columns)
        self.channels.freeze(self.channels.axis(module.out_proj, "weight", 1))
        return Labelled(-1, self._rows(module.out_proj).ids, getattr(inputs[0], "rank", None)), Natural()

    def _per_channel(self, module: nn.Module, value: Labelled, dim: int, *names: str) -> Labelled:
        """Joins the channels with what a layer has one number of for each."""
        for name in names:
            if isinstance(getattr(module, name, None), Tensor):
                self.channels.join(value.ids, self.channels.axis(module, name, dim).ids)
        return value

    # Functions: None where channels cannot be told apart any more -----------------------------------------------------

    def _flattened(self, node: fx.Node, value: Labelled, start: int, end: int) -> Labelled | None:
        place = value.place
        if value.rank is None or place is None:
            return None
        start, end = start % value.rank, end % value.rank
        rank = value.rank - (end - start)
        if end < place:
            return replace(value, rank=rank)
        if start < place:
            return None
        shape = _shape(node.all_input_nodes[0])
        alone = start > place or start == end or (shape is not None and all(size == 1 for size in shape[place + 1 :]))
        return replace(value, rank=rank, dim=place - rank, exact=value.exact and alone)

    def _rearranged(self, node: fx.Node, value: Labelled, name: str) -> Labelled | None:
        dims = node.args[1] if isinstance(node.args[1], list | tuple) else node.args[1:]
        if value.rank is None or value.place is None or not all(isinstance(dim, int) for dim in dims):
            return None
        dims = [dim % value.rank for dim in dims]  # type: ignore[operator]
        if name == "transpose":
            one, other = dims
            dims = [other if dim == one else one if dim == other else dim for dim in range(value.rank)]
        return replace(value, dim=dims.index(value.place) - value.rank)

    def _reduced(self, node: fx.Node, value: Labelled) -> Any:
        dims, keepdim = _arguments(node, dim=None, keepdim=False)
        dims = (dims,) if isinstance(dims, int) else dims
        if value.rank is None or value.place is None or not isinstance(dims, list | tuple):
            return None
        places = {dim % value.rank for dim in dims}
        rank = value.rank if keepdim else value.rank - len(places)
        if value.place in places:  # does not depend on the order of channels
            return Natural(rank)
        right = 0 if keepdim else sum(place > value.place for place in places)
        return replace(value, rank=rank, dim=value.dim + right)

    def _item(self, value: Any, index: Any) -> Any:
        """Of a tuple, or a tensor indexed with integers and slices that leave the channels alone."""
        if value is NUMBER:
            return NUMBER
        if type(value) is tuple:
            return value[index]
        entries = index if isinstance(index, tuple) else (index,)
        if not isinstance(value, Labelled) or value.rank is None or value.place is None:
            return None
        if len(entries) > value.rank or not all(isinstance(each, int | slice) for each in entries):
            return None
        if value.place < len(entries) and entries[value.place] != slice(None):
            return None
        gone = [place for place, entry in enumerate(entries) if isinstance(entry, int)]
        return replace(value, rank=value.rank - len(gone), dim=value.dim + sum(at > value.place for at in gone))


class _Named:
    """A node that calls a function, under the function's name."""

    def __init__(self, node: fx.Node, target: str) -> None:
        self.target, self.args, self.kwargs = target, node.args, node.kwargs
        self.all_input_nodes, self.meta = node.all_input_nodes, node.meta


def _is_flattening(node: fx.Node) -> bool:
    """Whether it is `x.view(x.size(0), -1)`, or with `x.shape[0]`."""
    if len(node.args) != 3 or node.args[2] != -1 or not isinstance(node.args[1], fx.Node):
        return False
    source, size = node.args[:2]
    shape = size.args[0] if size.args else None
    by_shape = isinstance(shape, fx.Node) and shape.args == (source, "shape") and size.args[1] == 0
    return by_shape or (size.target == "size" and tuple(size.args) == (source, 0))
