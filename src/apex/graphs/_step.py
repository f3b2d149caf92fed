"""`capture`: run a training step, capture it in graphs, and replay these."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ..ops import _graph_numbers
from ..ops._graph import CudaGraphs
from ..ops._host import on_host
from ..optimizers._state_dicts import show_own_entries
from ._captured import Graph, flattened, map_tensors, watched
from ._references import References, line_of
from ._state import hyperparameters, parameters


@dataclass
class CallKind:
    """The calls with arguments of one kind: their graphs and their number.

    `calls` counts eager calls so far; a graph is captured once it has reached `warmup`.
    """

    warmup: int
    calls: int = 0
    graphs: list[Graph] = field(default_factory=list)

    def fitting(self) -> tuple[Graph | None, str | None]:
        """Return a graph that is ready for a replay, or None and the difference that excludes the last one."""
        difference = None
        for graph in list(self.graphs):
            if graph.state.is_stale():
                self.graphs.remove(graph)
                self.warmup = self.calls + 1
                difference = "the memory of parameters"
            elif (difference := graph.state.copy_in()) is None:
                return graph, None
        return None, difference


class CapturedStep:
    """A training step that runs eagerly at first, and is captured and replayed from then on: see `capture`.

    `reason` tells why the step always runs eagerly; it is None if the step can be captured.
    """

    def __init__(
        self, function: Callable[..., Any], *, warmup: int = 3, max_graphs: int = 8, backend: Any = None
    ) -> None:
        if not callable(function):
            raise TypeError(f"train_step={function!r} cannot be called; a function is expected")
        for name, value in (("warmup", warmup), ("max_graphs", max_graphs)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is not a whole number of at least 1")
        functools.update_wrapper(self, function)
        self._function = function
        self._warmup, self._max_graphs = warmup, max_graphs
        self._backend = CudaGraphs() if backend is None else backend
        self.invalidate()

    def invalidate(self) -> None:
        """Drop all graphs and free their memory; the next calls run eagerly, then the step is captured anew."""
        self.reason: str | None = None
        self._kinds: dict[Any, CallKind] = {}  # by signature of a call
        self._optimizers: dict[int, Any] = {}
        self._params: list[Tensor] = []
        self._replays = self._captures = self._eager_calls = 0
        self._has_warned = False

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return a step for an instance, with graphs of its own, so that methods can be decorated."""
        if instance is None:
            return self
        if isinstance(instance, type) or not hasattr(instance, "__dict__"):
            return MethodType(self, instance)
        steps = vars(instance).get("_captured_steps")
        if steps is None or steps.owner is not instance:
            steps = vars(instance)["_captured_steps"] = _StepsOfObject(instance)
        if self not in steps:
            bound, backend = self._function.__get__(instance, owner), type(self._backend)()  # type: ignore[attr-defined]
            steps[self] = CapturedStep(bound, warmup=self._warmup, max_graphs=self._max_graphs, backend=backend)
        return steps[self]

    def __reduce__(self) -> Any:
        """Reduce to the function's or method's name if that leads back to this step; graphs are never copied."""
        name, owner = getattr(self, "__qualname__", ""), getattr(self._function, "__self__", None)
        with contextlib.suppress(AttributeError, KeyError):
            if owner is not None and getattr(owner, self.__name__) is self:  # type: ignore[attr-defined]
                return getattr, (owner, self.__name__)  # type: ignore[attr-defined]
            if operator.attrgetter(name)(sys.modules[self.__module__]) is self:
                return name
        return functools.partial(CapturedStep, warmup=self._warmup, max_graphs=self._max_graphs), (self._function,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reason:
            return self._function(*args, **kwargs)
        show_own_entries(self._optimizers.values())  # a graph follows them
        arguments = args, kwargs
        tensors, signature = flattened(arguments)
        device = self._backend.device_of(self._params or [tensor for tensor in tensors if not on_host(tensor)])
        if device is None:
            outputs = self._function(*args, **kwargs)
            self._eager_calls += 1
            return outputs
        try:
            kind = self._kind((*signature, *_modes(device)))
        except TypeError as error:  # a NumPy array or a set
            self._give_up(f"an argument is neither a tensor nor something that compares: {error}")
            return self._function(*args, **kwargs)
        graph, difference = kind.fitting()
        if graph is not None:
            self._replays += 1
            return graph(tensors)
        if kind.calls >= kind.warmup:
            if self.graphs < self._max_graphs:
                return self._capture(arguments, tensors, kind, device)
            why = f"; the last one did not fit because of {difference}" if difference else ""
            self._warn_once(f"has {self.graphs} graphs (max_graphs) and runs eagerly where none of them fits{why}")
        return self._eagerly(arguments, kind, device)

    def _kind(self, signature: Any) -> CallKind:
        """Return the kind of calls with this signature; forget kinds without graphs if there are too many."""
        if signature not in self._kinds and len(self._kinds) >= 8 * self._max_graphs:
            self._kinds = {key: kind for key, kind in self._kinds.items() if kind.graphs}
            self._warn_once("gets arguments of another kind at nearly every call, and runs eagerly with them")
        return self._kinds.setdefault(signature, CallKind(self._warmup))

    def _eagerly(self, arguments: Any, kind: CallKind, device: torch.device) -> Any:
        """Run the function eagerly on the capture stream, so that memory of one call serves the next.

        Uses the kernels of a captured call, so that these are compiled by then, and detaches outputs as a replay does.
        In the last call before a capture, a change of a Python value that no graph can repeat makes the step give up.
        """
        before = []
        if kind.calls + 1 == self._warmup:
            references = References(self._function, map_tensors(lambda _: None, arguments))
            locations = (
                *references.variables,
                *references.module_numbers(),
                *hyperparameters(list(self._optimizers.values())),
            )
            before = [(location, location.read()) for location in locations]
        args, kwargs = arguments
        capture = _graph_numbers.active(_graph_numbers.CaptureContext(False, device))
        with self._backend.aside(device), capture, watched(self._optimizers):
            outputs = self._function(*args, **kwargs)
        kind.calls += 1  # not counted if the call raised: it has not made the state that a graph needs
        self._eager_calls += 1
        # One parameter of each device suffices to find the devices.
        self._params = list({param.device: param for param in parameters(self._optimizers.values())}.values())
        changed = [location for location, value in before if not isinstance(value, Tensor) and not location.has(value)]
        if changed:
            is_rate = isinstance(changed[0].root, torch.optim.Optimizer)
            cure = "call the scheduler" if is_rate else "make it a tensor, or do this"
            self._give_up(f"every call changes {changed[0].name}, which no graph can; {cure} outside of the function")
        return map_tensors(Tensor.detach, outputs)

    def _capture(self, arguments: Any, tensors: list[Tensor], kind: CallKind, device: torch.device) -> Any:
        """Capture a graph and replay it; if that fails, run the function eagerly and give up capturing."""
        try:
            graph = Graph(self._function, arguments, self._optimizers, self._backend, device)
        except Exception as error:  # operations that a capture does not allow raise errors of all kinds
            message = str(error).strip().split("\n")[0]
            reason, line = f"{type(error).__name__}: {message}", line_of(error, self._function)
        else:
            kind.graphs.append(graph)
            # If the graph does not fit later, one eager call makes the state that the next graph needs.
            kind.warmup = kind.calls + 1
            self._captures += 1
            return graph(tensors)
        # Outside of the `except` block, so that the traceback and the objects it holds are freed. An error that has
        # nothing to do with the capture is raised again by the eager call.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the graph's memory, which the eager call needs a second time
        outputs = self._eagerly(arguments, kind, device)
        self._give_up(f"{line}: {reason}" if line else reason)
        return outputs

    def _give_up(self, reason: str) -> None:
        """Drop all graphs and run eagerly from now on, with a warning."""
        self.invalidate()
        self.reason = reason
        self._warn(f"cannot be captured and runs eagerly. {reason}")

    def _warn_once(self, message: str) -> None:
        """Issue the first of these warnings only; `invalidate` allows another one."""
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"{message}. What differs from call to call should come as a tensor argument of the same shape")

    def _warn(self, message: str) -> None:
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        warnings.warn(f"apex.graphs: {name} {message}", stacklevel=5)

    @property
    def graphs(self) -> int:
        """Number of graphs that can be replayed now."""
        return sum(len(kind.graphs) for kind in self._kinds.values())

    def report(self) -> str:
        """Return a line with the number of graphs, eager calls, captures and replays so far."""
        if self.reason:
            return f"eager: {self.reason}"
        counts = (f"{self.graphs} graphs", f"{self._eager_calls} eager calls", f"{self._captures} captures")
        return ", ".join((*counts, f"{self._replays} replays"))


