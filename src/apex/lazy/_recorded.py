"""Recorded tensors: operations are noted on tensors without data, and run when the data is needed.

A storage has one `State` after each operation that wrote to it. A `LazyTensor` is a view of the newest state of its
storage. `replay` runs the operations that lead to a state, on real tensors, with the random numbers that they would
have had when they were recorded.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)

from ..ops._host import HOST

_META = torch.device("meta")
_numbers = itertools.count()
# In-place operations that overwrite a whole tensor without reading it: older operations need not run.
_FILLS = {"uniform_", "normal_", "zero_", "fill_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_"}


class State:
    """The content of a storage after an operation, which is None for memory that nothing was written to."""

    __slots__ = ("device", "nbytes", "operation")

    def __init__(self, operation: Operation | None, storage: Any, device: torch.device) -> None:
        self.operation, self.nbytes, self.device = operation, storage.nbytes(), device

    def empty(self) -> torch.UntypedStorage:
        """Return a storage of this size, with any content."""
        return torch.UntypedStorage(self.nbytes, device=self.device)


class Contents:
    """The newest state of a storage, shared by all tensors that are views of it."""

    __slots__ = ("state",)

    def __init__(self, state: State) -> None:
        self.state = state


class View:
    """A tensor that an operation takes: a state of a storage, and where the elements are in the storage."""

    __slots__ = ("dtype", "layout", "state")

    def __init__(self, lazy: LazyTensor) -> None:
        meta = lazy._meta
        self.state, self.dtype = lazy._contents.state, meta.dtype
        self.layout = (meta.storage_offset(), meta.shape, meta.stride())

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the elements out of a real storage."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.layout)


class Constant:
    """A real tensor that an operation takes; it must not change until the operation runs."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def value(self, function: Any) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"{function} of a LazyInitContext took a tensor of shape {tuple(self.tensor.shape)} that has been "
                "changed in place since; give it a copy"
            )
        return self.tensor


class Operation:
    """A call of an operator: `leaves` are its arguments as View, Constant or plain values, flattened.

    `results` are the states that it makes, each with the number of the argument or (after all arguments) output whose
    storage it is. `random` is the state of the random generator before the call.
    """

    def __init__(self, function: Any, leaves: list[Any], structure: Any) -> None:
        self.function, self.leaves, self.structure = function, leaves, structure
        self.number = next(_numbers)
        self.random: Randomness | None = None
        self.results: list[tuple[int, State]] = []

    def call(self, leaves: list[Any]) -> Any:
        args, kwargs = _pytree.tree_unflatten(leaves, self.structure)
        return self.function(*args, **kwargs)

    def run(self, storages: dict[State, torch.UntypedStorage], uses: Counter[State]) -> None:
        """Run the operation; take its arguments from `storages`, and put its results there.

        `uses` counts how often each state is still needed. The last operation that needs a storage may change it.
        """
        views = {index: leaf for index, leaf in enumerate(self.leaves) if isinstance(leaf, View)}
        uses.subtract(leaf.state for leaf in views.values())
        written = {views[index].state for index, _ in self.results if index in views}
        taken: dict[State, torch.UntypedStorage] = {}
        for state in {leaf.state for leaf in views.values()}:
            if state not in storages:
                storages[state] = state.empty()
            storage = storages[state] if uses[state] else storages.pop(state)
            taken[state] = storage.clone() if uses[state] and state in written else storage
        leaves = [leaf.value(self.function) if isinstance(leaf, Constant) else leaf for leaf in self.leaves]
        for index, leaf in views.items():
            leaves[index] = leaf.of(taken[leaf.state])
        with self.random.repeated() if self.random is not None else contextlib.nullcontext():
            outputs = _pytree.tree_leaves(self.call(leaves))
        places = [*leaves, *outputs]
        for index, state in self.results:
            storages[state] = places[index].untyped_storage()


