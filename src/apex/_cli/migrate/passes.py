"""Forward and backward passes of a file: what apex.amp casts by itself, and torch.autocast has to be put around."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
from libcst import matchers as m

from .code import Code, Node, Use
from .rules import INERT, SCALE_LOSS, bound, literal


@dataclass
class Backward:
    """A `with amp.scale_loss(...)` with one backward pass in it."""

    statement: Node
    loss: Node
    optimizers: list[str]
    arguments: list[str]  # of `backward`
    loss_id: str


def backward_pass(code: Code, use: Use) -> Backward | None:
    """The backward pass under an `amp.scale_loss`; None, with a reason noted, if there is more to it."""
    given = None if use.call is None else bound(use.call, SCALE_LOSS)
    item: Node = code.parent(use.call)
    if (
        given is None
        or not {"loss", "optimizers"} <= given.keys()
        or not m.matches(item, m.WithItem(asname=m.AsName()))
    ):
        code.refuse(use.node, "call-form", function="amp.scale_loss", problem="not `with amp.scale_loss(...) as ...`")
        return None
    for name in ("delay_unscale", "delay_overflow_check"):
        if name in given and literal(given[name].value) is not False:
            code.refuse(use.node, "delayed", name=name)
            return None
    statement, name = code.parent(item), code.text(item.asname.name)
    pattern = m.Expr(m.Call(func=m.Attribute(value=m.Name(name), attr=m.Name("backward"))))
    body = code.members(statement.body)
    named = code.find(code.function(statement) or code.module, m.Name(name))
    uses = [each for each in named if not any(m.matches(up, _SCALED) for up in code.ancestors(each))]
    if len(statement.items) > 1 or len(body) != 1 or not m.matches(body[0], pattern) or uses:
        code.refuse(use.node, "scaled-loss")
        return None
    arguments = [code.text(arg).rstrip(", \n") for arg in body[0].value.args]
    loss_id = code.text(given["loss_id"].value) if "loss_id" in given else "0"
    return Backward(statement, given["loss"].value, code.parts(given["optimizers"].value), arguments, loss_id)


_SCALED = m.With(items=[m.WithItem(item=m.Call(func=m.Name("scale_loss") | m.Attribute(attr=m.Name("scale_loss"))))])


class Forward:
    """The models of a file, by the expressions that they are called by, and which statements are under autocast."""

    def __init__(self, code: Code, models: set[str]) -> None:
        self._code, self.models = code, set[str]()
        self.covered: set[Node] = set()
        while models - self.models:
            self.models |= models
            models = self._other_names()

    def _other_names(self) -> set[str]:
        """What wraps a model (`net = DDP(model)`), and parameters of functions that are called with one."""
        code, found = self._code, set[str]()
        for call in code.calls:
            given = [
                arg.keyword.value if arg.keyword else place
                for place, arg in enumerate(call.args)
                if self._is_model(arg.value)
            ]
            if given[:1] == [0] and wraps(code, call) and isinstance(code.parent(call), cst.Assign):
                found |= code.assigns(code.parent(call))
            for function in code.functions.get(code.called(call), []):
                params = [each.name.value for each in function.params.params if each.name.value != "self"]
                found |= {
                    each if isinstance(each, str) else params[each]
                    for each in given
                    if isinstance(each, str) or each < len(params)
                }
        return found

    def _is_model(self, node: Node) -> bool:
        return self._code.text(node) in self.models

    def is_call(self, call: Node) -> bool:
        """Whether a model is called."""
        func = call.func
        while isinstance(func, cst.Attribute) and func.attr.value in ("forward", "module"):
            func = func.value
        return self._is_model(func)

    def runs_model(self, node: Node, seen: tuple[str, ...] = ()) -> bool:
        """Whether a model is called in a node, or in functions of this file that it calls, or given to a function."""
        code = self._code
        for call in code.find(node, m.Call()):
            name = code.called(call)
            given = any(self._is_model(arg.value) for arg in call.args)
            if self.is_call(call) or (given and not wraps(code, call)):
                return True
            known = [] if name in seen else code.functions.get(name, [])
            if any(self.runs_model(each.body, (*seen, name)) for each in known):
                return True
        return False

    def is_covered(self, node: Node, seen: tuple[str, ...] = ()) -> bool:
        """Whether a node is under autocast, in its function or wherever its function is called in this file."""
        code, function = self._code, self._code.function(node)
        if any(each in self.covered for each in code.ancestors(node)):
            return True
        if function is None or function.name.value in seen:
            return False
        callers = code.calls_of(function)
        return bool(callers) and all(self.is_covered(each, (*seen, function.name.value)) for each in callers)

    def before(self, backward: Backward, start: Node) -> list[tuple[Node, Node]]:
        """Runs of statements, first and last, that make the loss of a backward pass; none if no model is in them.

        They are searched in the blocks that the pass is in, up to the innermost loop, and after the statement `start`.
        """
        code, wanted, found = self._code, self._code.reads(backward.loss), list[list[Node]]()
        outside = False
        for block, statement in code.levels(backward.statement):
            members = code.members(block)
            first = 1 + max((place for place, each in enumerate(members) if code.inside(start, each)), default=-1)
            makers = []
            for each in reversed(members[first : members.index(statement)]):
                if code.assigns(each) & wanted:
                    makers.append(each)
                    wanted |= code.reads(each)
            if outside and any(map(self.runs_model, makers)):
                return []  # once for several iterations
            while makers and {code.called(call) for call in code.find(makers[-1], m.Call())} <= INERT:
                makers.pop()
            if makers and not outside:
                found.append(members[members.index(makers[-1]) : members.index(makers[0]) + 1])
            outside = outside or isinstance(code.parent(block), cst.For | cst.While)
        if not any(self.runs_model(each) for run in found for each in run):
            return []
        self.covered.update(each for run in found for each in run)
        return [(run[0], run[-1]) for run in found]

    def around(self, call: Node, stops: list[Node]) -> tuple[Node, Node]:
        """The statement with a call of a model and those after it, in its block, that use what comes out of it."""
        code = self._code
        block, statement = next(code.levels(call))
        rest = code.members(block)[code.members(block).index(statement) :]
        made, last = code.assigns(statement), 0
        for place, each in enumerate(rest[1:], 1):
            if each in self.covered or any(code.inside(stop, each) for stop in stops):
                break
            if code.reads(each) & made:
                made |= code.assigns(each)
                last = place
        self.covered.update(rest[: last + 1])
        return rest[0], rest[last]


def wraps(code: Code, call: Node) -> bool:
    """Whether a call makes a model of a model: DistributedDataParallel, convert_syncbn_model, torch.compile."""
    return any(word in code.called(call) for word in ("Parallel", "DDP", "convert_sync", "compile"))
