"""Lets Triton's interpreter decide once per operation and types of arguments what is to be done.

What an operation of `triton.language` asks of the interpreter's builder (to cast, to broadcast, to add, ...) follows
from the types of its tensors and from its other arguments, never from the numbers in a tensor. To find it out takes
longer than to do it. So the first call with such arguments is written down, and later ones do the same again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

# What such calls of the builder give depends on their arguments alone, so of constants it is computed once.
FOLDABLE = (
    "get_",
    "create_bitcast",
    "create_broadcast",
    "create_expand_dims",
    "create_fp_",
    "create_int_cast",
    "create_make_range",
    "create_si_to_fp",
    "create_splat",
    "create_ui_to_fp",
)
# Plans of one operation: those for a kernel's float arguments, say, may never be used again.
MOST = 5000


class Plan(NamedTuple):
    """Calls of the builder; slots hold the handles of the tensors that were given, then the results of the calls.

    `steps`: function, where its arguments are (from 0: slots; from -1 downwards: `fixed`), and `fixed`.
    `result`: gives what the operation returns from its tensors and the slots.
    `alive`: types whose identity is in the key.
    """

    steps: list[tuple[Callable[..., Any], list[int], list[Any]]]
    result: Callable[[list[Any], list[Any]], Any]
    alive: list[Any]


class NotPlannable(Exception):
    """The arguments or the result are of a kind that is not written down."""


class Recorder:
    """Stands for the builder while an operation is called for the first time."""

    def __init__(self, builder: Any, handle_type: type, handles: list[Any]) -> None:
        self._builder, self._handle_type = builder, handle_type
        self._slots = {id(handle): index for index, handle in enumerate(handles)}
        self._count = len(handles)
        self._constants: dict[int, Any] = {}
        self._alive: list[Any] = [*handles]
        self.steps: list[tuple[Callable[..., Any], list[int], list[Any]]] = []
        self.plannable = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        return partial(self._call, name, found) if callable(found) else found

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        results = result if type(result) is tuple else (result,)
        handles = [each for each in (*arguments, *named.values()) if isinstance(each, self._handle_type)]
        if all(isinstance(each, self._handle_type) for each in results) or result is None:
            if name.startswith(FOLDABLE) and all(id(each) in self._constants for each in handles):
                self._constants.update((id(each), each) for each in results)
            else:
                self._write_down(partial(function, **named) if named else function, arguments, results)
        elif handles:
            self.plannable = False  # a pointer to a block, say
        return result

    def _write_down(self, function: Callable[..., Any], arguments: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        sources, fixed = [], []
        for argument in arguments:
            if isinstance(argument, self._handle_type) and id(argument) not in self._constants:
                sources.append(self.slot(argument))
            else:
                fixed.append(argument)
                sources.append(-len(fixed))
        self.steps.append((function, sources, fixed))
        for each in results:
            self._slots[id(each)] = self._count
            self._count += 1
            self._alive.append(each)

    def constant(self, handle: Any) -> bool:
        return id(handle) in self._constants

    def slot(self, handle: Any) -> int:
        if id(handle) not in self._slots:
            self.plannable = False
        return self._slots.get(id(handle), 0)


class Planner:
    """Gives operations that follow plans."""

    def __init__(self, interpreter: Any) -> None:
        language = interpreter.tl
        self.semantic = interpreter.interpreter_semantic
        self.handle_type, self.tensor = interpreter.TensorHandle, language.tensor
        self.constexpr, self.dtype = language.constexpr, language.core.dtype
        self.recorder: Recorder | None = None

    def planned(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        plans: dict[tuple[Any, ...], Plan | None] = {}
        tensor, describe, semantic = self.tensor, self._describe, self.semantic

        def call(*arguments: Any, **named: Any) -> Any:
            named.pop("_semantic", None)
            if self.recorder is not None:
                return operation(*arguments, **named, _semantic=semantic)
            key: list[Any] = []
            tensors: list[Any] = []
            try:
                for argument in arguments:
                    if type(argument) is tensor:
                        key.append(id(argument.type))
                        tensors.append(argument)
                    else:
                        describe(argument, key)
                for name, argument in named.items():
                    key.append(name)
                    if type(argument) is tensor:
                        key.append(id(argument.type))
                        tensors.append(argument)
                    else:
                        describe(argument, key)
            except NotPlannable:
                return operation(*arguments, **named, _semantic=semantic)
            slots = [each.handle for each in tensors]
            if len(slots) == 2 and slots[0] is slots[1]:
                key.append("same")  # the plan of x * x would not do for x * y
            place = tuple(key)
            if place not in plans:
                if len(slots) > 2 and len(set(map(id, slots))) < len(slots):
                    return operation(*arguments, **named, _semantic=semantic)
                if len(plans) > MOST:
                    plans.clear()
                result, plans[place] = self._record(operation, arguments, named, tensors, slots)
                return result
            plan = plans[place]
            if plan is None:
                return operation(*arguments, **named, _semantic=semantic)
            for function, sources, fixed in plan.steps:
                made = function(*[slots[index] if index >= 0 else fixed[~index] for index in sources])
                if type(made) is tuple:
                    slots.extend(made)
                else:
                    slots.append(made)
            return plan.result(tensors, slots)

        return call

    def _describe(self, argument: Any, key: list[Any]) -> None:
        kind = type(argument)
        if argument is None or kind in (int, bool, str):
            key += (kind, argument)
        elif kind is float:
            key += (kind, argument.hex())  # tells zeros apart
        elif isinstance(argument, self.constexpr):
            key.append(kind)
            self._describe(argument.value, key)
        elif isinstance(argument, self.dtype):
            key += (kind, id(argument))
        elif kind in (tuple, list):
            key += (kind, len(argument))
            for each in argument:
                self._describe(each, key)
        elif kind is slice:
            key.append(kind)
            for each in (argument.start, argument.stop, argument.step):
                self._describe(each, key)
        else:
            raise NotPlannable

    def _record(
        self, operation: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any], tensors: list[Any],
        handles: list[Any],
    ) -> tuple[Any, Plan | None]:  # fmt: skip
        semantic = self.semantic
        builder = semantic.builder
        self.recorder = semantic.builder = recorder = Recorder(builder, self.handle_type, handles)
        try:
            result = operation(*arguments, **named, _semantic=semantic)
        finally:
            self.recorder, semantic.builder = None, builder
        try:
            gives = self._result(result, tensors, recorder)
        except NotPlannable:
            return result, None
        alive = [arguments, named, [each.type for each in tensors]]
        return result, Plan(recorder.steps, gives, alive) if recorder.plannable else None

    def _result(self, result: Any, tensors: list[Any], recorder: Recorder) -> Callable[[list[Any], list[Any]], Any]:
        for index, each in enumerate(tensors):
            if result is each:
                return lambda tensors, slots: tensors[index]
        if type(result) is self.tensor:
            handle, kind, tensor = result.handle, result.type, self.tensor
            if recorder.constant(handle):
                return lambda tensors, slots: tensor(handle, kind)
            slot = recorder.slot(handle)
            return lambda tensors, slots: tensor(slots[slot], kind)
        if type(result) is tuple:
            parts = [self._result(each, tensors, recorder) for each in result]
            return lambda tensors, slots: tuple([part(tensors, slots) for part in parts])
        if result is None:
            return lambda tensors, slots: None
        raise NotPlannable


def install(interpreter: Any) -> None:
    """Operations that the interpreter puts into `triton.language` follow plans from now on."""
    planner = Planner(interpreter)
    tensor_functions = interpreter._patch_lang_tensor

    def replace_operation(package: Any, name: str, operation: Callable[..., Any], builder: Any, scope: Any) -> None:
        scope.set_attr(package, name, planner.planned(operation))

    def replace_tensor_functions(tensor: Any, scope: Any) -> None:
        tensor_functions(tensor, scope)
        truth, index = tensor.__bool__, tensor.__index__
        scope.set_attr(tensor, "__bool__", lambda self: truth(looked_at(self)))
        scope.set_attr(tensor, "__index__", lambda self: index(looked_at(self)))

    def looked_at(tensor: Any) -> Any:
        """An operation that looks at numbers that it was given has no plan; blocks of several are always true."""
        if planner.recorder is not None and tensor.handle.data.size == 1:
            planner.recorder.plannable &= planner.recorder.constant(tensor.handle)
        return tensor

    interpreter._patch_attr = replace_operation
    interpreter._patch_lang_tensor = replace_tensor_functions
