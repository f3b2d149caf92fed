"""`capture`: a training step that is captured in graphs and replayed."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ..ops import _recording
from ..ops._graph import CudaGraphs
from ..ops._host import on_host
from ._captured import Graph, flattened, map_tensors, references_of, watched
from ._references import line_of
from ._state import hyperparameters, parameters


class CapturedStep:
    """A training step that runs eagerly at first, and is captured and replayed from then on: see `capture`.

    `reason` says why it runs eagerly, None if it does not.
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
        # The method of a class that this is for one object.
        self._decorated: CapturedStep | None = None
        self.invalidate()

    def invalidate(self) -> None:
        """Drops all graphs and frees their memory; the next calls run eagerly, then it is captured anew."""
        self.reason: str | None = None
        self._graphs: dict[Any, list[Graph]] = {}
        self._calls: dict[Any, int] = {}
        # Kinds whose graphs no longer fit, and that have run eagerly since, which has made what a new graph needs.
        self._rehearsed: set[Any] = set()
        self._optimizers: dict[int, Any] = {}
        self._params: list[Tensor] = []
        self._replays = self._captures = 0
        self._has_said = False

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method that is decorated has graphs for each instance that can keep them."""
        if instance is None:
            return self
        if isinstance(instance, type) or not hasattr(instance, "__dict__"):
            return MethodType(self, instance)
        name = f"_captured_{self.__qualname__}"  # type: ignore[attr-defined]  # a method may call that of a base class
        if name not in vars(instance):
            bound = self._function.__get__(instance, owner)  # type: ignore[attr-defined]
            own = CapturedStep(bound, warmup=self._warmup, max_graphs=self._max_graphs, backend=type(self._backend)())
            own._decorated, vars(instance)[name] = self, own
        return vars(instance)[name]

    def __reduce__(self) -> Any:
        """Copied and pickled like a function, by its name where it has the function's; graphs stay behind."""
        if self._decorated is not None:
            return CapturedStep.__get__, (self._decorated, self._function.__self__)  # type: ignore[attr-defined]
        name = getattr(self, "__qualname__", "")
        with contextlib.suppress(AttributeError, KeyError):
            if operator.attrgetter(name)(sys.modules[self.__module__]) is self:
                return name
        return functools.partial(CapturedStep, warmup=self._warmup, max_graphs=self._max_graphs), (self._function,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reason:
            return self._function(*args, **kwargs)
        arguments = args, kwargs
        tensors, kind = flattened(arguments)
        device = self._backend.device_of(self._params or [tensor for tensor in tensors if not on_host(tensor)])
        if device is None:
            return self._function(*args, **kwargs)
        kind = (*kind, *_modes(device))
        try:
            count = self._calls.get(kind, 0)
        except TypeError as error:  # an array of NumPy, a set
            self._give_up(f"an argument is neither a tensor nor something that compares: {error}")
            return self._function(*args, **kwargs)
        if count < self._warmup:
            return self._rehearse(arguments, kind, device)
        graph, difference = self._fitting(kind)
        if graph is not None:
            self._replays += 1
            return graph(tensors)
        if self.graphs >= self._max_graphs:
            why = f"; the last one did not fit because of {difference}" if difference else ""
            self._say_once(f"has {self.graphs} graphs (max_graphs) and runs eagerly where none of them fits{why}")
            return self._eagerly(arguments, device)
        if difference is not None and kind not in self._rehearsed:
            self._rehearsed.add(kind)
            return self._rehearse(arguments, kind, device)
        self._rehearsed.discard(kind)
        return self._capture(arguments, tensors, kind, device)

    def _eagerly(self, arguments: Any, device: torch.device) -> Any:
        """On the stream of the captures, so that memory of one call serves the next; outputs as a replay has them.

        With the kernels of a captured call, so that these are compiled by then.
        """
        args, kwargs = arguments
        recording = _recording.active(_recording.Recording(False, device))
        with self._backend.aside(device), recording, watched(self._optimizers):
            outputs = self._function(*args, **kwargs)
        # One of each device.
        self._params = list({param.device: param for param in parameters(self._optimizers.values())}.values())
        return map_tensors(Tensor.detach, outputs)

    def _rehearse(self, arguments: Any, kind: Any, device: torch.device) -> Any:
        """An eager call before a capture; after the last of them, what it has changed in Python is refused."""
        references = references_of(self._function, arguments)
        places = (*references.variables, *hyperparameters(list(self._optimizers.values())))
        before = [(place, place.read()) for place in places]
        outputs = self._eagerly(arguments, device)
        if len(self._calls) >= 8 * self._max_graphs and kind not in self._calls:
            self._calls = {known: count for known, count in self._calls.items() if known in self._graphs}
            self._say_once("gets arguments of another kind at nearly every call, and runs eagerly with them")
        self._calls[kind] = self._calls.get(kind, 0) + 1
        changed = [place for place, value in before if not isinstance(value, Tensor) and not place.has(value)]
        if changed and self._calls[kind] == self._warmup:
            is_rate = isinstance(changed[0].root, torch.optim.Optimizer)
            cure = "call the scheduler" if is_rate else "make it a tensor, or do this"
            self._give_up(f"every call changes {changed[0].name}, which no graph can; {cure} outside of the function")
        return outputs

    def _fitting(self, kind: Any) -> tuple[Graph | None, str | None]:
        """A graph, prepared for a replay, or what keeps the last one from it."""
        difference = None
        for graph in list(self._graphs.setdefault(kind, [])):
            if graph.state.is_stale():
                self._graphs[kind].remove(graph)
                difference = "the memory of parameters"
            elif (difference := graph.prepare()) is None:
                return graph, None
        return None, difference

    def _capture(self, arguments: Any, tensors: list[Tensor], kind: Any, device: torch.device) -> Any:
        try:
            graph = Graph(self._function, arguments, self._optimizers, self._backend, device)
        except Exception as error:  # whatever a capture does not allow comes as errors of all kinds
            said = str(error).strip().split("\n")[0]
            reason, line = f"{type(error).__name__}: {said}", line_of(error, self._function)
        else:
            self._graphs[kind].append(graph)
            self._captures += 1
            return graph(tensors)
        # Here the error is gone, and with it what its traceback held. One that has nothing to do with the capture comes
        # up again.
        outputs = self._eagerly(arguments, device)
        self._give_up(f"{line}: {reason}" if line else reason)
        return outputs

    def _give_up(self, reason: str) -> None:
        self.invalidate()
        self.reason = reason
        self._warn(f"cannot be captured and runs eagerly. {reason}")

    def _say_once(self, message: str) -> None:
        if not self._has_said:
            self._has_said = True
            self._warn(f"{message}. What differs from call to call should come as a tensor argument of the same shape")

    def _warn(self, message: str) -> None:
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        warnings.warn(f"apex.graphs: {name} {message}", stacklevel=5)

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(map(len, self._graphs.values()))

    def report(self) -> str:
        """What has happened so far, in a line."""
        if self.reason:
            return f"eager: {self.reason}"
        eager = sum(self._calls.values())
        return f"{self.graphs} graphs, {eager} eager calls, {self._captures} captures, {self._replays} replays"


def _modes(device: torch.device) -> tuple[Any, ...]:
    """Modes that are set around a call, and that change what it computes."""
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def capture(train_step: Callable[..., Any] | None = None, *, warmup: int = 3, max_graphs: int = 8) -> Any:
    """A training step that is captured in a CUDA graph and replayed: the host has next to nothing to do for it.

    `train_step(*batch)` is an ordinary function: model, loss, `amp.scale_loss`, clipping, optimizer step, `zero_grad`.
    Its first `warmup` calls with inputs of one kind (shapes, layouts and types of tensors, values of other arguments)
    run as they are, then it is captured; nothing runs twice. Returned tensors are valid until the next call, and have
    no gradients. Beyond `max_graphs` graphs, and where a function cannot be captured, it runs eagerly, and a warning
    says why. On a CPU it always does. Also a decorator: `@capture`, `@capture(warmup=5)`.
    """
    if train_step is None:
        return functools.partial(CapturedStep, warmup=warmup, max_graphs=max_graphs)
    return CapturedStep(train_step, warmup=warmup, max_graphs=max_graphs)