class _StepsOfObject(dict[CapturedStep, CapturedStep]):
    """The captured steps of an object's decorated methods. A copy of the object that shares this dict gets its own."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __reduce__(self) -> Any:
        return _StepsOfObject, (None,)


def _modes(device: torch.device) -> tuple[Any, ...]:
    """Return the modes set around a call that change its results: grad mode, inference mode and autocast dtype."""
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def capture(train_step: Callable[..., Any] | None = None, *, warmup: int = 3, max_graphs: int = 8) -> Any:
    """Capture a training step in a CUDA graph and replay it, so that the host has next to nothing to do.

    `train_step(*batch)` is an ordinary function: model, loss, `amp.scale_loss`, clipping, optimizer step, `zero_grad`.
    Its first `warmup` calls with inputs of one kind (shapes, layouts and types of tensors, values of other arguments)
    run as they are, then it is captured; nothing runs twice. Returned tensors are valid until the next call, and have
    no gradients. The step runs eagerly beyond `max_graphs` graphs or if it cannot be captured, and a warning says why.
    On a CPU it always runs eagerly. Also a decorator: `@capture`, `@capture(warmup=5)`.
    """
    if train_step is None:
        return functools.partial(CapturedStep, warmup=warmup, max_graphs=max_graphs)
    return CapturedStep(train_step, warmup=warmup, max_graphs=max_graphs)