class Randomness:
    """The state of the random generator before an operation draws from it."""

    def __init__(self, leaves: list[Any], device: torch.device) -> None:
        own = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
        module = torch.get_device_module(device)
        self._read: Callable[[], Tensor] = torch.get_rng_state
        self._write: Callable[[Tensor], Any] = torch.set_rng_state
        if own is not None:
            self._read, self._write = own.get_state, own.set_state
        elif hasattr(module, "get_rng_state"):
            self._read, self._write = lambda: module.get_rng_state(device), lambda s: module.set_rng_state(s, device)
        self.state = self._read()

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Draw the same numbers again inside; restore the generators afterwards."""
        now = self._read()
        self._write(self.state)
        try:
            yield
        finally:
            self._write(now)


@torch.no_grad()
def replay(tensors: list[LazyTensor]) -> list[Tensor]:
    """Return real tensors with the values of recorded ones; views of one storage share memory again."""
    views = [View(tensor) for tensor in tensors]
    uses = Counter(view.state for view in views)
    operations: dict[int, Operation] = {}
    pending = [view.state.operation for view in views]
    while pending:
        operation = pending.pop()
        if operation is None or operation.number in operations:
            continue
        operations[operation.number] = operation
        for leaf in operation.leaves:
            if isinstance(leaf, View):
                uses[leaf.state] += 1
                pending.append(leaf.state.operation)
    storages: dict[State, torch.UntypedStorage] = {}
    with _disable_current_modes():
        for number in sorted(operations):
            operations[number].run(storages, uses)
        for view in views:
            if view.state not in storages:
                storages[view.state] = view.state.empty()
        return [view.of(storages[view.state]) for view in views]


def materialize(tensors: Iterable[Tensor]) -> int:
    """Compute the values of all recorded tensors among `tensors`, one storage at a time; return their number."""
    by_storage: dict[int, list[LazyTensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if isinstance(tensor, LazyTensor):
            by_storage.setdefault(id(tensor._contents), []).append(tensor)
    groups = list(by_storage.values())
    for group in groups:
        for lazy, value in zip(group, replay(group), strict=True):
            _become(lazy, value)
    return sum(map(len, groups))


def take_lazy(module: nn.Module) -> dict[str, LazyTensor]:
    """Replace recorded parameters of a module by ones on the meta device; return the recorded ones by their names."""
    lazies = {name: param for name, param in module.named_parameters() if isinstance(param, LazyTensor)}
    return {name: _become(lazy, lazy._meta.detach()) for name, lazy in lazies.items()}


def _become(lazy: LazyTensor, value: Tensor) -> LazyTensor:
    """Turn a recorded tensor into `value`, with its other attributes; return the recorded tensor as another object."""
    if isinstance(lazy, nn.Parameter):
        value = nn.Parameter(value, requires_grad=lazy.requires_grad)
    value.__dict__.update({name: item for name, item in vars(lazy).items() if name not in (*OWN, "_is_param")})
    # Like torch.utils.swap_tensors, which refuses the tensors of recurrent layers because they have weak references.
    for name in ("__class__", "__dict__"):
        old, new = getattr(lazy, name), getattr(value, name)
        setattr(lazy, name, new)
        setattr(value, name, old)
    torch._C._swap_tensor_impl(lazy, value)  # type: ignore[attr-defined]
    return value  # type: ignore[return-value]


class LazyTensor(Tensor):
    """A tensor whose operations are recorded; `replay` computes its values."""

    _meta: Tensor
    _contents: Contents

    @staticmethod
    def __new__(cls, meta: Tensor, contents: Contents | None = None, **options: Any) -> Any:
        if contents is None:
            # transformers makes a parameter without data by type(param)(tensor on the meta device, **vars(param)).
            return nn.Parameter(meta, options.get("requires_grad", True))
        made = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=contents.state.device,
        )
        made._meta, made._contents = meta, contents
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__.update({name: value for name, value in vars(self).items() if name not in OWN})
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to pickle the tensor's values: a file has no use for operations."""
        return replay([self])[0].__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            return func(replay(args[:1])[0], *args[1:], **(kwargs or {}))
        if func == _SET_DATA and not isinstance(args[1], LazyTensor):
            args = (args[0], record(torch.ops.aten.clone.default, args[1:], {}))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == _SET_DATA:
            args[0]._meta, args[0]._contents = args[1]._meta, args[1]._contents
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return record(func, args, kwargs or {})


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
OWN = ("_meta", "_contents")
# Functions that read memory of a tensor without an operation.
_READS = {Tensor.numpy, Tensor.tolist, Tensor.__array__}


