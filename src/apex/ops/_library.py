"""The one dispatch: which implementation runs, and how an op becomes known to PyTorch.

A family of ops (norms, softmax, ...) declares itself once with `register_family`. Its code then asks
`runs_triton(family, tensor)` and does what it is told. The answer depends on the device, the dtype and `APEX_IMPL`
alone, so it is computed once per combination and explained by `explain`; beyond it a family may send inputs too small
to be worth a launch to PyTorch, and says so in `OpFamily.small_inputs`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import _env
from . import _device

logger = logging.getLogger("apex.ops")

# All ops live in one namespace: torch.ops.apex.<name>.
library = torch.library.Library("apex", "FRAGMENT")

# Tensors that have an address of their own. What a subclass (DTensor, FakeTensor, ...) does, PyTorch's operators know.
PLAIN = (torch.Tensor, torch.nn.Parameter)  # PyTorch 2.6 cannot look for a type in a set while it compiles
TRITON_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
# What kernels, whose arithmetic is float32, must not be given beside an input that they take.
TOO_WIDE = frozenset({torch.float64, torch.complex64, torch.complex128})


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """What sums and statistics are computed in: float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


@dataclass(frozen=True)
class Choice:
    """An implementation and the reason it was taken."""

    implementation: str  # "triton" or "torch"
    reason: str


@dataclass(frozen=True)
class OpFamily:
    """A group of ops that share kernels and dispatch.

    `self_check(device)` runs the family on `device` against the float64 reference and returns the largest error as a
    multiple of its tolerance, so that anything above 1 is wrong; without one, the family's ops check themselves.
    `small_inputs` says which inputs PyTorch's operators take even where there are kernels, because they are quicker.
    """

    name: str
    summary: str
    self_check: Callable[[torch.device], float] = None  # type: ignore[assignment]
    triton_dtypes: frozenset[torch.dtype] = TRITON_DTYPES
    small_inputs: str = ""
    ops: list[Any] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        if self.self_check is None:
            object.__setattr__(self, "self_check", lambda device: max(op.self_check(device) for op in self.ops))


FAMILIES: dict[str, OpFamily] = {}

_META = torch.device("meta")
_is_tracing, _are_functorch_transforms_active = torch._C._is_tracing, torch._C._are_functorch_transforms_active

# The implementation asked for by `APEX_IMPL` or by `implementation`: auto, triton or torch.
requested: _env.Implementation = _env.requested_implementation()
_choices: dict[tuple[str, torch.device, torch.dtype], Choice] = {}
_runs_triton: dict[tuple[str, torch.device, torch.dtype], bool] = {}
_reported: set[tuple[str, str]] = set()
_triton_found: list[str | None] = []


def register_family(family: OpFamily) -> OpFamily:
    """Makes a family known to the dispatch and to `apex doctor`."""
    FAMILIES[family.name] = family
    return family


@contextlib.contextmanager
def implementation(name: _env.Implementation) -> Iterator[None]:
    """Overrides `APEX_IMPL` for the code inside, in this process."""
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
    _choices.clear()
    _runs_triton.clear()


def triton_problem() -> str | None:
    """Why Triton cannot be used in this process, or None when it can."""
    if not _triton_found:  # a list rather than functools.cache, which torch.compile warns of
        _triton_found.append(_look_for_triton())
    return _triton_found[0]


def _look_for_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken installation must not take the library down with it
        return f"importing triton failed: {type(error).__name__}: {error}"
    return None


def _is_planned(device: torch.device) -> bool:
    """Whether tensors there stand for those of a GPU that launches are collected for."""
    return device.type == "meta" and _device.pretends()


