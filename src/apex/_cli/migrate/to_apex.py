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
    """Return the edits that make a file use apex.amp, or none if one place of it cannot be rewritten."""
    uses = [use for use in code.uses("torch") if use.name.startswith(PACKAGES) or use.name == "torch.autocast"]
    casts, scalers = ([use for use in uses if use.last == name] for name in ("autocast", "GradScaler"))
    if not casts and not scalers:
        return Edits()
    others = [use for use in uses if use not in casts and use not in scalers]
    edits = TorchToAmp(code, casts, scalers, _name_of_amp(code, others)).convert()
    return Edits() if code.refusals else edits


def _name_of_amp(code: Code, others: list[Use]) -> str:
    """Return the name that apex.amp gets in this file: "amp", or another if that means something else in it."""
    taken = code.find(code.module, m.AssignTarget(target=m.Name("amp")) | m.Param(name=m.Name("amp")))
    taken += [use.node for use in others if code.text(use.node).startswith("amp.")]  # of torch.amp, and stays
    if taken and code.is_taken("apex_amp"):
        code.refuse(taken[0], "names-taken", names="amp and apex_amp")
    return "apex_amp" if taken else "amp"


class TorchToAmp:
    """The amp code of a file, rewritten together or not at all."""

    def __init__(self, code: Code, casts: list[Use], scalers: list[Use], amp: str) -> None:
        self._code, self._cast_uses, self._scaler_uses, self._amp = code, casts, scalers, amp
        self._torch, self._edits = code.imported_as("torch"), Edits()
        self._casts = Casts(code, self._edits, self._torch, amp)
        self._scaler: Scaler | None = None
        self._first: Node = (scalers or casts)[0].node
        self._scaled: list[Node] = []  # statements with a backward pass
        self._run: dict[str, bool] = {}  # by name: whether it is called under autocast

    def convert(self) -> Edits:
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
        if not self._casts.found and not code.refusals:
            code.refuse(self._first, "autocast-elsewhere")
        if code.refusals:
            return self._edits
        flag = self._common([(each, each.enabled) for each in self._casts.found], "enabled")
        dtype = self._common([(each, each.dtype) for each in self._casts.found], "dtype")
        if flag is None or dtype is None:
            return self._edits
        optimizers = self._replace_scaler(flag) if self._scaler is not None else self._replace_backward()
        if optimizers and not code.refusals:
            self._initialize(optimizers, flag, dtype)
        self._edits.needed.add("from apex import amp" + (f" as {amp}" if amp != "amp" else ""))
        return self._edits

    # Types and flags --------------------------------------------------------------------------------------------------

    def _common(self, values: list[tuple[Cast, str]], name: str) -> list[tuple[str, Node]] | None:
        """Return the one value that all casts of a file have, each way that it is written; None if they differ."""
        code, ways = self._code, list[tuple[str, Node]]()
        canonical: dict[str, Cast] = {}
        for cast, text in values:
            if name == "enabled" and self._scaler is not None and self._scaler.means_enabled(text):
                text, node = self._scaler.enabled, self._scaler.made
            else:
                node = cast.node
            last, there = outer(code, text, node)
            canonical.setdefault(plain(last), cast)
            ways += [(text, node), (plain(last), there)]
        if len(canonical) > 1:
            other = list(canonical)[1]
            if name == "dtype":
                code.refuse(canonical[other].node, "autocast-type", found=other)
            else:
                code.refuse(canonical[other].node, "not-literal", name=name, value=" and ".join(canonical))
            return None
        return ways

    def _at(self, ways: list[tuple[str, Node]], place: Node, name: str) -> str:
        """Return a value as it can be written after the statement `place`."""
        code = self._code
        found = [text for text, node in ways if is_visible(code, text, node, place)]
        if not found:
            rule = "autocast-type" if name == "dtype" else "not-literal"
            code.refuse(self._first, rule, name=name, value=ways[0][0], found=ways[0][0])
        return found[0] if found else "True"

    def _is_flag_of_scaler(self, flag: list[tuple[str, Node]]) -> bool:
        """Return whether casts and scaler are switched on by the same expression."""
        assert self._scaler is not None
        return outer(self._code, self._scaler.enabled, self._scaler.made)[0] == flag[-1][0]

    # Backward passes --------------------------------------------------------------------------------------------------

    def _replace_scaler(self, flag: list[tuple[str, Node]]) -> list[tuple[str, Node]]:
        """Rewrite all uses of the scaler; return the optimizers that it steps, each with a place that names it so."""
        scaler = self._scaler
        assert scaler is not None
        always_on = flag[-1][0] == "True"
        scaler.replace_uses(self._scale_loss, always_on=always_on, as_casts=self._is_flag_of_scaler(flag))
        found = dict(outer(self._code, name, step) for step, name in scaler.steps.items())
        if not found:
            self._code.refuse(self._first, "step-elsewhere", optimizer="optimizer")
        return list(found.items())

    def _replace_backward(self) -> list[tuple[str, Node]]:
        """Without a scaler: rewrite backward passes in functions that step the optimizer, which is returned."""
        code = self._code
        backwards = code.method_calls("backward")
        if not backwards:
            code.refuse(self._first, "autocast-only")
            return []
        functions = {code.function(call) for call in backwards}
        steps = [call for call in code.method_calls("step") if code.function(call) in functions and not call.args]
        steps = [call for call in steps if self._makers(*outer(code, code.text(call.func.value), call), quiet=True)]
        found = dict(outer(code, code.text(call.func.value), call) for call in steps)
        if len(found) != 1:
            code.refuse(self._first, "optimizer-unknown", optimizer="the optimizer")
            return []
        for call in backwards:
            here = [code.text(step.func.value) for step in steps if code.function(step) is code.function(call)]
            if code.is_statement(call) and here:
                self._scale_loss(call, call.func.value, here[:1])
            else:
                code.refuse(call, "step-elsewhere", optimizer=next(iter(found)))
        return list(found.items())

    def _scale_loss(self, call: Node, loss: Node, optimizers: list[str]) -> None:
        code, name = self._code, "amp_scaled_loss" if self._code.is_taken("scaled_loss") else "scaled_loss"
        of = optimizers[0] if len(optimizers) == 1 else f"[{', '.join(optimizers)}]"
        text = code.text(loss.with_changes(lpar=(), rpar=()))
        arguments = ", ".join(code.text(arg).rstrip(", \n") for arg in call.args)
        line = f"with {self._amp}.scale_loss({text}, {of}) as {name}:\n    {name}.backward({arguments})"
        self._edits.replaced[code.statement(call)] = [line]
        self._scaled.append(code.statement(call))

    # amp.initialize ---------------------------------------------------------------------------------------------------

    def _makers(self, name: str, node: Node, *, quiet: bool = False) -> list[Node]:
        """Return the assignments that make an optimizer: one, or one in each branch of an `if`."""
        code = self._code
        assigns = code.find(code.module, m.Assign(targets=[m.AssignTarget()], value=m.Call()))
        found = [each for each in assigns if code.text(each.targets[0].target) == name]
        if "." not in name and code.function(node) is not None:
            found = [each for each in found if code.function(each) in (code.function(node), None)]
        in_one = len({code.function(each) for each in found}) == 1
        if (not in_one or (len(found) > 1 and self._around(found) is None)) and not quiet:
            code.refuse(self._first, "optimizer-unknown", optimizer=name)
        return found if in_one else []

    def _around(self, statements: list[Node]) -> Node | None:
        """Return the outermost `if` whose branches have all statements, one each at most."""
        code = self._code
        shared = [each for each in code.ancestors(statements[0]) if all(code.inside(s, each) for s in statements)]
        if (
            not shared
            or not isinstance(shared[0], cst.If)
            or len({code.block(s) for s in statements}) < len(statements)
        ):
            return None
        holder = shared[0]
        while isinstance(code.parent(holder), cst.If):
            holder = code.parent(holder)
        return holder

    def _initialize(self, optimizers: list[tuple[str, Node]], flag: list[tuple[str, Node]], dtype: list) -> None:
        """Call amp.initialize where models and optimizers are there."""
        code, scaler = self._code, self._scaler
        makers = [self._makers(name, node) for name, node in optimizers]
        if code.refusals:
            return None
        places = [each[0] if len(each) == 1 else self._around(each) for each in makers]
        if len({code.block(place) for place in places}) > 1:
            return code.refuse(self._first, "optimizer-unknown", optimizer=" and ".join(name for name, _ in optimizers))
        if scaler is not None:  # which often stands after what moves the model to its device
            places += [each for block, each in code.levels(scaler.made) if block is code.block(places[0])]
        place = max(places, key=code.position)
        models = self._models([each for found in makers for each in found])
        if not models:
            return code.refuse(self._first, "optimizer-unknown", optimizer=optimizers[0][0])
        options = self._level(dtype, place) + self._scaling(dtype, flag, place)
        if flag[-1][0] != "True":
            options.append(f"enabled={self._at(flag, place, 'enabled')}")
        names, wrapped = [name for name, _ in optimizers], self._wrapped(models, place)
        plain_models = [f'getattr({each}, "module", {each})' if each in wrapped else each for each in models]
        inner, left, right = (
            ", ".join(each) if len(each) == 1 else f"[{', '.join(each)}]" for each in (plain_models, models, names)
        )
        call = f"{self._amp}.initialize({inner}, {right}, {', '.join(options)})"
        # A wrapped model stays as it is: at O1 and O4 the model inside is changed in place.
        self._edits.after[place] = [f"{right} = {call}[1]" if wrapped else f"{left}, {right} = {call}"]
        self._check_models(models, place)
        return None

    def _wrapped(self, models: list[str], place: Node) -> set[str]:
        """Return the models that a DistributedDataParallel or its like was put around before `place`."""
        code, found = self._code, set[str]()
        for call in code.calls:
            is_before = code.function(call) is code.function(place) and code.position(call) < code.position(place)
            if is_before and any(word in code.called(call) for word in ("Parallel", "DDP")):
                found |= code.assigns(code.statement(call)) & set(models)
        return found

    def _level(self, dtype: list[tuple[str, Node]], place: Node) -> list[str]:
        if dtype[-1][0] in _LEVELS:
            return [f'opt_level="{_LEVELS[dtype[-1][0]]}"']
        types = {f"{self._torch}.{name}": level for name, level in ({"float32": "O0"} | _LEVELS).items()}
        levels = ", ".join(f'{name}: "{level}"' for name, level in types.items())
        self._edits.needed.add("import torch" if self._torch == "torch" else f"import torch as {self._torch}")
        return [f"opt_level={{{levels}}}[{self._at(dtype, place, 'dtype')}]"]

    def _scaling(self, dtype: list[tuple[str, Node]], flag: list[tuple[str, Node]], place: Node) -> list[str]:
        """Return the arguments of amp.initialize that say how losses are scaled."""
        scaler, level = self._scaler, _LEVELS.get(dtype[-1][0])
        if scaler is None:
            return [] if level == "O4" else ["loss_scale=1.0"]
        if scaler.enabled == "True" or self._is_flag_of_scaler(flag):
            return [*scaler.options, *([] if level == "O1" else ['loss_scale="dynamic"'])]
        ways = [(scaler.enabled, scaler.made), outer(self._code, scaler.enabled, scaler.made)]
        return [*scaler.options, f'loss_scale="dynamic" if {self._at(ways, place, "enabled")} else 1.0']

    # Models -----------------------------------------------------------------------------------------------------------

    def _models(self, makers: list[Node]) -> list[str]:
        """Return the models whose parameters optimizers are made from.

        A model is what `.parameters()` or `.named_parameters()` is called on. If the optimizer is made by a function,
        the model is what is given to it, or whose method it is, and is called under autocast.
        """
        code, found = self._code, list[str]()
        for maker in makers:
            sources = self._sources(maker)
            owners = [
                call.func.value
                for source in sources
                for name in ("parameters", "named_parameters")
                for call in code.method_calls(name)
                if code.inside(call, source)
            ]
            names = [self._whole(code.text(each)) for each in sorted(owners, key=code.position)]
            read = sorted({name for source in sources for name in code.reads(source)} - {"None", "True", "False"})
            found += names or [name for name in read if self._is_run(name)]
        return list(dict.fromkeys(found))

    def _sources(self, maker: Node) -> list[Node]:
        """Return the expression that makes an optimizer, and the earlier statements that make what it is given."""
        code, found, wanted = self._code, [maker.value], self._code.reads(maker.value) - {"self"}
        scope = code.function(maker) or code.module
        for each in reversed(code.find(scope, m.Assign() | m.AugAssign() | m.For())):
            is_before = code.function(each) is code.function(maker) and code.position(each) < code.position(maker)
            makes = code.assigns(each) & wanted
            if is_before and makes and not any(map(self._is_run, makes)):
                found.append(each)
                wanted |= code.reads(each) - {"self"}
        return found

    def _whole(self, name: str) -> str:
        """Return the model that a part of a model belongs to: `model` for `model.backbone`."""
        root = name.partition(".")[0]
        return root if root not in ("self", name) and self._is_run(root) else name

    def _is_run(self, name: str) -> bool:
        """Return whether something of this name is called under autocast."""
        if name not in self._run:
            forward = self._forward({name})
            self._run[name] = any(forward.is_call(call) and forward.is_covered(call) for call in self._code.calls)
        return self._run[name]

    def _forward(self, models: set[str]) -> Forward:
        """Return the forward passes of models, of their wrappers and of other variables that hold them."""
        code, names = self._code, set(models)
        pairs = [
            (code.text(each.targets[0].target), code.text(each.value).removesuffix(".module"))
            for each in code.find(code.module, m.Assign(targets=[m.AssignTarget()], value=m.Name() | m.Attribute()))
        ]
        for _ in pairs:
            names |= {other for pair in pairs if names & set(pair) for other in pair} - {"None", "True", "False"}
        forward = Forward(code, names)
        forward.covered = set(self._casts.covered)
        return forward

    def _check_models(self, models: list[str], place: Node) -> None:
        """Refuse models that are moved after `place`, and put calls of them without autocast under no casts."""
        code, forward = self._code, self._forward(set(models))
        casts_itself = self._casts.classes and self._are_made_by(models, self._casts.classes)
        if self._casts.classes and not casts_itself:
            code.refuse(self._first, "autocast-form")
        for call in code.calls:
            before = code.position(call) <= code.position(place) and code.function(call) is code.function(place)
            if forward.is_call(call) and not casts_itself and not before and not forward.is_covered(call):
                self._without_casts(forward, call, place)
            moved = code.called(call) in ("to", "cuda") and code.text(getattr(call.func, "value", call)) in models
            is_used = any(code.position(call) < code.position(each) for each in self._scaled)
            is_used = is_used or not any(code.function(each) is code.function(call) for each in self._scaled)
            if moved and not before and is_used and code.function(call) is code.function(place):
                code.refuse(call, "model-order", model=models[0])

    def _are_made_by(self, models: list[str], classes: set[str]) -> bool:
        """Return whether each model is an object of one of these classes of the file."""
        code = self._code
        assigns = code.find(code.module, m.Assign(targets=[m.AssignTarget()]))
        made = [each for each in assigns if code.text(each.targets[0].target) in models]
        return all(any(code.called(call) in classes for call in code.find(each.value, m.Call())) for each in made)

    def _without_casts(self, forward: Forward, call: Node, place: Node) -> None:
        """Put a call of a model that ran without autocast, and what is computed from it, under amp.disable_casts()."""
        code = self._code
        statement = next(each for _, each in code.levels(call))
        stops = [*self._scaled, place, *(self._scaler.steps if self._scaler is not None else ())]
        holds = [*stops, *self._casts.covered]
        is_later = any(isinstance(each, cst.Lambda | cst.GeneratorExp) for each in code.ancestors(call))
        if is_later or any(code.inside(each, statement) for each in holds):
            return code.refuse(call, "outside-autocast", model=code.text(call.func))
        first, last = forward.around(call, holds)
        self._edits.wrapped[first] = (last, f"{self._amp}.disable_casts()")
        return None
