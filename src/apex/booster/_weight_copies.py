"""Half-precision copies of the weights that products read, made once in each forward pass under autocast.

Autocast casts a float32 weight where a product reads it, and its gradient back to float32. That takes launches for each
weight, and twice the bytes for its gradient. A weight that no product reads, an embedding or a position, widens the
activations to float32. Here one launch casts all such weights, and their gradients stay in half precision, as the
products computed them. A fused optimizer widens them as it reads them.

The model's parameters stay float32 and stay the model's: whatever reads, saves, loads, averages or changes them acts as
on any other model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._fuse.rule import FusedModule
from ..ops._library import sees_operators_only
from ..optimizers._base import FusedOptimizer
from ._snapshot import ForwardSnapshot

_aten = torch.ops.aten
# Operators whose result has the elements of a weight and no arithmetic.
_MOVES = {_aten.repeat, _aten.clone, _aten.index, _aten.index_select}
# Operators that give float32 for a half-precision activation and a float32 weight.
_WIDENING = {_aten.add, _aten.sub, _aten.mul, _aten.cat, _aten.stack, _aten.where, _aten.addcmul, _aten.lerp}


class _Uses(TorchDispatchMode):
    """A record of how a forward pass under autocast uses parameters.

    A parameter fits a half-precision copy if each use casts it to `dtype`, looks rows of it up, or adds it to, joins it
    with or multiplies it by a half-precision activation. A single number, such as a temperature, does not, nor does a
    parameter that the forward pass changes.
    """

    def __init__(self, weights: list[Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._weights, self._dtype = weights, dtype
        self._number_of = {_storage(weight): number for number, weight in enumerate(weights)}
        self._fits: set[int] = set()
        self._others: set[int] = set()
        self._lookups: dict[int, int] = {}  # numbers of embeddings, by the storage of rows of them
        self._alive: list[Tensor] = []  # their storages' addresses are keys of dicts here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
        pairs = [(self._number_of.get(_storage(tensor)), tensor) for tensor in tensors]
        for number, weight in pairs:
            if number is not None:
                self._note(number, weight, func, result, [tensor for other, tensor in pairs if other is None], args)
        if func.overloadpacket in (_aten.mul, _aten.sub):
            # A score of an embedding and another vector, which no product rounds under autocast.
            shapes = [tensor.shape for tensor in tensors]
            for tensor in tensors:
                if _storage(tensor) in self._lookups and len(tensors) > 1 and shapes[0] == shapes[1]:
                    self._others.add(self._lookups[_storage(tensor)])
        return result

    def _note(self, number: int, weight: Tensor, func: Any, result: Any, others: list[Tensor], args: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
        if func._schema.is_mutable:  # such as an embedding's max_norm, which would change the copy
            self._others.add(number)
            return
        if outputs and all(_storage(output) == _storage(weight) for output in outputs):
            return  # a view
        packet = func.overloadpacket
        if packet in _MOVES and outputs[0].dtype == weight.dtype:
            self._number_of[_storage(outputs[0])] = number
            self._alive.append(outputs[0])
            return
        is_cast = packet is _aten._to_copy and outputs[0].dtype == self._dtype
        is_lookup = packet is _aten.embedding and (len(args) < 5 or not args[4])  # not with sparse gradients
        widens = (
            packet in _WIDENING
            and weight.numel() > 1
            and outputs[0].dtype == torch.float32
            and any(other.dim() and other.dtype == self._dtype for other in others)
        )
        if is_lookup:
            self._lookups[_storage(outputs[0])] = number
            self._alive.append(outputs[0])
        (self._fits if is_cast or is_lookup or widens else self._others).add(number)

    def fitting(self) -> list[Tensor]:
        """Return the weights that fit half-precision copies."""
        return [self._weights[number] for number in sorted(self._fits - self._others)]


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a model returns: containers, and attributes of objects such as dataclasses."""
    for leaf in tree_leaves(outputs):
        for value in (leaf,) if isinstance(leaf, Tensor) else tree_leaves(list(getattr(leaf, "__dict__", {}).values())):
            if isinstance(value, Tensor):
                yield value


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _set_grad_dtype(weight: Tensor, dtype: torch.dtype | None) -> None:
    """Choose the dtype of a parameter's gradients; None for any."""
    if weight.requires_grad and hasattr(weight, "grad_dtype"):
        gradient, weight.grad = weight.grad, None
        weight.grad_dtype = dtype
        weight.grad = gradient if gradient is None or dtype is None else gradient.to(dtype)


