"""From torch.amp to apex.amp: autocast and GradScaler become an opt level and amp.scale_loss."""

from __future__ import annotations

import libcst as cst
from libcst import matchers as m

from .casts import PACKAGES, Cast, Casts
from .code import Code, Node, Use
from .edits import Edits
from .passes import Forward
from .scaler import Scaler
from .values import is_visible, outer, plain

_LEVELS = {"float16": "O1", "bfloat16": "O4"}


def convert(code: Code) -> Edits:
    """Return the edits that make a file use apex.amp, or no edits if one place cannot be rewritten."""
    uses = [use for use in code.uses("torch") if use.name.startswith(PACKAGES) or use.name == "torch.autocast"]
    casts, scalers = ([use for use in uses if use.last == name] for name in ("autocast", "GradScaler"))
    if not casts and not scalers:
        return Edits()
    others = [use for use in uses if use not in casts and use not in scalers]
    edits = TorchToAmp(code, casts, scalers, _name_of_amp(code, others)).convert()
    return Edits() if code.refusals else edits


def _name_of_amp(code: Code, others: list[Use]) -> str:
    """Return the name under which to import apex.amp: "amp", or "apex_amp" if the file uses "amp" otherwise."""
    taken = code.find(code.module, m.AssignTarget(target=m.Name("amp")) | m.Param(name=m.Name("amp")))
    taken += [use.node for use in others if code.text(use.node).startswith("amp.")]  # torch.amp code that stays
    if taken and code.is_taken("apex_amp"):
        code.refuse(taken[0], "names-taken", names="amp and apex_amp")
    return "apex_amp" if taken else "amp"


