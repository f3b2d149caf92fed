"""One declaration per op: from a schema, a reference, launches and a shape rule to everything that PyTorch needs.

    GLU = Op(
        FAMILY,
        "glu(Tensor input, Tensor? bias, str activation) -> Tensor",
        reference=reference.forward,  # any device and dtype, differentiable
        kernels=Kernels(launch_forward, launch_backward),  # tensors that the kernels take
        shapes=lambda input, bias, activation: input.new_empty((*input.shape[:-1], input.shape[-1] // 2)),
        saved=Saved("input", "bias"),
    )
    output = GLU(input, bias, "silu")

The declaration makes `torch.ops.apex.glu` and `glu_backward` with fake kernels and autograd for `torch.compile`, the
node of eager autograd, and second derivatives through the reference. A schema names tensors first; the arguments after
them are its settings, which every function receives.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _library
from ._library import TOO_WIDE

Found = tuple[Tensor | None, ...]
Results = Tensor | Found
Gradients = Tensor | None | Found
Values = Sequence[Any]


@dataclass(frozen=True)
class Kernels:
    """Functions that launch an op's kernels.

    `forward` takes the schema's arguments and returns its results. `backward` takes the output's gradient, the saved
    tensors, the settings, and `wanted`, a bool for each tensor that can have a gradient; it returns one gradient for
    each. `takes(*arguments)` may return False for arguments that kernels could take but the reference should.
    """

    forward: Callable[..., Results]
    backward: Callable[..., Gradients]
    takes: Callable[..., bool] | None = None


class Saved:
    """Names of arguments and results kept for the backward pass; `choose(arguments, results)` may choose them."""

    def __init__(self, *names: str, choose: Callable[[tuple, tuple], tuple] | None = None) -> None:
        self.names, self.choose = names, choose


@dataclass(frozen=True)
class Memory:
    """Names of an op's tensors that need not be contiguous in memory.

    Kernels take arguments, and gradients of results, that are `strided`, as they lie. Results and arguments that are
    `same_as_first` lie as the first argument does, and so do their gradients; `torch.compile` sees others contiguous.
    """

    strided: Sequence[str] = ()
    same_as_first: Sequence[str] = ()


@dataclass(frozen=True)
class Derivative:
    """Gradients of an op: `of` names the tensors that can have one, None: all.

    - `backward` takes the arguments of the kernels' `backward` and is used when no kernel is. Without it, autograd
      differentiates the reference, as it does for second derivatives.
    - `shapes` is the shape rule of the gradients; by default a gradient is like the saved tensor of the same name.
    - `formula` replaces the reference in second derivatives if PyTorch has no second derivative of the reference.
    - `once(*settings)` returns why there is no second derivative, or None if there is one.
    """

    of: Sequence[str] | None = None
    backward: Callable[..., Gradients] | None = None
    shapes: Callable[..., Gradients] | None = None
    formula: Callable[..., Results] | None = None
    once: Callable[..., str | None] | None = None


class Op:
    """An operator with Triton kernels on GPUs and PyTorch's operators elsewhere; call it with the schema's arguments.

    `reference` takes the schema's arguments and returns its results: first the output for the caller, then tensors (or
    None) that only the backward pass needs. `shapes` is the shape rule of the results.
    """

    def __init__(
        self,
        family: _library.OpFamily,
        schema: str,
        *,
        reference: Callable[..., Results],
        kernels: Kernels,
        shapes: Callable[..., Results],
        saved: Saved,
        memory: Memory = Memory(),  # noqa: B008  immutable
        derivative: Derivative = Derivative(),  # noqa: B008  immutable
    ) -> None:
        self.family = family
        self.name = schema[: schema.index("(")]
        parsed = torch._C.parse_schema(f"apex::{schema}")
        is_tensor = ["Tensor" in str(argument.type) for argument in parsed.arguments]
        self.tensors = is_tensor.count(True)
        if not all(is_tensor[: self.tensors]):
            raise ValueError(f"{self.name} must name its tensors first: {schema}")
        self.arguments = [argument.name for argument in parsed.arguments]
        self.results = [result.name for result in parsed.returns]
        self.saves = saved.names
        self.gradients = tuple(self.arguments[: self.tensors] if derivative.of is None else derivative.of)
        self._reference = reference
        self._reference_backward = derivative.backward
        self._formula = derivative.formula or reference
        self._forward = kernels.forward
        self._backward = kernels.backward
        self._takes = kernels.takes
        self._once = derivative.once
        self._gradient_places = [self.arguments.index(name) for name in self.gradients]
        self._gradients_lead = self._gradient_places == list(range(len(self.gradients)))
        self._loose = [i for i, name in enumerate(self.arguments[: self.tensors]) if name not in memory.strided]
        backward_tensors = (self.results[0], *self.saves)
        self._loose_backward = [i for i, name in enumerate(backward_tensors) if name not in memory.strided]
        names = (*self.arguments, *self.results)
        self._save = saved.choose or self._save_by_name
        self._saved_places = [] if saved.choose else [names.index(name) for name in self.saves]
        self._node = _node_of(self, lambda ctx, *given: self.forward_and_save(ctx, *given[-1])).apply
        self._launching_node = _node_of(self, self._launch_and_save).apply
        self._same_layout = frozenset(memory.same_as_first)
        self._register(schema, shapes, derivative.shapes or self._like_saved)

    def __call__(self, *arguments: Any) -> Any:
        """Return the differentiable output. The caller has checked the arguments."""
        output = self.with_kernels(arguments)
        if output is not None:
            return output
        if self._reference_backward and self._needs_grad(arguments) and _library.is_eager(arguments[0]):
            return self._node(*arguments[: self.tensors], arguments)
        return _as_tuple(self._reference(*arguments))[0]

    def with_kernels(self, arguments: tuple) -> Any:
        """Return the differentiable output, or None if kernels do not take the arguments."""
        compiling = torch.compiler.is_compiling()
        if not self._fit(arguments, self.tensors, compiling) or not (self._takes is None or self._takes(*arguments)):
            return None
        if compiling:
            return _as_tuple(self._library_op(*arguments))[0]
        if not arguments[0].numel():
            return _as_tuple(self._reference(*arguments))[0]
        if self._needs_grad(arguments):
            return self._launching_node(*arguments[: self.tensors], arguments)
        return self._launch(arguments)[0]

    def _needs_grad(self, arguments: tuple) -> bool:
        if torch.is_grad_enabled():
            for place in self._gradient_places:
                tensor = arguments[place]
                if tensor is not None and tensor.requires_grad:
                    return True
        return False

    def differentiable(self, *arguments: Any) -> Any:
        """Return the output through this op's own autograd node, which saves only the tensors named in `saves`.

        torch.func and other transforms that see only operators cannot use such a node: they get the reference.
        """
        if torch.compiler.is_compiling():
            return _as_tuple(self._library_op(*arguments))[0]
        if _library.sees_operators_only():
            return _as_tuple(self._reference(*arguments))[0]
        return self._node(*arguments[: self.tensors], arguments)

    def run(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """Return all results, without autograd."""
        if self._fit(arguments, self.tensors) and arguments[0].numel():
            return self._launch(arguments)
        return self.run_reference(*arguments)

    def run_reference(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """Return the results of `run` by the reference, for launch functions that cannot take their arguments."""
        with torch.no_grad():
            results = _as_tuple(self._reference(*arguments))
        # Detached rather than views, which autograd would not let the caller change in place.
        return tuple([None if result is None else result.detach() for result in results])

    def run_or_trace(self, *arguments: Any) -> tuple:
        """Return the results of `run` in code that torch.compile may trace; there an empty tensor replaces None."""
        return _as_tuple((self._library_op if torch.compiler.is_compiling() else self.run)(*arguments))

    def _launch(self, arguments: tuple) -> tuple[Tensor | None, ...]:
        results = self._forward(*_contiguous(arguments, self._loose))
        return results if type(results) is tuple else (results,)  # type: ignore[return-value]

    def run_backward(self, gradients: Values, saved: Values, settings: Values, wanted: Sequence[bool]) -> Found:
        """Return the wanted gradients, and None for the others, without autograd."""
        tensors = (*gradients, *saved)
        if self._fit(tensors, len(tensors)) and tensors[0].numel():
            return self._launch_backward(tensors, settings, wanted)
        return self.run_reference_backward(gradients, saved, settings, wanted)

    def _launch_backward(self, tensors: Values, settings: Values, wanted: Sequence[bool]) -> Found:
        results = self._backward(*_contiguous(tensors, self._loose_backward), *settings, wanted)
        return results if type(results) is tuple else (results,)  # type: ignore[return-value]

    def run_reference_backward(
        self, gradients: Values, saved: Values, settings: Values, wanted: Sequence[bool]
    ) -> Found:
        """Return the gradients of `run_backward` without kernels."""
        if self._reference_backward is not None:
            with torch.no_grad():
                return _as_tuple(self._reference_backward(*gradients, *saved, *settings, wanted))
        return self._differentiate(gradients, saved, settings, wanted, create_graph=False)

    def save(self, ctx: Any, arguments: tuple, results: tuple) -> Any:
        """Save the tensors that the backward pass needs, after a forward pass by kernels or not; return the output."""
        ctx.save_for_backward(*self._save(arguments, results))
        ctx.settings, ctx.launched = arguments[self.tensors :], False
        return results[0]

    def forward_and_save(self, ctx: Any, *arguments: Any) -> Any:
        """Run as the forward of a separately named autograd Function whose first arguments are this op's tensors."""
        if torch.compiler.is_compiling():
            return self.save(ctx, arguments, _as_tuple(self._library_op(*arguments)))
        if self._fit(arguments, self.tensors) and arguments[0].numel():
            return self._launch_and_save(ctx, arguments)
        return self.save(ctx, arguments, self.run_reference(*arguments))

    def _launch_and_save(self, ctx: Any, *given: Any) -> Any:
        """Run as the forward of the autograd node on the Triton path; `given[-1]` holds all arguments of the op."""
        arguments = given[-1]
        results = self._launch(arguments)
        ctx.save_for_backward(*self._save(arguments, results))
        ctx.settings, ctx.launched = arguments[self.tensors :], True
        return results[0]

    def backward_from_saved(
        self, ctx: Any, *gradients: Tensor, wanted: Sequence[bool] | None = None
    ) -> tuple[Tensor | None, ...]:
        """Run as the backward of an autograd Function: return one gradient for each of `gradients`, or None."""
        if wanted is None:
            needed = ctx.needs_input_grad
            wanted = needed[: len(self.gradients)] if self._gradients_lead else self._wanted(needed)
        # Kernels that took the arguments also take the saved tensors, in plain eager mode without create_graph.
        if ctx.launched and not torch.is_grad_enabled() and _library.is_eager(gradients[0]):
            return self._launch_backward((*gradients, *ctx.saved_tensors), ctx.settings, wanted)
        if torch.compiler.is_compiling():
            compute = self.run_or_trace_backward
        elif torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
            compute = self.second_derivative
        else:
            compute = self.run_backward
        return compute(gradients, ctx.saved_tensors, ctx.settings, wanted)

    def _wanted(self, needed: tuple[bool, ...]) -> Sequence[bool]:
        """Return for each of `gradients` whether autograd needs it."""
        return [needed[i] for i in self._gradient_places]

    def run_or_trace_backward(
        self, gradients: Values, saved: Values, settings: Values, wanted: Sequence[bool]
    ) -> Found:
        """Return the gradients of `run_backward` in code that torch.compile may trace."""
        if not torch.compiler.is_compiling():
            return self.run_backward(gradients, saved, settings, wanted)
        results = _as_tuple(self._library_backward(*gradients, *saved, *settings, list(wanted)))
        return tuple(gradient if asked else None for gradient, asked in zip(results, wanted, strict=True))

    def _fit(self, tensors: Values, count: int, compiling: bool = False) -> bool:
        """Return whether kernels take the device and the dtypes of the first `count` values."""
        if not (_library.runs_triton if compiling else _library.runs_triton_now)(self.family, tensors[0]):
            return False
        for tensor in tensors[1:count]:  # noqa: SIM110  half the time of a generator
            if tensor is not None and tensor.dtype in TOO_WIDE:
                return False
        return True

    def _save_by_name(self, arguments: tuple, results: tuple) -> tuple:
        values = (*arguments, *results)
        return tuple([values[place] for place in self._saved_places])

    def _in_order(self, gradients: Sequence[Tensor | None], padding: tuple[None, ...]) -> tuple[Tensor | None, ...]:
        """Return one gradient for each tensor of the schema, None if it has none, followed by `padding`."""
        ordered: list[Tensor | None] = [None] * self.tensors
        for place, gradient in zip(self._gradient_places, gradients, strict=True):
            ordered[place] = gradient
        return (*ordered, *padding)

    def _differentiate(
        self, gradients: Values, saved: Values, settings: Values, wanted: Sequence[bool], create_graph: bool
    ) -> Found:
        """Compute the gradients by autograd through the reference."""
        reference = self._formula if create_graph else self._reference
        asked = [name in self.gradients and wanted[self.gradients.index(name)] for name in self.saves]

        def output(*tensors: Tensor | None) -> Tensor:
            by_name = dict(zip(self.saves, tensors, strict=True))
            return _as_tuple(reference(*[by_name[name] for name in self.arguments[: self.tensors]], *settings))[0]

        with torch.enable_grad(), torch._C._PreserveDispatchKeyGuard():
            # PyTorch excludes autograd inside an operator's implementation; include it again.
            torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality, False)
            found = _library.differentiable_gradients(output, saved, gradients, asked, create_graph)
        return tuple(found[self.saves.index(name)] for name in self.gradients)

    def second_derivative(self, gradients: Values, saved: Values, settings: Values, wanted: Sequence[bool]) -> Found:
        """Return gradients that can be differentiated again (create_graph=True); raise if the op has none."""
        reason = None if self._once is None else self._once(*settings)
        if reason is not None:
            raise RuntimeError(reason)
        if set(self.arguments[: self.tensors]) <= set(self.saves):
            return self._differentiate(gradients, saved, settings, wanted, create_graph=True)
        if self._reference_backward is not None:
            return _as_tuple(self._reference_backward(*gradients, *saved, *settings, wanted))
        raise RuntimeError(f"{self.name} has a first derivative only, so create_graph=True cannot be used")

    def _like_saved(self, *arguments: Any) -> tuple[Tensor | None, ...]:
        """Return gradients shaped like the saved tensors of the same names: the default shape rule."""
        *tensors, wanted = arguments
        by_name = dict(zip(self.saves, tensors[1:], strict=False))
        return tuple(
            None
            if not needed
            else torch.empty_like(by_name[name])
            if name in self._same_layout
            else by_name[name].new_empty(by_name[name].shape)
            for name, needed in zip(self.gradients, wanted, strict=True)
        )

    def _register(self, schema: str, fake: Callable, backward_fake: Callable) -> None:
        """Define `torch.ops.apex.<name>` and `<name>_backward`; they return an empty tensor in place of None."""
        settings = schema[schema.index("(") + 1 : schema.index(")")].split(", ")[self.tensors :]
        tensors = ["Tensor grad_output", *(f"Tensor? {name}" for name in self.saves)]
        returns = ", ".join(["Tensor"] * len(self.gradients))
        backward_schema = f"{self.name}_backward({', '.join([*tensors, *settings, 'bool[] wanted'])}) -> ({returns})"
        inner = 1 + len(self.saves)
        padding = (None,) * (len(self.arguments) - self.tensors)
        kept = [i for i, name in enumerate(self.results) if name in self._same_layout]
        kept_gradients = [i for i, name in enumerate(self.gradients) if name in self._same_layout]

        def implementation(*arguments):  # type: ignore[no-untyped-def]
            results: list[Any] = list(self.run(*arguments))
            for place in kept:
                results[place] = laid_out_like(arguments[0], results[place])
            return _real(results, arguments[0], kept)

        def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
            results = _as_tuple(output)
            ctx.save_for_backward(*self._save(inputs, results))
            ctx.settings = inputs[self.tensors :]
            ctx.mark_non_differentiable(*results[1:])

        def op_backward(ctx, dy, *unused):  # type: ignore[no-untyped-def]
            wanted = self._wanted(ctx.needs_input_grad)
            gradients = _as_tuple(self._library_backward(dy, *ctx.saved_tensors, *ctx.settings, list(wanted)))
            return self._in_order([g if needed else None for g, needed in zip(gradients, wanted, strict=True)], padding)

        def backward_implementation(*arguments):  # type: ignore[no-untyped-def]
            wanted = arguments[-1]
            found = self.run_backward(arguments[:1], arguments[1:inner], arguments[inner:-1], wanted)
            gradients: list[Any] = [g if needed else None for g, needed in zip(found, wanted, strict=True)]
            for place in kept_gradients:
                if wanted[place]:
                    saved = arguments[1 + self.saves.index(self.gradients[place])]
                    gradients[place] = laid_out_like(saved, gradients[place])
            return _real(gradients, arguments[0], kept_gradients)

        def refuse(ctx, *gradients):  # type: ignore[no-untyped-def]
            raise RuntimeError(f"torch.ops.apex.{self.name} has a first derivative only, so it cannot be used twice")

        _library.register_op(
            schema,
            implementation,
            lambda *arguments: _real(_as_tuple(fake(*arguments)), arguments[0], kept),
            backward=op_backward,
            setup_context=setup_context,
        )
        _library.register_op(
            backward_schema,
            backward_implementation,
            lambda *arguments: _real(_as_tuple(backward_fake(*arguments)), arguments[0], kept_gradients),
            backward=refuse,
        )
        self._library_op = getattr(torch.ops.apex, self.name).default
        self._library_backward = getattr(torch.ops.apex, f"{self.name}_backward").default


