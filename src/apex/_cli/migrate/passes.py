"""Forward and backward passes of a file: the code that apex.amp casts, and that torch.autocast must be put around."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
from libcst import matchers as m

from .code import Code, Node, Use
from .rules import INERT, SCALE_LOSS, bound, literal


@dataclass
class Backward:
    """A `with amp.scale_loss(...)` statement whose body is one backward pass."""

    statement: Node
    loss: Node
    optimizers: list[str]
    arguments: list[str]  # of `backward`
    loss_id: str


def backward_pass(code: Code, use: Use) -> Backward | None:
    """Return the backward pass of an `amp.scale_loss`, or refuse and return None if its form is not supported."""
    arguments = None if use.call is None else bound(use.call, SCALE_LOSS)
    item: Node = code.parent(use.call)
    if (
        arguments is None
        or not {"loss", "optimizers"} <= arguments.keys()
        or not m.matches(item, m.WithItem(asname=m.AsName()))
    ):
        code.refuse(use.node, "call-form", function="amp.scale_loss", problem="not `with amp.scale_loss(...) as ...`")
        return None
    for name in ("delay_unscale", "delay_overflow_check"):
        if name in arguments and literal(arguments[name].value) is not False:
            code.refuse(use.node, "delayed", name=name)
            return None
    statement, name = code.parent(item), code.text(item.asname.name)
    pattern = m.Expr(m.Call(func=m.Attribute(value=m.Name(name), attr=m.Name("backward"))))
    body = code.members(statement.body)
    named = code.find(code.function(statement) or code.module, m.Name(name))
    elsewhere = [node for node in named if not any(m.matches(outer, _SCALED) for outer in code.ancestors(node))]
    if len(statement.items) > 1 or len(body) != 1 or not m.matches(body[0], pattern) or elsewhere:
        code.refuse(use.node, "scaled-loss")
        return None
    options = [code.text(arg).rstrip(", \n") for arg in body[0].value.args]
    loss_id = code.text(arguments["loss_id"].value) if "loss_id" in arguments else "0"
    return Backward(statement, arguments["loss"].value, code.parts(arguments["optimizers"].value), options, loss_id)


_SCALED = m.With(items=[m.WithItem(item=m.Call(func=m.Name("scale_loss") | m.Attribute(attr=m.Name("scale_loss"))))])


class Forward:
    """The names of a file's models, and the statements that run under autocast."""

    def __init__(self, code: Code, models: set[str]) -> None:
        self._code, self.models = code, set[str]()
        self.covered: set[Node] = set()
        while models - self.models:
            self.models |= models
            models = self._other_names()

    def _other_names(self) -> set[str]:
        """Return variables that hold a wrapped model (`net = DDP(model)`), and parameters that receive a model."""
        code, names = self._code, set[str]()
        for call in code.calls:
            arguments = dict(enumerate(call.args))
            models = [index for index, arg in arguments.items() if self._is_model(arg.value)]
            if models[:1] == [0] and not call.args[0].keyword and wraps(code, call):
                names |= code.assigns(code.parent(call)) if isinstance(code.parent(call), cst.Assign) else set()
            for function in code.functions.get(code.called(call), []):
                params = [param.name.value for param in function.params.params if param.name.value != "self"]
                names |= {arguments[index].keyword.value for index in models if arguments[index].keyword}
                names |= {params[index] for index in models if index < len(params) and not arguments[index].keyword}
        return names

    def _is_model(self, node: Node) -> bool:
        return self._code.text(node) in self.models

    def is_call(self, call: Node) -> bool:
        """Return whether a call runs a model: `model(x)`, `model.forward(x)` or `model.module(x)`."""
        func = call.func
        while isinstance(func, cst.Attribute) and func.attr.value in ("forward", "module"):
            func = func.value
        return self._is_model(func)

    def runs_model(self, node: Node, seen: tuple[str, ...] = ()) -> bool:
        """Return whether a node calls a model or passes one to a function, itself or in functions of this file."""
        code = self._code
        for call in code.find(node, m.Call()):
            name = code.called(call)
            passes_model = any(self._is_model(arg.value) for arg in call.args)
            if self.is_call(call) or (passes_model and not wraps(code, call)):
                return True
            functions = [] if name in seen else code.functions.get(name, [])
            if any(self.runs_model(function.body, (*seen, name)) for function in functions):
                return True
        return False

    def is_covered(self, node: Node, seen: tuple[str, ...] = ()) -> bool:
        """Return whether a node runs under autocast, in its own function or in every caller in this file."""
        code, function = self._code, self._code.function(node)
        if any(ancestor in self.covered for ancestor in code.ancestors(node)):
            return True
        if function is None or function.name.value in seen:
            return False
        calls = code.calls_of(function)
        return bool(calls) and all(self.is_covered(call, (*seen, function.name.value)) for call in calls)

    def before(self, backward: Backward, start: Node) -> list[tuple[Node, Node]]:
        """Return the runs of statements that compute the loss of a backward pass, each as its first and last statement.

        Searches the blocks around the backward pass, up to the innermost loop, after the statement `start`. Returns no
        runs if none of them calls a model.
        """
        code, wanted, runs = self._code, self._code.reads(backward.loss), list[list[Node]]()
        outside_loop = False
        for block, statement in code.levels(backward.statement):
            members = code.members(block)
            first = 1 + max((index for index, member in enumerate(members) if code.inside(start, member)), default=-1)
            makers = []
            for member in reversed(members[first : members.index(statement)]):
                if code.assigns(member) & wanted:
                    makers.append(member)
                    wanted |= code.reads(member)
            if outside_loop and any(map(self.runs_model, makers)):
                return []  # the model runs once for several iterations
            while makers and {code.called(call) for call in code.find(makers[-1], m.Call())} <= INERT:
                makers.pop()
            if makers and not outside_loop:
                runs.append(members[members.index(makers[-1]) : members.index(makers[0]) + 1])
            outside_loop = outside_loop or isinstance(code.parent(block), cst.For | cst.While)
        if not any(self.runs_model(statement) for run in runs for statement in run):
            return []
        self.covered.update(statement for run in runs for statement in run)
        return [(run[0], run[-1]) for run in runs]

    def around(self, call: Node, stops: list[Node]) -> tuple[Node, Node]:
        """Return the first and last statement of the run that calls a model and uses its output.

        The run starts with the statement of `call` and ends at the last statement of its block that depends on the
        output, or before a covered statement or one of `stops`.
        """
        code = self._code
        block, statement = next(code.levels(call))
        rest = code.members(block)[code.members(block).index(statement) :]
        outputs, last = code.assigns(statement), 0
        for index, member in enumerate(rest[1:], 1):
            if member in self.covered or any(code.inside(stop, member) for stop in stops):
                break
            if code.reads(member) & outputs:
                outputs |= code.assigns(member)
                last = index
        self.covered.update(rest[: last + 1])
        return rest[0], rest[last]


def wraps(code: Code, call: Node) -> bool:
    """Return whether a call wraps or converts a model: DistributedDataParallel, convert_syncbn_model, torch.compile."""
    return any(word in code.called(call) for word in ("Parallel", "DDP", "convert_sync", "compile"))
