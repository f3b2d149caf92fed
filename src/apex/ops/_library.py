"""The one dispatch: which implementation runs, and how an op becomes known to PyTorch.

A family of ops (norms, softmax, ...) declares itself once with `register_family`. Its code then asks
`runs_triton(family, tensor)`. The answer depends only on the device, the dtype and `APEX_IMPL`, so it is computed once
per combination; `explain` gives the reason. A family may also send inputs that are too small to be worth a launch to
PyTorch's operators, and says so in `OpFamily.small_inputs`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import _env
from . import _device

logger = logging.getLogger("apex.ops")

# All ops live in one namespace: torch.ops.apex.<name>.
library = torch.library.Library("apex", "FRAGMENT")

# Types of tensors with an address of their own. Subclasses (DTensor, FakeTensor, ...) are left to PyTorch's operators.
PLAIN = (torch.Tensor, torch.nn.Parameter)  # PyTorch 2.6 cannot look for a type in a set while it compiles
TRITON_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
# Dtypes of further arguments that kernels must not be given, because their arithmetic is float32.
TOO_WIDE = frozenset({torch.float64, torch.complex64, torch.complex128})


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """Return the dtype of sums and statistics: float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


@dataclass(frozen=True)
class Choice:
    """An implementation and the reason it was taken."""

    implementation: str  # "triton" or "torch"
    reason: str


@dataclass(frozen=True)
class OpFamily:
    """A group of ops that share kernels and dispatch.

    `self_check(device)` is for families without `examples.py`: it compares the family on `device` with float64 and
    returns the largest error as a multiple of its tolerance; a result above 1 is wrong.
    `small_inputs` describes the inputs that PyTorch's operators take even where kernels run, because they are quicker.
    """

    name: str
    summary: str
    self_check: Callable[[torch.device], float] | None = None
    triton_dtypes: frozenset[torch.dtype] = TRITON_DTYPES
    small_inputs: str = ""


FAMILIES: dict[str, OpFamily] = {}

_META = torch.device("meta")
_is_tracing, _are_functorch_transforms_active = torch._C._is_tracing, torch._C._are_functorch_transforms_active

# Triton 3.2 and 3.3 compile no tuples with None, no functions as constants and no three operands of `or`.
OLDEST_TRITON = (3, 4)
# The implementation requested by `APEX_IMPL` or by `implementation`: auto, triton or torch.
requested: _env.Implementation = _env.requested_implementation()
_runs_triton: dict[tuple[str, torch.device, torch.dtype], bool] = {}
_reported: set[tuple[str, str]] = set()
_triton_found: list[str | None] = []


def register_family(family: OpFamily) -> OpFamily:
    """Register a family with the dispatch and with `apex doctor`."""
    FAMILIES[family.name] = family
    return family


@contextlib.contextmanager
def implementation(name: _env.Implementation) -> Iterator[None]:
    """Override `APEX_IMPL` inside the block, for the whole process."""
    if name not in ("auto", "triton", "torch"):
        raise ValueError(f"implementation {name!r} is not known; use auto, triton or torch")
    global requested
    previous = requested
    _set_requested(name)
    try:
        yield
    finally:
        _set_requested(previous)


def _set_requested(name: _env.Implementation) -> None:
    global requested
    requested = name
    _runs_triton.clear()


def triton_problem() -> str | None:
    """Return why Triton cannot be used in this process, or None if it can."""
    if not _triton_found:  # a list rather than functools.cache, about which torch.compile warns
        _triton_found.append(_look_for_triton())
    return _triton_found[0]


def _look_for_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    try:
        import triton

        version = tuple(map(int, triton.__version__.split(".")[:2]))
    except Exception as error:  # a broken installation must not take the library down with it
        return f"importing triton failed: {type(error).__name__}: {error}"
    if version < OLDEST_TRITON and not _env.triton_interpreter_requested():
        return f"Triton {triton.__version__} cannot compile the kernels; PyTorch 2.8 comes with 3.4, which can"
    return None


def _is_planned(device: torch.device) -> bool:
    """Return whether tensors on `device` represent tensors of a GPU for which launches are planned."""
    return device.type == "meta" and _device.pretends()


