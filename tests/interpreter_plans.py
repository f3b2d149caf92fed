"""Lets Triton's interpreter decide once per operation and types of arguments what is to be done.

What an operation of `triton.language` asks of the interpreter's builder (to cast, to broadcast, to add, ...) follows
from the types of its tensors and from its other arguments, never from the numbers in a tensor. To find it out takes
longer than to do it. So the first call with such arguments is written down as a function, its plan, which does the same
again for later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

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


class NotPlannable(Exception):
    """The arguments or the result are of a kind that is not written down."""


class Recorder:
    """Stands for the builder while an operation is called for the first time, and writes the plan."""

    def __init__(self, interpreter: Any, tensors: list[Any]) -> None:
        self._interpreter, self._builder = interpreter, interpreter.interpreter_builder
        self._handle_type = interpreter.TensorHandle
        self._tensors = tensors
        # A handle is known by its identity, so all are kept: those of variables, and those that are the same each time.
        self._variables = {id(tensor.handle): f"given{index}" for index, tensor in enumerate(tensors)}
        self._constants: dict[int, Any] = {}
        self._alive: list[Any] = [tensor.handle for tensor in tensors]
        self._names: dict[str, Any] = {"tensor": interpreter.tl.tensor, "handle": self._handle_type}
        self._lines = [f"given{index} = tensors[{index}].handle" for index in range(len(tensors))]
        self.plannable = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        return partial(self._call, name, found) if callable(found) else found

    def plan(self, result: Any) -> Callable[[list[Any]], Any] | None:
        """Gives the operation's result for other tensors of the same types."""
        try:
            returned = self._expression(result)
        except NotPlannable:
            return None
        if not self.plannable:
            return None
        lines = "".join(f"    {line}\n" for line in (*self._lines, f"return {returned}"))
        exec(f"def plan(tensors):\n{lines}", self._names)
        return self._names["plan"]

    def is_constant(self, handle: Any) -> bool:
        return id(handle) in self._constants

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        results = result if type(result) is tuple else (result,)
        handles = [each for each in (*arguments, *named.values()) if isinstance(each, self._handle_type)]
        if all(isinstance(each, self._handle_type) for each in results) or result is None:
            if name.startswith(FOLDABLE) and all(map(self.is_constant, handles)):
                self._constants.update((id(each), each) for each in results)
            else:
                self._write_down(name, partial(function, **named) if named else function, arguments, results)
        elif handles:
            self.plannable = False  # a pointer to a block, say
        return result

    def _write_down(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], results: tuple[Any, ...]
    ) -> None:
        given = [self._name(argument) for argument in arguments]
        made = [f"made{len(self._alive) + index}" for index in range(len(results))]
        ufunc = self._ufunc(name, arguments, results[0])
        if ufunc is None:
            call = f"{self._named(function)}({', '.join(given)})"
        else:
            numbers = ", ".join(f"{each}.data" for each in given)
            call = f"handle({self._named(ufunc)}({numbers}), {self._named(results[0].dtype)})"
        self._lines.append(f"{', '.join(made)} = {call}")
        self._variables.update(zip(map(id, results), made, strict=True))
        self._alive.extend(results)

    def _ufunc(self, name: str, arguments: tuple[Any, ...], result: Any) -> Callable[..., Any] | None:
        """NumPy's function that is all that the builder's does, if it is so."""
        function: Any = getattr(self._interpreter.InterpreterBuilder, name, None)
        try:
            found = function(SimpleNamespace(binary_op=lambda left, right, ufunc: ufunc), None, None)
            same = found(arguments[0].data, arguments[1].data).dtype == result.data.dtype
        except (AttributeError, TypeError):
            return None
        return found if same else None

    def _name(self, value: Any) -> str:
        if not isinstance(value, self._handle_type) or self.is_constant(value):
            return self._named(value)
        if id(value) not in self._variables:
            self.plannable = False
        return self._variables.get(id(value), "None")

    def _named(self, constant: Any) -> str:
        name = f"constant{len(self._names)}"
        self._names[name] = constant
        return name

    def _expression(self, result: Any) -> str:
        for index, each in enumerate(self._tensors):
            if result is each:
                return f"tensors[{index}]"
        if type(result) is self._interpreter.tl.tensor:
            return f"tensor({self._name(result.handle)}, {self._named(result.type)})"
        if type(result) is tuple:
            return f"({''.join(f'{self._expression(each)}, ' for each in result)})"
        if result is None:
            return "None"
        raise NotPlannable


class Planner:
    """Gives operations that follow plans."""

    def __init__(self, interpreter: Any) -> None:
        language = interpreter.tl
        self.interpreter, self.semantic = interpreter, interpreter.interpreter_semantic
        self.tensor, self.constexpr, self.dtype = language.tensor, language.constexpr, language.core.dtype
        self.recorder: Recorder | None = None

    def planned(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        # With what is named in the key by its identity.
        plans: dict[tuple[Any, ...], tuple[Callable[[list[Any]], Any] | None, Any]] = {}
        tensor, describe, semantic = self.tensor, self._describe, self.semantic

        def call(*arguments: Any, **named: Any) -> Any:
            if self.recorder is not None:
                return operation(*arguments, **{**named, "_semantic": semantic})
            key: list[Any] = []
            tensors: list[Any] = []
            try:
                for argument in arguments:
                    if type(argument) is tensor:
                        key.append(id(argument.type))
                        tensors.append(argument)
                    else:
                        describe(argument, key)
                if named:
                    named.pop("_semantic", None)
                    for name, argument in named.items():
                        key.append(name)
                        if type(argument) is tensor:
                            key.append(id(argument.type))
                            tensors.append(argument)
                        else:
                            describe(argument, key)
            except NotPlannable:
                return operation(*arguments, **named, _semantic=semantic)
            if len(tensors) == 2 and tensors[0].handle is tensors[1].handle:
                key.append("same")  # the plan of x * x would not do for x * y
            place = tuple(key)
            found = plans.get(place)
            if found is None:
                if len(tensors) > 2 and len({id(each.handle) for each in tensors}) < len(tensors):
                    return operation(*arguments, **named, _semantic=semantic)
                if len(plans) > MOST:
                    plans.clear()
                result, plan = self._record(operation, arguments, named, tensors)
                plans[place] = plan, (arguments, named, [each.type for each in tensors])
                return result
            plan = found[0]
            if plan is None:
                return operation(*arguments, **named, _semantic=semantic)
            return plan(tensors)

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
        self, operation: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any], tensors: list[Any]
    ) -> tuple[Any, Callable[[list[Any]], Any] | None]:
        semantic = self.semantic
        builder = semantic.builder
        self.recorder = semantic.builder = recorder = Recorder(self.interpreter, tensors)
        try:
            result = operation(*arguments, **named, _semantic=semantic)
        finally:
            self.recorder, semantic.builder = None, builder
        return result, recorder.plan(result)


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
            planner.recorder.plannable &= planner.recorder.is_constant(tensor.handle)
        return tensor

    interpreter._patch_attr = replace_operation
    interpreter._patch_lang_tensor = replace_tensor_functions