class TorchToAmp:
    """A rewrite of a file's torch.amp code to apex.amp, as a whole or not at all.

    A value such as autocast's `enabled` can often be written in several ways, because functions pass it on. Methods
    take and return the `ways`: pairs of an expression and a node where it is written, the outermost caller's last.
    """

    def __init__(self, code: Code, casts: list[Use], scalers: list[Use], amp: str) -> None:
        self._code, self._cast_uses, self._scaler_uses, self._amp = code, casts, scalers, amp
        self._torch, self._edits = code.imported_as("torch"), Edits()
        self._casts = Casts(code, self._edits, self._torch, amp)
        self._scaler: Scaler | None = None
        self._first: Node = (scalers or casts)[0].node
        self._scaled: list[Node] = []  # statements with a backward pass
        self._run: dict[str, bool] = {}  # whether the object of a name is called under autocast

    def convert(self) -> Edits:
        """Return the edits; they are incomplete if a place was refused."""
        code, amp = self._code, self._amp
        for use in code.uses("apex.amp"):
            if use.last in ("initialize", "scale_loss"):
                code.refuse(use.node, "both")
        for use in self._scaler_uses[1:]:
            code.refuse(use.node, "several-scalers")
        if self._scaler_uses:
            self._scaler = Scaler(code, self._edits, self._scaler_uses[0], amp)
            self._scaler.follow_parameters()
        for use in self._cast_uses:
            self._casts.read(use)
            if self._scaler is not None and use.call is not None:
                self._scaler.ignore(use.call)
        if not self._casts.casts and not code.refusals:
            code.refuse(self._first, "autocast-elsewhere")
        if code.refusals:
            return self._edits
        flag = self._common([(cast, cast.enabled) for cast in self._casts.casts], "enabled")
        dtype = self._common([(cast, cast.dtype) for cast in self._casts.casts], "dtype")
        if flag is None or dtype is None:
            return self._edits
        optimizers = self._replace_scaler(flag) if self._scaler is not None else self._replace_backward()
        if optimizers and not code.refusals:
            self._initialize(optimizers, flag, dtype)
        self._edits.needed.add("from apex import amp" + (f" as {amp}" if amp != "amp" else ""))
        return self._edits

    def _common(self, values: list[tuple[Cast, str]], name: str) -> list[tuple[str, Node]] | None:
        """Return expressions for argument `name` if all casts of the file have it equal; otherwise refuse the file."""
        code, ways = self._code, list[tuple[str, Node]]()
        canonical: dict[str, Cast] = {}
        for cast, text in values:
            if name == "enabled" and self._scaler is not None and self._scaler.means_enabled(text):
                text, node = self._scaler.enabled, self._scaler.made
            else:
                node = cast.node
            outermost, outer_node = outer(code, text, node)
            canonical.setdefault(plain(outermost), cast)
            ways += [(text, node), (plain(outermost), outer_node)]
        if len(canonical) > 1:
            other = list(canonical)[1]
            if name == "dtype":
                code.refuse(canonical[other].node, "autocast-type", dtype=other)
            else:
                code.refuse(canonical[other].node, "not-literal", name=name, value=" and ".join(canonical))
            return None
        return ways

    def _visible(self, ways: list[tuple[str, Node]], statement: Node, name: str) -> str:
        """Return the first way to write a value that is valid after `statement`, or refuse."""
        code = self._code
        visible = [text for text, node in ways if is_visible(code, text, node, statement)]
        if not visible:
            rule = "autocast-type" if name == "dtype" else "not-literal"
            code.refuse(self._first, rule, name=name, value=ways[0][0], dtype=ways[0][0])
        return visible[0] if visible else "True"

    def _is_flag_of_scaler(self, flag: list[tuple[str, Node]]) -> bool:
        """Return whether the same expression enables the casts and the scaler."""
        assert self._scaler is not None
        return outer(self._code, self._scaler.enabled, self._scaler.made)[0] == flag[-1][0]

    def _replace_scaler(self, flag: list[tuple[str, Node]]) -> list[tuple[str, Node]]:
        """Rewrite all uses of the scaler; return the optimizers that it steps, each with a node that names it."""
        scaler = self._scaler
        assert scaler is not None
        always_on = flag[-1][0] == "True"
        scaler.replace_uses(self._scale_loss, always_on=always_on, as_casts=self._is_flag_of_scaler(flag))
        optimizers = dict(outer(self._code, name, step) for step, name in scaler.steps.items())
        if not optimizers:
            self._code.refuse(self._first, "step-elsewhere", optimizer="optimizer")
        return list(optimizers.items())

    def _replace_backward(self) -> list[tuple[str, Node]]:
        """Rewrite the backward passes of a file without a scaler; return the optimizer that steps beside them."""
        code = self._code
        backwards = code.method_calls("backward")
        if not backwards:
            code.refuse(self._first, "autocast-only")
            return []
        functions = {code.function(call) for call in backwards}
        steps = [call for call in code.method_calls("step") if code.function(call) in functions and not call.args]
        steps = [call for call in steps if self._makers(*outer(code, code.text(call.func.value), call), quiet=True)]
        optimizers = dict(outer(code, code.text(call.func.value), call) for call in steps)
        if len(optimizers) != 1:
            code.refuse(self._first, "optimizer-unknown", optimizer="the optimizer")
            return []
        for call in backwards:
            nearby = [code.text(step.func.value) for step in steps if code.function(step) is code.function(call)]
            if code.is_statement(call) and nearby:
                self._scale_loss(call, call.func.value, nearby[:1])
            else:
                code.refuse(call, "step-elsewhere", optimizer=next(iter(optimizers)))
        return list(optimizers.items())

    def _scale_loss(self, call: Node, loss: Node, optimizers: list[str]) -> None:
        """Replace a call of `backward` by `with amp.scale_loss(...)`."""
        code, name = self._code, "amp_scaled_loss" if self._code.is_taken("scaled_loss") else "scaled_loss"
        text = code.text(loss.with_changes(lpar=(), rpar=()))
        arguments = ", ".join(code.text(arg).rstrip(", \n") for arg in call.args)
        header = f"with {self._amp}.scale_loss({text}, {_one_or_list(optimizers)}) as {name}"
        line = f"{header}:\n    {name}.backward({arguments})"
        self._edits.replaced[code.statement(call)] = [line]
        self._scaled.append(code.statement(call))

    def _makers(self, name: str, node: Node, *, quiet: bool = False) -> list[Node]:
        """Return the assignments that make an optimizer: one, or one in each branch of an `if`."""
        code = self._code
        assigns = code.find(code.module, m.Assign(targets=[m.AssignTarget()], value=m.Call()))
        makers = [assign for assign in assigns if code.text(assign.targets[0].target) == name]
        if "." not in name and code.function(node) is not None:
            makers = [maker for maker in makers if code.function(maker) in (code.function(node), None)]
        in_one = len({code.function(maker) for maker in makers}) == 1
        if (not in_one or (len(makers) > 1 and self._around(makers) is None)) and not quiet:
            code.refuse(self._first, "optimizer-unknown", optimizer=name)
        return makers if in_one else []

    def _around(self, statements: list[Node]) -> Node | None:
        """Return the `if` statement whose branches contain all statements, at most one each; None if there is none."""
        code = self._code
        shared = [outer for outer in code.ancestors(statements[0]) if all(code.inside(s, outer) for s in statements)]
        one_each = len({code.block(s) for s in statements}) == len(statements)
        if not shared or not isinstance(shared[0], cst.If) or not one_each:
            return None
        holder = shared[0]
        while isinstance(code.parent(holder), cst.If):
            holder = code.parent(holder)
        return holder

    def _initialize(self, optimizers: list[tuple[str, Node]], flag: list[tuple[str, Node]], dtype: list) -> None:
        """Insert amp.initialize after the statements that make the optimizers and the scaler."""
        code, scaler = self._code, self._scaler
        makers = [self._makers(name, node) for name, node in optimizers]
        if code.refusals:
            return None
        statements = [one[0] if len(one) == 1 else self._around(one) for one in makers]
        if len({code.block(statement) for statement in statements}) > 1:
            return code.refuse(self._first, "optimizer-unknown", optimizer=" and ".join(name for name, _ in optimizers))
        if scaler is not None:  # scripts often move the model to its device before they make the scaler
            block = code.block(statements[0])
            statements += [statement for level, statement in code.levels(scaler.made) if level is block]
        last = max(statements, key=code.position)
        models = self._models([maker for one in makers for maker in one])
        if not models:
            return code.refuse(self._first, "optimizer-unknown", optimizer=optimizers[0][0])
        options = self._level(dtype, last) + self._scaling(dtype, flag, last)
        if flag[-1][0] != "True":
            options.append(f"enabled={self._visible(flag, last, 'enabled')}")
        wrapped = self._wrapped(models, last)
        plain_models = [f'getattr({model}, "module", {model})' if model in wrapped else model for model in models]
        names = _one_or_list([name for name, _ in optimizers])
        call = f"{self._amp}.initialize({_one_or_list(plain_models)}, {names}, {', '.join(options)})"
        # A wrapped model stays as it is: at O1 and O4 the model inside is changed in place.
        line = f"{names} = {call}[1]" if wrapped else f"{_one_or_list(models)}, {names} = {call}"
        self._edits.after[last] = [line]
        self._check_models(models, last)
        return None

    def _wrapped(self, models: list[str], statement: Node) -> set[str]:
        """Return the models that were put into a DistributedDataParallel or similar before `statement`."""
        code, wrapped = self._code, set[str]()
        for call in code.calls:
            is_before = code.position(call) < code.position(statement)
            is_before = is_before and code.function(call) is code.function(statement)
            if is_before and any(word in code.called(call) for word in ("Parallel", "DDP")):
                wrapped |= code.assigns(code.statement(call)) & set(models)
        return wrapped

    def _level(self, dtype: list[tuple[str, Node]], statement: Node) -> list[str]:
        """Return the argument `opt_level` for a dtype; a dictionary lookup if the dtype is known only at run time."""
        if dtype[-1][0] in _LEVELS:
            return [f'opt_level="{_LEVELS[dtype[-1][0]]}"']
        types = {f"{self._torch}.{name}": level for name, level in ({"float32": "O0"} | _LEVELS).items()}
        levels = ", ".join(f'{name}: "{level}"' for name, level in types.items())
        self._edits.needed.add("import torch" if self._torch == "torch" else f"import torch as {self._torch}")
        return [f"opt_level={{{levels}}}[{self._visible(dtype, statement, 'dtype')}]"]

    def _scaling(self, dtype: list[tuple[str, Node]], flag: list[tuple[str, Node]], statement: Node) -> list[str]:
        """Return the arguments of amp.initialize for the loss scale."""
        scaler, level = self._scaler, _LEVELS.get(dtype[-1][0])
        if scaler is None:
            return [] if level == "O4" else ["loss_scale=1.0"]
        if scaler.enabled == "True" or self._is_flag_of_scaler(flag):
            return [*scaler.options, *([] if level == "O1" else ['loss_scale="dynamic"'])]
        ways = [(scaler.enabled, scaler.made), outer(self._code, scaler.enabled, scaler.made)]
        return [*scaler.options, f'loss_scale="dynamic" if {self._visible(ways, statement, "enabled")} else 1.0']

    def _models(self, makers: list[Node]) -> list[str]:
        """Return the models whose parameters are given to the optimizers.

        A model is an object whose `parameters` or `named_parameters` is called. If a function or a method makes the
        optimizer, the model is the argument or the object that is also called under autocast.
        """
        code, models = self._code, list[str]()
        for maker in makers:
            sources = self._sources(maker)
            owners = [
                call.func.value
                for source in sources
                for name in ("parameters", "named_parameters")
                for call in code.method_calls(name)
                if code.inside(call, source)
            ]
            names = [self._whole(code.text(owner)) for owner in sorted(owners, key=code.position)]
            read = sorted({name for source in sources for name in code.reads(source)} - {"None", "True", "False"})
            models += names or [name for name in read if self._is_run(name)]
        return list(dict.fromkeys(models))

    def _sources(self, maker: Node) -> list[Node]:
        """Return the expression that makes an optimizer, and the earlier statements that make its arguments."""
        code, sources, wanted = self._code, [maker.value], self._code.reads(maker.value) - {"self"}
        scope = code.function(maker) or code.module
        for statement in reversed(code.find(scope, m.Assign() | m.AugAssign() | m.For())):
            is_before = code.position(statement) < code.position(maker)
            is_before = is_before and code.function(statement) is code.function(maker)
            makes = code.assigns(statement) & wanted
            if is_before and makes and not any(map(self._is_run, makes)):
                sources.append(statement)
                wanted |= code.reads(statement) - {"self"}
        return sources

    def _whole(self, name: str) -> str:
        """Return the model that a part of a model belongs to: `model` for `model.backbone`."""
        root = name.partition(".")[0]
        return root if root not in ("self", name) and self._is_run(root) else name

    def _is_run(self, name: str) -> bool:
        """Return whether an object of this name is called under autocast."""
        if name not in self._run:
            forward = self._forward({name})
            self._run[name] = any(forward.is_call(call) and forward.is_covered(call) for call in self._code.calls)
        return self._run[name]

    def _forward(self, models: set[str]) -> Forward:
        """Return the forward passes of models, of their wrappers and of other variables that hold them."""
        code, names = self._code, set(models)
        assigns = code.find(code.module, m.Assign(targets=[m.AssignTarget()], value=m.Name() | m.Attribute()))
        pairs = [
            (code.text(assign.targets[0].target), code.text(assign.value).removesuffix(".module")) for assign in assigns
        ]
        for _ in pairs:
            names |= {other for pair in pairs if names & set(pair) for other in pair} - {"None", "True", "False"}
        forward = Forward(code, names)
        forward.covered = set(self._casts.covered)
        return forward

    def _check_models(self, models: list[str], statement: Node) -> None:
        """Refuse models that are moved after `statement`, and disable casts around calls that had no autocast."""
        code, forward = self._code, self._forward(set(models))
        casts_itself = self._casts.classes and self._are_made_by(models, self._casts.classes)
        if self._casts.classes and not casts_itself:
            code.refuse(self._first, "autocast-form")
        for call in code.calls:
            in_function = code.function(call) is code.function(statement)
            before = code.position(call) <= code.position(statement) and in_function
            if forward.is_call(call) and not casts_itself and not before and not forward.is_covered(call):
                self._without_casts(forward, call, statement)
            moved = code.called(call) in ("to", "cuda") and code.text(getattr(call.func, "value", call)) in models
            is_used = any(code.position(call) < code.position(scaled) for scaled in self._scaled)
            is_used = is_used or not any(code.function(scaled) is code.function(call) for scaled in self._scaled)
            if moved and not before and is_used and in_function:
                code.refuse(call, "model-order", model=models[0])

    def _are_made_by(self, models: list[str], classes: set[str]) -> bool:
        """Return whether every assignment to a model calls one of these classes of the file."""
        code = self._code
        assigns = code.find(code.module, m.Assign(targets=[m.AssignTarget()]))
        values = [assign.value for assign in assigns if code.text(assign.targets[0].target) in models]
        return all(any(code.called(call) in classes for call in code.find(value, m.Call())) for value in values)

    def _without_casts(self, forward: Forward, call: Node, initialize: Node) -> None:
        """Put a model's call that had no autocast, and statements that use its output, under amp.disable_casts().

        `initialize` is the statement after which amp.initialize is inserted.
        """
        code = self._code
        statement = next(code.levels(call))[1]
        steps = self._scaler.steps if self._scaler is not None else ()
        stops = [*self._scaled, initialize, *steps, *self._casts.covered]
        is_later = any(isinstance(outer, cst.Lambda | cst.GeneratorExp) for outer in code.ancestors(call))
        if is_later or any(code.inside(stop, statement) for stop in stops):
            return code.refuse(call, "outside-autocast", model=code.text(call.func))
        first, last = forward.around(call, stops)
        self._edits.wrapped[first] = (last, f"{self._amp}.disable_casts()")
        return None


def _one_or_list(names: list[str]) -> str:
    """Return the code of a single name, or of a list of several."""
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