class _Cast(torch.autograd.Function):
    """A cast of many tensors at once; the gradients stay in half precision."""

    @staticmethod
    def forward(ctx: Any, owner: WeightCopies, *weights: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.owner, ctx.weights = owner, weights
        ctx.set_materialize_grads(False)
        copies = [torch.empty_like(weight, dtype=owner.dtype) for weight in weights]
        torch._foreach_copy_(copies, weights)
        ctx.mark_non_differentiable(*(c for c, w in zip(copies, weights, strict=True) if not w.requires_grad))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        for weight, gradient in zip(ctx.weights, gradients, strict=True):
            # Several backward passes add up in float32, as under autocast.
            if gradient is not None and weight.grad is not None and weight.grad.dtype == gradient.dtype:
                weight.grad = weight.grad.float()
        return None, *gradients


class WeightCopies:
    """Half-precision copies of a model's float32 weights, which replace them inside of a forward pass.

    The first forward passes with gradients find the weights that `_Uses` says fit. Gradients keep the copies' dtype if
    a fused optimizer takes them (PyTorch 2.10 and newer have such gradients). Each other method of the model has copies
    of its own, because it may use other weights in other ways: `first` has those of the forward pass.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, first: WeightCopies | None = None) -> None:
        self.dtype, self._model = dtype, model
        self._by_method: dict[str, WeightCopies] = {"": self} if first is None else first._by_method
        # Parameters whose gradients keep the copies' dtype.
        self._narrow: set[Tensor] = set() if first is None else first._narrow
        if first is None:
            self._keep_dtypes(True)
        self.weights: list[Tensor] = []
        # Modules, names of their parameters, and the numbers of the parameters in `weights`.
        self._places: list[tuple[nn.Module, str, int]] = []
        self._is_complete = self._is_active = self._is_in_backward = False
        # Of the last forward pass, until its backward pass is over: attributes of modules, names and copies.
        self._copies: list[tuple[dict[str, Any], str, Tensor]] = []
        self._copied_places: Any = None  # the places that these copies are for

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "weights": [], "_places": [], "_copies": [], "_copied_places": None, "_narrow": set()}
        state["_by_method"] = {"": self}
        return {**state, "_is_complete": False, "_is_active": False, "_is_in_backward": False}

    def take_optimizer(self, optimizer: Any) -> None:
        """Choose the dtype of the gradients of an optimizer's parameters."""
        params = {param for group in optimizer.param_groups for param in group["params"]}
        (self._narrow.update if isinstance(optimizer, FusedOptimizer) else self._narrow.difference_update)(params)
        for copies in self._by_method.values():
            copies._forget()

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model, or a method of it, under autocast, with copies in place of weights."""
        for copies in self._by_method.values():
            if copies._is_in_backward and torch._C._current_graph_task_id() == -1:
                copies._end_backward()  # an error ended the backward pass
        name = function.__name__ if isinstance(function, MethodType) else ""
        if name not in self._by_method:
            self._by_method[name] = WeightCopies(self._model, self.dtype, self)
        return self._by_method[name]._run(function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_alone = not (dist.is_available() and dist.is_initialized())  # others exchange float32 gradients
        if self._is_active or not torch.is_grad_enabled() or not is_alone or sees_operators_only():
            return function(*args, **kwargs)
        is_current = self._are_current()
        if is_current and self._is_complete:
            return self._with_copies(function, args, kwargs, None)
        if not all(weight.is_leaf for *_, weight in self._named_weights()):  # of torch.func.functional_call
            return function(*args, **kwargs)
        if not is_current:
            self._forget()
        before, uses = ForwardSnapshot([self._model]), _Uses(self._other_weights(), self.dtype)
        try:
            outputs = self._with_copies(function, args, kwargs, uses)
        except Exception:
            pass  # tried again outside of this block, so that the traceback and its tensors are freed
        else:
            self._add(uses.fitting())
            return outputs
        # Some operators (Fourier transforms) take no half precision, and some compute in other ways while watched.
        before.restore()
        self._forget()
        self._keep_dtypes(False)
        try:
            outputs = function(*args, **kwargs)
        except Exception:  # an error of the model or the call
            self._keep_dtypes(True)
            raise
        self._is_complete = True
        return outputs

    def _forget(self) -> None:
        """Use no copies; gradients that come from now on are float32."""
        for weight in self.weights:
            _set_grad_dtype(weight, weight.dtype)
        self.weights, self._places, self._copies, self._copied_places, self._is_complete = [], [], [], None, False

    def _keep_dtypes(self, value: bool) -> None:
        """Choose whether fused norms give their input's dtype, or float32, as autocast's do."""
        for module in self._model.modules():
            if isinstance(module, FusedModule):
                module.keeps_dtype = value

    def _with_copies(self, function: Callable[..., Any], args: Any, kwargs: Any, uses: _Uses | None) -> Any:
        self._make(self.weights, self._places)
        with self._active(), uses or contextlib.nullcontext():
            outputs = function(*args, **kwargs)
        # Checkpointed layers run again in the backward pass, with copies of the same weights.
        begin_backward = functools.partial(self._begin_backward, self.weights, self._places)
        for output in _tensors(outputs):
            if output.requires_grad:
                output.register_hook(begin_backward)
        return outputs

    def _make(self, weights: list[Tensor], places: list[tuple[nn.Module, str, int]]) -> None:
        copies = _Cast.apply(self, *weights) if weights else ()
        self._copies = [(vars(module), name, copies[number]) for module, name, number in places]
        self._copied_places = places

    def _are_current(self) -> bool:
        return all(
            module._parameters.get(name) is self.weights[number] and self.weights[number].dtype == torch.float32
            for module, name, number in self._places
        )

    def _named_weights(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in self._model.modules():
            if not isinstance(module, torch.jit.ScriptModule | nn.RNNBase):  # these read no attributes of Python
                for name, param in module._parameters.items():
                    if param is not None and param.dtype == torch.float32:
                        yield module, name, param

    def _other_weights(self) -> list[Tensor]:
        has_copies = set(map(id, self.weights))
        return list({param: None for _, _, param in self._named_weights() if id(param) not in has_copies})

    def _add(self, found: list[Tensor]) -> None:
        """Make copies of these weights, too, from the next forward pass on.

        With copies of embeddings the activations are narrow that positions are added to: these fit in the next pass.
        """
        self.weights = [*self.weights, *found]
        self._is_complete = not found
        numbers = {param: number for number, param in enumerate(self.weights)}
        named = self._named_weights()
        self._places = [(module, name, numbers[param]) for module, name, param in named if param in numbers]
        for weight in found:
            _set_grad_dtype(weight, None if weight in self._narrow else weight.dtype)

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        """Let attributes of modules be the copies inside the block; their parameters stay what they are."""
        self._activate()
        try:
            yield
        finally:
            self._deactivate()

    def _activate(self) -> None:
        self._is_active = True
        for attributes, name, copy in self._copies:
            attributes[name] = copy

    def _deactivate(self) -> None:
        for attributes, name, _ in self._copies:
            attributes.pop(name, None)
        self._is_active = False

    def _begin_backward(
        self, weights: list[Tensor], places: list[tuple[nn.Module, str, int]], gradient: Tensor
    ) -> None:
        """Use the copies that a forward pass had, in its backward pass; copies of an earlier pass are made again."""
        if self._copied_places is places if self._is_in_backward else self._is_active:
            return
        if not self._is_in_backward:
            self._is_in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        self._deactivate()
        if self._copied_places is not places:
            with torch.enable_grad():
                self._make(weights, places)
        self._activate()

    def _end_backward(self) -> None:
        self._deactivate()
        self._copies, self._copied_places, self._is_in_backward = [], None, False