class Recorder(TorchDispatchMode):
    """A context that records the operations on new tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = _pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, LazyTensor) for leaf in leaves):
            return record(func, args, kwargs)
        takes_device = any(argument.name == "device" for argument in func._schema.arguments)
        if not takes_device or any(isinstance(leaf, Tensor) for leaf in leaves):
            return func(*args, **kwargs)
        kwargs = {**kwargs, "device": torch.device(kwargs.get("device") or HOST)}
        # Tensors without elements become views of the memory that a file was read to, for example.
        is_empty = bool(args) and isinstance(args[0], list | tuple) and 0 in args[0]
        return func(*args, **kwargs) if is_empty or kwargs["device"] == _META else record(func, args, kwargs)


def record(function: Any, args: Any, kwargs: Any) -> Any:
    """Note a call of an operator; return its outputs as LazyTensors.

    A call whose outputs depend on values, such as `item`, runs at once, on the values of its recorded arguments.
    """
    leaves, structure = _pytree.tree_flatten((args, kwargs))
    schema = function._schema
    written = _written(schema, args, kwargs)
    if any(not isinstance(tensor, LazyTensor) for tensor in written):
        return _run_now(function, leaves, structure)
    if function.namespace != "aten":  # collectives, and kernels of other packages, cannot be recorded
        if written:
            raise NotImplementedError(
                f"LazyInitContext cannot record {function}, which writes to a tensor without data: call "
                "LazyInitContext.materialize(model) or boost the model before"
            )
        return _run_now(function, leaves, structure)
    operation = Operation(function, list(map(_noted, leaves)), structure)
    try:
        outputs = operation.call(list(map(_without_data, leaves)))
    except (NotImplementedError, RuntimeError) as error:
        if written:
            raise NotImplementedError(f"LazyInitContext cannot record {function}: {error}") from error
        return _run_now(function, leaves, structure)
    if any(tensor._meta.untyped_storage().nbytes() != tensor._contents.state.nbytes for tensor in written):
        raise NotImplementedError(f"LazyInitContext cannot record {function}: it changes the size of a storage")
    if torch.Tag.inplace_view in function.tags:  # shape and strides change, and no storage
        return return_and_correct_aliasing(function, args, kwargs, args[0])
    lazies = [leaf for leaf in leaves if isinstance(leaf, LazyTensor)]
    if not any(isinstance(output, Tensor) for output in _pytree.tree_leaves(outputs)) and not written:
        return outputs
    named = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    if _META in named:
        return outputs
    device = named[0] if named else next(leaf for leaf in leaves if isinstance(leaf, Tensor)).device
    by_storage = {lazy._meta.untyped_storage()._cdata: lazy for lazy in lazies}
    changes: dict[Contents, tuple[int, State]] = {}
    for tensor in written:
        index, storage = next(i for i, leaf in enumerate(leaves) if leaf is tensor), tensor._meta.untyped_storage()
        if schema.name.rpartition("::")[2] in _FILLS and tensor._meta.nbytes == storage.nbytes():
            operation.leaves[index].state = State(None, storage, tensor.device)
        changes[tensor._contents] = index, State(operation, storage, tensor.device)
    if torch.Tag.nondeterministic_seeded in function.tags:
        _draw(operation, leaves, device)
    for changed, (index, state) in changes.items():
        changed.state = state
        operation.results.append((index, state))
    position = itertools.count(len(leaves))

    def wrap(output: Any) -> Any:
        index = next(position)
        if not isinstance(output, Tensor):
            return output
        source = by_storage.get(output.untyped_storage()._cdata)
        if source is None:
            contents = Contents(State(operation, output.untyped_storage(), device))
            if function is torch.ops.aten.empty.memory_format:
                contents.state.operation = None
            operation.results.append((index, contents.state))
            source = by_storage[output.untyped_storage()._cdata] = LazyTensor(output, contents)
            return source
        same = [lazy for lazy in lazies if lazy._meta is output]  # the argument of an operation in place
        return same[0] if same else LazyTensor(output, source._contents)

    return _pytree.tree_map(wrap, outputs)


def _written(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that a call changes in place."""
    found = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _noted(leaf: Any) -> Any:
    if isinstance(leaf, LazyTensor):
        return View(leaf)
    return Constant(leaf) if isinstance(leaf, Tensor) else leaf


def _without_data(leaf: Any) -> Any:
    if isinstance(leaf, LazyTensor):
        return leaf._meta
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
    return _META if isinstance(leaf, torch.device) else leaf


def _run_now(function: Any, leaves: list[Any], structure: Any) -> Any:
    """Run a call on the values of its recorded arguments."""
    lazies = [leaf for leaf in leaves if isinstance(leaf, LazyTensor)]
    values = iter(replay(lazies))
    leaves = [next(values) if isinstance(leaf, LazyTensor) else leaf for leaf in leaves]
    args, kwargs = _pytree.tree_unflatten(leaves, structure)
    return function(*args, **kwargs)


def _draw(operation: Operation, leaves: list[Any], device: torch.device) -> None:
    """Note the state of the random generator, and run a random operation so that the generator moves on."""
    operation.random = Randomness(leaves, device)
    real = []
    for leaf, noted in zip(leaves, operation.leaves, strict=True):
        if isinstance(noted, View) and noted.state.operation is None:
            leaf = noted.of(noted.state.empty())
        elif isinstance(noted, View):
            leaf = replay([leaf])[0]
        real.append(leaf)
    with torch.no_grad(), _disable_current_modes():
        operation.call(real)
