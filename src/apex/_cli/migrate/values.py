"""Where a value comes from: expressions followed through parameters, and whether another place can read them."""

from __future__ import annotations

import libcst as cst
from libcst import matchers as m

from .code import Code, Node
from .rules import bound, code_of, literal


def parameters(function: Node) -> list[Node]:
    """Return a function's parameters without `self` and without `*args` and `**kwargs`."""
    found = [*function.params.params, *function.params.kwonly_params]
    return [each for each in found if each.name.value != "self"]


def given(code: Code, function: Node, name: str) -> list[tuple[str, Node]]:
    """Return what each call of a function in this file gives for a parameter, with the call.

    A call that leaves the argument out gives the parameter's default. A call that cannot be followed gives "".
    """
    names = [each.name.value for each in parameters(function)]
    default = next(each.default for each in parameters(function) if each.name.value == name)
    found = []
    for call in code.calls_of(function):
        arguments = bound(call, names)
        value = "" if arguments is None else "" if default is None else code.text(default)
        found.append((code.text(arguments[name].value) if arguments and name in arguments else value, call))
    return found


def outer(code: Code, text: str, node: Node) -> tuple[str, Node]:
    """Return an expression at `node` as callers write it, and a place where it is written so.

    A parameter, or the first name of `args.amp`, is followed to the calls of its function as long as all of them give
    the same for it.
    """
    seen: list[Node] = []
    function = code.function(node)
    while function is not None and function not in seen:
        seen.append(function)
        root, dot, rest = text.partition(".")
        if root not in [each.name.value for each in parameters(function)]:
            break
        values = given(code, function, root)
        if len({value for value, _ in values}) != 1 or not values[0][0]:
            break
        if literal(cst.parse_expression(values[0][0])) is not ...:
            break  # the parameter says more than the value that this file happens to give
        if dot and not values[0][0].replace(".", "").isidentifier():
            break
        text, node = f"{values[0][0]}{dot}{rest}", values[0][1]
        function = code.function(node)
    return text, node


def is_visible(code: Code, text: str, node: Node, place: Node) -> bool:
    """Return whether an expression that stands at `node` has its final value right after the statement `place`."""
    here, there = code.function(node), code.function(place)
    expression = cst.parse_expression(text)
    for name in {each.value for each in m.findall(expression, m.Name()) if isinstance(each, cst.Name)}:
        if here is not there and here is not None and name in _locals(code, here):
            return False
        if there is not None and name in [each.name.value for each in parameters(there)]:
            continue
        scope = there if there is not None and name in _locals(code, there) else None
        made = [each for each in _assignments(code, name) if code.function(each) is scope]
        if scope is there and any(code.position(each) > code.position(place) for each in made):
            return False
    return True


def plain(text: str) -> str:
    """Return an expression without parentheses around all of it."""
    return code_of(cst.parse_expression(text).with_changes(lpar=(), rpar=()))


def negated(text: str) -> str:
    """Return the opposite of a condition; comparisons change their operator."""
    node = cst.parse_expression(text)
    opposite = {cst.Equal: cst.NotEqual, cst.NotEqual: cst.Equal, cst.Is: cst.IsNot, cst.IsNot: cst.Is}
    if isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
        (target,) = node.comparisons
        other = opposite.get(type(target.operator))
        if other is not None:
            return plain(code_of(node.with_changes(comparisons=[target.with_changes(operator=other())])))
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        return plain(code_of(node.expression))
    is_simple = isinstance(node, cst.Name | cst.Attribute | cst.Call | cst.Subscript)
    return f"not {plain(text)}" if is_simple else f"not ({plain(text)})"


def _locals(code: Code, function: Node) -> set[str]:
    names = {each.name.value for each in (*function.params.params, *function.params.kwonly_params)}
    return names | {name for name in code.assigns(function.body) if name.isidentifier()}


def _assignments(code: Code, name: str) -> list[Node]:
    assigning = m.Assign() | m.AugAssign() | m.AnnAssign() | m.For()
    return [
        each
        for each in code.find(code.module, assigning)
        if name in {part for target in _targets(each) for part in code.parts(target)}
    ]


def _targets(statement: Node) -> list[Node]:
    if isinstance(statement, cst.Assign):
        return [each.target for each in statement.targets]
    return [statement.target]