def _triton_obstacle(family: OpFamily, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels of `family` cannot run here, or None when they can."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    if device.type != "cuda" and not _is_planned(device) and not _env.triton_interpreter_requested():
        return f"Triton kernels run on NVIDIA and AMD GPUs, not on {device.type}"
    if dtype not in family.triton_dtypes:
        why = ", because they accumulate in float32" if dtype == torch.float64 else ""
        return f"the kernels do not take {str(dtype).removeprefix('torch.')}{why}"
    return triton_problem()


def explain(family: OpFamily, device: torch.device, dtype: torch.dtype) -> Choice:
    """Which implementation `family` takes for tensors of `dtype` on `device`, and why."""
    key = (family.name, device, dtype)
    choice = _choices.get(key)
    if choice is None:
        choice = _choices[key] = _choose(family, device, dtype)
    return choice


def _choose(family: OpFamily, device: torch.device, dtype: torch.dtype) -> Choice:
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
    """Logs a fallback once; loudly where a GPU goes unused, quietly where plain PyTorch is the normal way."""
    if (family, reason) not in _reported:
        _reported.add((family, reason))
        level = logging.WARNING if device.type == "cuda" else logging.INFO
        logger.log(level, "%s uses PyTorch operators instead of a Triton kernel: %s", family, reason)


def runs_triton(family: OpFamily, tensor: torch.Tensor) -> bool:
    """Whether `family` takes its Triton kernels for `tensor`: the hot-path form of `explain`.

    Never for a tensor subclass (DTensor, FakeTensor, ...): it has no address of its own, while PyTorch's operators know
    what to do with it; but for a FakeTensor while launches are planned (`is_stand_in`). Nor where
    `sees_operators_only`.
    """
    if not torch.compiler.is_compiling():
        return runs_triton_now(family, tensor)
    if type(tensor) in PLAIN:
        return _answer_while_compiling(family.name, tensor.device, tensor.dtype, requested)
    return _takes_subclass(tensor) and _answer_while_compiling(family.name, _META, tensor.dtype, requested)


def runs_triton_now(family: OpFamily, tensor: torch.Tensor) -> bool:
    """`runs_triton` where no graph is being compiled."""
    device, dtype = tensor.device, tensor.dtype
    if type(tensor) not in PLAIN:
        if not _takes_subclass(tensor):
            return False
        device = _META
    if _is_tracing() or _are_functorch_transforms_active() or forward_ad._current_level >= 0:  # as the function below
        return False
    key = (family.name, device, dtype)
    answer = _runs_triton.get(key)
    if answer is None:
        answer = _runs_triton[key] = explain(family, device, dtype).implementation == "triton"
    return answer


def _takes_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a subclass stands for one that kernels take; raises where it does not and they must."""
    if is_stand_in(tensor):
        return True
    if requested == "triton":
        raise RuntimeError(f"APEX_IMPL=triton was asked for, but kernels do not take a {type(tensor).__name__}")
    return False


def sees_operators_only() -> bool:
    """Whether torch.jit.trace, torch.func or a forward-mode derivative is at work, which see operators alone."""
    return _is_tracing() or _are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether a FakeTensor, of whichever device, stands for a tensor of the GPU that launches are planned for."""
    return _device.pretends() and type(tensor).__name__ == "FakeTensor"


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU, or stands for one that is."""
    return tensor.is_cuda or is_stand_in(tensor)


def is_eager(tensor: torch.Tensor) -> bool:
    """Whether autograd alone looks on: no graph is compiled or traced, nothing but it differentiates, no subclass."""
    if torch.compiler.is_compiling() or sees_operators_only():
        return False
    return type(tensor) in PLAIN or is_stand_in(tensor)


def _answer_while_compiling(family: str, device: torch.device, dtype: torch.dtype, requested: str) -> bool:
    """`runs_triton` for a graph, which is compiled anew where `requested` changes."""
    return explain(FAMILIES[family], device, dtype).implementation == "triton"


# What torch.compiler.assume_constant_result sets; that would import torch._dynamo. Were the caches traced, a graph that
# fills them would be compiled twice.
_answer_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast gives to matrix products on the tensor's device; None where it is off."""
    if not torch._C._is_any_autocast_enabled():
        return None
    device_type = tensor.device.type
    if device_type == "meta":  # of which PyTorch cannot say whether autocast is on
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def cast_for_autocast(*arguments: Any) -> tuple[Any, ...]:
    """The arguments; where autocast is on, floating-point tensors in its dtype for the first one's device.

    As PyTorch does it: float64 stays as it is.
    """
    if not torch._C._is_any_autocast_enabled():  # the quick question first: most calls end here
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
    """Autocast off on the tensor's device, where it is on: entering a context costs as much as a small kernel."""
    if autocast_dtype(tensor) is None:
        return _NOTHING
    return torch.autocast(tensor.device.type, enabled=False)


def register_op(
    schema: str, implementation: Callable, fake: Callable, replayed_in: OpFamily | None = None, **derivative: Callable
) -> None:
    """Registers `torch.ops.apex.<name>` from a schema, its implementation, its shape rule and its derivative.

    The derivative is `backward` and, where it needs tensors, `setup_context`, as for `torch.library.register_autograd`.
    `define` + `impl` because `custom_op` costs 2.5 times as much per call. Code that Inductor wrote calls the
    implementation without PyTorch's dispatcher, by `_quick_call`. An operator that is `replayed_in` a family is called
    once for arguments that look alike: its settings, and what tensors look like, must decide all that it launches.
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
    if "Tensor[]" not in schema:  # of which the types would have to be looked at one by one
        overload._op = _quick_call(overload._op, implementation, replayed_in)


def _make_known_to_inductor(overload: Any) -> None:
    """Has Inductor call an operator before it first meets it.

    When it meets one that it does not know, PyTorch up to 2.12 writes out all that leads to it, for a log: behind 24
    norms with residuals, of which each has two results and two arguments, in hours.
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


def _quick_call(dispatch: Callable, implementation: Callable, family: OpFamily | None = None) -> Callable:
    """`dispatch`, what an operator's call does, or its implementation where the dispatcher would do no more than that.

    It takes the dispatcher 6 us to come to an implementation in Python, and 17 us where there is a derivative. With a
    family what the implementation does is replayed.
    """
    replay = LazyModule(f"{__package__}._replay")

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
        if family is not None and runs_triton_now(family, arguments[0]):
            return replay.run(implementation, arguments, family.name)
        return implementation(*arguments)

    return call


class LazyModule:
    """A module of kernels that is imported when something of it is first asked for: importing apex needs no Triton."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        module = importlib.import_module(self._name)
        self.__dict__.update(vars(module))  # from now on found without this method
        return getattr(module, attribute)


def quick_apply(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` without what only `torch.func` and `torch.compile` need: 18 us instead of 26 for seven tensors.

    For a Function without `setup_context` that is called with positional arguments.
    """
    directly = eager_apply(function)

    def apply(*args):  # type: ignore[no-untyped-def]
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return function.apply(*args)
        return directly(*args)

    return apply


def eager_apply(function: type[torch.autograd.Function]) -> Callable:
    """`quick_apply` for callers that know that `is_eager` holds.

    Nodes call `backward` without PyTorch's method in between, which looks each time whether there is a `vjp` instead:
    1 us less.
    """
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def once_differentiable(backward: Callable) -> Callable:
    """PyTorch's decorator, which refuses a second derivative; here also where the gradient given needs none itself.

    PyTorch's then returns constants, and what depends on input and weights in them, a gradient penalty, is lost.
    """
    once = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx, *gradients):  # type: ignore[no-untyped-def]
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)  # no derivative is wanted, and PyTorch's would do nothing but this
        if not torch.compiler.is_compiling():
            gradients = tuple(
                given.detach().requires_grad_()
                if isinstance(given, torch.Tensor) and not given.requires_grad
                else given
                for given in gradients
            )
        return once(ctx, *gradients)

    return wrapper