def _triton_obstacle(family: OpFamily, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels of `family` cannot run for this device and dtype, or None if they can."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    if device.type != "cuda" and not _is_planned(device) and not _env.triton_interpreter_requested():
        return f"Triton kernels run on NVIDIA and AMD GPUs, not on {device.type}"
    if dtype not in family.triton_dtypes:
        why = ", because they accumulate in float32" if dtype == torch.float64 else ""
        return f"the kernels do not take {str(dtype).removeprefix('torch.')}{why}"
    return triton_problem()


def explain(family: OpFamily, device: torch.device, dtype: torch.dtype) -> Choice:
    """Return which implementation `family` uses for tensors of `dtype` on `device`, with the reason."""
    if requested == "torch":
        return Choice("torch", "APEX_IMPL=torch")
    obstacle = _triton_obstacle(family, device, dtype)
    if requested == "triton":
        if obstacle is not None:
            raise RuntimeError(f"APEX_IMPL=triton was asked for, but {family.name} cannot run it: {obstacle}")
        return Choice("triton", "APEX_IMPL=triton")
    if obstacle is not None:
        _report_fallback(family.name, device, obstacle)
        return Choice("torch", obstacle)
    if _is_planned(device):
        return Choice("triton", "launches are planned for a GPU that is not here")
    if device.type != "cuda":
        return Choice("torch", "the Triton interpreter is for tests; APEX_IMPL=triton selects it")
    exception = f"; {family.small_inputs}" if family.small_inputs else ""
    return Choice("triton", f"Triton on {torch.cuda.get_device_name(device)}{exception}")


def _report_fallback(family: str, device: torch.device, reason: str) -> None:
    """Log a fallback once: as a warning if a GPU goes unused, as information if PyTorch is the normal choice."""
    if (family, reason) not in _reported:
        _reported.add((family, reason))
        level = logging.WARNING if device.type == "cuda" else logging.INFO
        logger.log(level, "%s uses PyTorch operators instead of a Triton kernel: %s", family, reason)


def runs_triton(family: OpFamily, tensor: torch.Tensor) -> bool:
    """Return whether `family` uses its Triton kernels for `tensor`: the hot-path form of `explain`.

    False for a tensor subclass (DTensor, FakeTensor, ...), which has no address of its own; PyTorch's operators know
    what to do with it. The exception is a FakeTensor while launches are planned (`is_stand_in`). False too if
    `sees_operators_only`.
    """
    if not torch.compiler.is_compiling():
        return runs_triton_now(family, tensor)
    if type(tensor) in PLAIN:
        return _answer_while_compiling(family.name, tensor.device, tensor.dtype, requested)
    return _takes_subclass(tensor) and _answer_while_compiling(family.name, _META, tensor.dtype, requested)


def runs_triton_now(family: OpFamily, tensor: torch.Tensor) -> bool:
    """Return `runs_triton(family, tensor)` for callers that know that no graph is being compiled."""
    device, dtype = tensor.device, tensor.dtype
    if type(tensor) not in PLAIN:
        if not _takes_subclass(tensor):
            return False
        device = _META
    # Same condition as in `sees_operators_only`, inlined.
    if _is_tracing() or _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    key = (family.name, device, dtype)
    answer = _runs_triton.get(key)
    if answer is None:
        answer = _runs_triton[key] = explain(family, device, dtype).implementation == "triton"
    return answer


def _takes_subclass(tensor: torch.Tensor) -> bool:
    """Return whether kernels may be planned for a tensor of a subclass; raise if they may not but are requested."""
    if is_stand_in(tensor):
        return True
    if requested == "triton":
        raise RuntimeError(f"APEX_IMPL=triton was asked for, but kernels do not take a {type(tensor).__name__}")
    return False


def sees_operators_only() -> bool:
    """Return whether torch.jit.trace, torch.func or forward-mode AD is active: all of these see only operators."""
    return _is_tracing() or _are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Return whether a FakeTensor, on any device, represents a tensor of the GPU that launches are planned for."""
    return _device.pretends() and type(tensor).__name__ == "FakeTensor"


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU or represents such a tensor."""
    return tensor.is_cuda or is_stand_in(tensor)


def is_eager(tensor: torch.Tensor) -> bool:
    """Return True in plain eager mode: no torch.compile, no tracing, no torch.func, no tensor subclass."""
    if torch.compiler.is_compiling() or sees_operators_only():
        return False
    return type(tensor) in PLAIN or is_stand_in(tensor)


def _answer_while_compiling(family: str, device: torch.device, dtype: torch.dtype, requested: str) -> bool:
    """Return `runs_triton` for a graph. Takes `requested` so that a graph is compiled anew if it changes."""
    return explain(FAMILIES[family], device, dtype).implementation == "triton"


# The mark that torch.compiler.assume_constant_result sets, without its import of torch._dynamo. If the caches were
# traced, a graph that fills them would be compiled twice.
_answer_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that autocast uses for matrix products on the tensor's device, or None if autocast is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    device_type = tensor.device.type
    if device_type == "meta":  # PyTorch cannot say whether autocast is on for this device
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def cast_for_autocast(*arguments: Any) -> tuple[Any, ...]:
    """Return the arguments, with floating-point tensors cast to autocast's dtype if autocast is on.

    The device of the first tensor decides whether it is on. As in PyTorch, float64 tensors are not cast.
    """
    if not torch._C._is_any_autocast_enabled():  # the quick test first: most calls end here
        return arguments
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    dtype = autocast_dtype(tensors[0]) if tensors else None
    if dtype is None:
        return arguments
    return tuple(
        [
            each.to(dtype)
            if isinstance(each, torch.Tensor) and each.is_floating_point() and each.dtype != torch.float64
            else each
            for each in arguments
        ]
    )


_NOTHING = contextlib.nullcontext()


def autocast_off(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Return a context that turns autocast off on the tensor's device.

    Returns a null context if autocast is off already: entering a real one costs as much as a small kernel.
    """
    if autocast_dtype(tensor) is None:
        return _NOTHING
    return torch.autocast(tensor.device.type, enabled=False)


def register_op(schema: str, implementation: Callable, fake: Callable, **derivative: Callable) -> None:
    """Register `torch.ops.apex.<name>` from a schema, its implementation, its shape rule and its derivative.

    The derivative is `backward` and, if it needs tensors, `setup_context`, as for `torch.library.register_autograd`.
    Uses `define` + `impl` because `custom_op` costs 2.5 times as much per call. Code generated by Inductor calls the
    implementation through `_quick_call`, without PyTorch's dispatcher.
    """
    name = schema.split("(", 1)[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CompositeExplicitAutograd")
    overload = getattr(torch.ops.apex, name).default

    def shape_rule(*arguments, **keywords):  # type: ignore[no-untyped-def]
        _make_known_to_inductor(overload)
        return fake(*arguments, **keywords)

    torch.library.register_fake(f"apex::{name}", shape_rule, lib=library)
    if derivative:
        torch.library.register_autograd(f"apex::{name}", derivative.pop("backward"), lib=library, **derivative)
    if "Tensor[]" not in schema.split(" -> ")[0]:  # `_quick_call` would have to test the type of each tensor in a list
        overload._op = _quick_call(overload._op, implementation)


def _make_known_to_inductor(overload: Any) -> None:
    """Register an operator with Inductor before Inductor first meets it.

    When Inductor meets an unknown operator, PyTorch up to 2.12 formats the whole expression that leads to it for a log
    message. Behind 24 norms with residuals, each with two results and two arguments, this takes hours.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or overload in getattr(lowering, "lowerings", (overload,)):
        return
    constraint = getattr(lowering, "tag_to_layout_constraint", None)
    find_tag = getattr(torch._library.utils, "get_layout_constraint_tag", None)
    if constraint is not None and find_tag is not None:
        lowering.make_fallback(overload, layout_constraint=constraint(find_tag(overload, with_default=True)))


_QUICK_TYPES = frozenset({*PLAIN, torch.dtype, type(None), bool, int, float, str, list})
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_profiles = torch.autograd._profiler_enabled


def _quick_call(dispatch: Callable, implementation: Callable) -> Callable:
    """Return a function that calls `implementation` directly when the dispatcher would do nothing else.

    Otherwise it calls `dispatch`, the operator's own call. The dispatcher takes 6 us to reach an implementation in
    Python, and 17 us if the operator has a derivative: a compiled step of ResNet-50 takes 24 ms instead of 28.
    """

    def call(*arguments, **keywords):  # type: ignore[no-untyped-def]
        if (
            keywords
            or torch.is_grad_enabled()
            or not _QUICK_TYPES.issuperset(map(type, arguments))
            or arguments[0].is_meta
            or _dispatch_modes()
            or _function_modes()
            or sees_operators_only()
            or _profiles()
        ):
            return dispatch(*arguments, **keywords)
        return implementation(*arguments)

    return call


class LazyModule:
    """A module of kernels that is imported on the first access to an attribute: importing apex needs no Triton."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        module = importlib.import_module(self._name)
        self.__dict__.update(vars(module))  # later accesses do not reach this method
        return getattr(module, attribute)


def differentiable_gradients(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor | None],
    gradient: Any,
    wanted: Sequence[bool],
    create_graph: bool = True,
) -> tuple[torch.Tensor | None, ...]:
    """Return the wanted gradients of `function(*inputs)`, which can be differentiated again with `create_graph`."""
    # Aliases, because an input may be the same tensor as another or, as in tied embeddings, be computed from it; that
    # dependence is not this function's to differentiate.
    aliases: list[Any] = [
        None if tensor is None else tensor.view_as(tensor) if create_graph else tensor.detach().requires_grad_(asked)
        for tensor, asked in zip(inputs, wanted, strict=True)
    ]
    chosen = [alias for alias, asked in zip(aliases, wanted, strict=True) if asked]
    output = function(*aliases)
    found = iter(torch.autograd.grad(output, chosen, gradient, create_graph=create_graph, materialize_grads=True))
    return tuple(next(found) if asked else None for asked in wanted)


def once_differentiable(backward: Callable) -> Callable:
    """Refuse second derivatives, as PyTorch's decorator does, even if the incoming gradient needs no gradient itself.

    In that case PyTorch's decorator returns constants. Terms of a gradient penalty that depend on input and weights
    through them would be lost silently.
    """
    once = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx, *gradients):  # type: ignore[no-untyped-def]
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)  # no derivative is wanted: PyTorch's decorator would do the same
        if not torch.compiler.is_compiling():
            gradients = tuple(
                gradient.detach().requires_grad_()
                if isinstance(gradient, torch.Tensor) and not gradient.requires_grad
                else gradient
                for gradient in gradients
            )
        return once(ctx, *gradients)

    return wrapper