def _node_of(op: Op, forward: Callable) -> type[torch.autograd.Function]:
    """Make an op's node of eager autograd. It takes the op's tensors, for autograd, then a tuple of all arguments."""
    padding = (None,) * (op.tensors - len(op.gradients) + 1)

    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        gradients = op.backward_from_saved(ctx, dy)
        return (*gradients, *padding) if op._gradients_lead else op._in_order(gradients, (None,))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": __name__}
    # The name in errors and profiles: PyTorch takes it when the class is made.
    name = op.name.title().replace("_", "")
    return types.new_class(name, (torch.autograd.Function,), exec_body=lambda body: body.update(methods))


def _as_tuple(results: Any) -> tuple:
    return results if type(results) is tuple else tuple(results) if type(results) is list else (results,)


def _contiguous(arguments: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Return the arguments with the tensors at the indices `places` made contiguous."""
    for place in places:
        tensor = arguments[place]
        if tensor is not None and not tensor.is_contiguous():
            return [
                value.contiguous() if i in places and value is not None else value for i, value in enumerate(arguments)
            ]
    return arguments


def laid_out_like(model: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor`, copied if necessary, with the strides of `torch.empty_like(model)`."""
    like = torch.empty_like(model, dtype=tensor.dtype)
    return tensor if tensor.stride() == like.stride() else like.copy_(tensor)


def _real(results: Sequence[Tensor | None], like: Tensor, kept: Sequence[int]) -> Any:
    """Return results as an operator may return them: contiguous except at the indices `kept`, empty for None."""
    real = [
        like.new_empty(0) if result is None else result if place in kept else result.contiguous()
        for place, result in enumerate(results)
    ]
    return real[0] if len(real) == 1 else tuple(real)
