"""Values of a file: follow parameters to their callers, and tell whether other code can read an expression."""

from __future__ import annotations

import libcst as cst
from libcst import matchers as m

from .code import Code, Node
from .rules import bound, code_of, literal


def parameters(function: Node) -> list[Node]:
    """Return a function's parameters without `self` and without `*args` and `**kwargs`."""
    params = [*function.params.params, *function.params.kwonly_params]
    return [param for param in params if param.name.value != "self"]


def passed_values(code: Code, function: Node, name: str) -> list[tuple[str, Node]]:
    """Return the code of a parameter's value in each call of a function in this file, with the call.

    The value is the parameter's default if a call leaves it out, and "" if a call uses `*` or `**`.
    """
    defaults = {param.name.value: param.default for param in parameters(function)}
    values = []
    for call in code.calls_of(function):
        arguments = bound(call, list(defaults))
        value = "" if arguments is None or defaults[name] is None else code.text(defaults[name])
        values.append((code.text(arguments[name].value) if arguments and name in arguments else value, call))
    return values


def outer(code: Code, text: str, node: Node) -> tuple[str, Node]:
    """Trace an expression back through calls; return the expression that the outermost callers pass, and its node.

    If `text` is a parameter, or an attribute of one such as `args.amp`, it is replaced by the argument that the calls
    of the function pass, as long as all pass the same.
    """
    seen: list[Node] = []
    function = code.function(node)
    while function is not None and function not in seen:
        seen.append(function)
        root, dot, rest = text.partition(".")
        if root not in [param.name.value for param in parameters(function)]:
            break
        values = passed_values(code, function, root)
        if len({value for value, _ in values}) != 1 or not values[0][0]:
            break
        if literal(cst.parse_expression(values[0][0])) is not ...:
            break  # a literal in this file's calls need not be the value of other files' calls
        if dot and not values[0][0].replace(".", "").isidentifier():
            break
        text, node = f"{values[0][0]}{dot}{rest}", values[0][1]
        function = code.function(node)
    return text, node


def is_visible(code: Code, text: str, node: Node, statement: Node) -> bool:
    """Return whether an expression written at `node` has the same value right after `statement`.

    It has not if a name in it is local to another function, or is assigned after the statement.
    """
    source, target = code.function(node), code.function(statement)
    expression = cst.parse_expression(text)
    for name in {part.value for part in m.findall(expression, m.Name()) if isinstance(part, cst.Name)}:
        if source is not target and source is not None and name in _locals(code, source):
            return False
        if target is not None and name in [param.name.value for param in parameters(target)]:
            continue
        scope = target if target is not None and name in _locals(code, target) else None
        assigns = [assign for assign in _assignments(code, name) if code.function(assign) is scope]
        if scope is target and any(code.position(assign) > code.position(statement) for assign in assigns):
            return False
    return True


def plain(text: str) -> str:
    """Return an expression without the parentheses that enclose all of it."""
    return code_of(cst.parse_expression(text).with_changes(lpar=(), rpar=()))


def negated(text: str) -> str:
    """Return the negation of a condition; a comparison gets the opposite operator."""
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
    """Return the names of a function's parameters and local variables."""
    names = {param.name.value for param in (*function.params.params, *function.params.kwonly_params)}
    return names | {name for name in code.assigns(function.body) if name.isidentifier()}


def _assignments(code: Code, name: str) -> list[Node]:
    """Return the statements that assign to a name."""
    assigns = code.find(code.module, m.Assign() | m.AugAssign() | m.AnnAssign() | m.For())
    return [assign for assign in assigns if any(name in code.parts(target) for target in _targets(assign))]


def _targets(statement: Node) -> list[Node]:
    """Return the targets of an assignment or a `for` loop."""
    if isinstance(statement, cst.Assign):
        return [target.target for target in statement.targets]
    return [statement.target]
