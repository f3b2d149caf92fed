"""Boosted steps: a training step that runs as it is, captured, compiled, or both, whichever is the quickest."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..graphs import CapturedStep
from ..graphs._captured import flattened, map_tensors
from ._compile import CompiledModel, CompiledStep, progress
from ._snapshot import ForwardSnapshot

# Timed calls of each variant, and eager calls before a capture.
_TIMED, _WARMUP = 3, 3
# If the slowest timed call takes so many times the quickest, somebody else uses the device, and more calls are timed.
_NOISY = 1.1
# Least bytes of a model's outputs for which compiling the loss with the model is tried: an H200 passes over them in 16
# microseconds, and PyTorch's operators take ten passes and more for a loss of logits.
_LARGE_OUTPUTS = 2**26


class Variant(NamedTuple):
    """A way to run a step. If `whole` is set, not only its models are compiled, but the step with its loss."""

    compile: bool
    capture: bool
    whole: bool = False

    def __str__(self) -> str:
        compiled = "compiled as a whole" if self.whole else "compiled"
        words = [word for word, is_so in ((compiled, self.compile), ("captured", self.capture)) if is_so]
        return " and ".join(words) or "eager"

    @property
    def compiled_stage(self) -> str:
        """Name of what is compiled, in `BoostedStep.problems`."""
        return "compile as a whole" if self.whole else "compile"

    @property
    def untimed(self) -> int:
        """Number of first calls that take longer: kernels are compiled, and graphs are captured."""
        return _WARMUP + 1 if self.capture else 2


EAGER = Variant(False, False)


class BoostedStep:
    """A training step that is measured in its first calls and then runs in the quickest of its variants.

    Every call is a step of the training; nothing runs twice. Only calls whose arguments have the shapes of the first
    call are measured. If `first_shapes_only` is set, only such calls use compiled code, because other shapes would be
    compiled again. If `compiles_whole` is set and a model has large outputs, compiling it together with the loss is
    measured, too. Returned tensors have no gradients. Those of more than one element are valid until the next call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        variants: Sequence[Variant],
        compiled: Sequence[CompiledModel],
        models: Sequence[nn.Module],
        *,
        first_shapes_only: bool = True,
        compiles_whole: bool = True,
        backend: Callable[[], Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.problems: dict[str, str] = {}  # by stage: why it failed in a call
        self.seconds: dict[Variant, float] = {}
        self._compiled, self._models, self._backend = compiled, models, backend
        self._whole: CompiledStep | None = None
        if compiled and compiles_whole:
            self._whole = compiled[0].compiled_step(function, suppress_errors=EAGER in variants)
        self._first_shapes_only = first_shapes_only
        self._runners: dict[Variant, CapturedStep] = {}
        self._first_kind: Any = None
        self._first_shapes: Any = None
        self._has_compiled: set[str] = set()
        self._baseline, self._may_fall_back = variants[0], EAGER in variants
        self._calls, self._times = 0, list[float]()
        self._other_calls = 0  # calls that were not measured, because their arguments differ from the first call's
        # Variants that are still to be measured. The last one is the likely winner, whose graphs are kept.
        self._pending = list(variants) if len(variants) > 1 else []
        self.choice: Variant | None = None if self._pending else variants[0]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors, kind = flattened((args, kwargs))
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if self._first_shapes is None:
            self._first_shapes, self._first_kind = shapes, kind
        compiles = not self._first_shapes_only or shapes == self._first_shapes
        if self.choice is not None:
            return self._run(self.choice, compiles, args, kwargs)
        if not _are_equal(kind, self._first_kind):
            self._other_calls += 1
            return self._run(self._baseline, compiles, args, kwargs)
        return self._measured(args, kwargs)

    def choose(self, variant: Variant) -> None:
        """Use a variant from now on, without measuring."""
        self._pending, self.choice = [], variant
        self._free(except_for=variant)

    def reset(self) -> None:
        """Drop all graphs; the next calls capture anew."""
        self._free(except_for=None)

    def _measured(self, args: Any, kwargs: Any) -> Any:
        """Run a call in the first pending variant and time it; the variant's last timed call ends its measurement."""
        variant = self._pending[0]
        self._calls += 1
        is_timed = self._calls > variant.untimed
        if is_timed:
            _wait()
        begin = time.perf_counter()
        outputs = self._run(variant, True, args, kwargs)
        if is_timed:
            _wait()
            self._times.append(time.perf_counter() - begin)
        reason = variant.capture and self._runners[variant].reason
        if reason and variant.whole:
            self.problems[variant.compiled_stage] = reason
            self._pending = []
        elif reason:
            self.problems["capture"] = reason
            eager = dict.fromkeys(pending._replace(capture=False) for pending in self._pending)
            self._pending = [pending for pending in eager if pending not in self.seconds]
            self._calls, self._times = 0, []
        elif variant.compile and variant.compiled_stage in self.problems:
            self._pending, self._calls, self._times = [], 0, []
        elif len(self._times) == 2 * _TIMED or (len(self._times) == _TIMED and not _is_noisy(self._times)):
            self.seconds[variant] = sorted(self._times)[0]
            self._pending, self._calls, self._times = self._pending[1:], 0, []
            is_large = any(model.output_bytes >= _LARGE_OUTPUTS for model in self._compiled)
            if not self._pending and is_large and self._whole is not None and variant.compile and not variant.whole:
                self._pending = [variant._replace(whole=True)]
            if self._pending:
                self._free(except_for=None)
        if not self._pending:
            self.choose(min(self.seconds, key=self.seconds.__getitem__, default=self._baseline))
        return outputs

    def _run(self, variant: Variant, compiles: bool, args: Any, kwargs: Any) -> Any:
        """Run the step in a variant; use compiled code only if `compiles` is set as well.

        Losses of captured steps are copied, because loops keep them in lists, and the next replay overwrites them.
        """
        outputs = self._run_variant(variant, compiles, args, kwargs)
        return map_tensors(_kept, outputs) if variant.capture else outputs

    def _run_variant(self, variant: Variant, compiles: bool, args: Any, kwargs: Any) -> Any:
        runner, stage = self._runner(variant), variant.compiled_stage
        if not (variant.compile and compiles) or stage in self.problems:
            return runner(*args, **kwargs)
        parts = [self._whole] if variant.whole and self._whole is not None else self._compiled
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.active())
            if stage in self._has_compiled:
                return runner(*args, **kwargs)
            before = ForwardSnapshot(self._models) if self._may_fall_back else None
            stack.enter_context(progress(f"compiling {', '.join(part.name for part in parts)}"))
            try:
                outputs = runner(*args, **kwargs)
            except Exception as error:
                is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
                is_of_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
                if before is None or not (is_of_compiler or is_out_of_memory):
                    raise
                problem = " ".join(str(error).split()[:40])
                failed = "the compiled step needs more memory" if is_out_of_memory else "torch.compile failed"
                self.problems[stage] = f"{failed}: {type(error).__name__}: {problem}"
            else:
                self._has_compiled.add(stage)
                return outputs
        before.restore()  # outside of the `except` block, so that the traceback and its tensors are freed
        self._free(except_for=None)
        return self._runner(EAGER)(*args, **kwargs)

    def _runner(self, variant: Variant) -> CapturedStep:
        """Return the step with this variant's graphs. Eager variants run on the same stream, and capture none."""
        if variant not in self._runners:
            warmup = _WARMUP if variant.capture else sys.maxsize
            backend = None if self._backend is None else self._backend()
            function = self._whole if variant.whole and self._whole is not None else self.function
            self._runners[variant] = CapturedStep(function, warmup=warmup, backend=backend)
        return self._runners[variant]

    def _free(self, except_for: Variant | None) -> None:
        """Drop the graphs of all variants but one, and the memory that they hold."""
        for variant in [variant for variant in self._runners if variant != except_for]:
            self._runners.pop(variant).invalidate()
        gc.collect()  # graphs are parts of reference cycles
        if torch.accelerator.is_available():
            torch.get_device_module().empty_cache()

    def report(self) -> str:
        """Return a line with the choice, the measured times and the graphs."""
        if self.choice is None:
            others = "calls were not measured: their arguments are of another kind than the first's"
            return f"measuring: {self._pending[0]} now" + (
                f"; {self._other_calls} {others}" if self._other_calls else ""
            )
        times = ", ".join(f"{variant} {1e3 * seconds:.2f} ms" for variant, seconds in self.seconds.items())
        runner = self._runners.get(self.choice)
        graphs = f"; {runner.report()}" if runner is not None and self.choice.capture else ""
        whole = self.problems.get("compile as a whole")
        problem = f"; not as a whole: {whole}" if whole else ""
        return f"{self.choice}{f' ({times})' if times else ''}{graphs}{problem}"


def _is_noisy(seconds: Sequence[float]) -> bool:
    ordered = sorted(seconds)
    return ordered[-1] > _NOISY * ordered[0]


def _kept(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with one element, and other tensors themselves."""
    return tensor.clone() if tensor.numel() == 1 else tensor


def _wait() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether the arguments of two calls are of equal kinds; False if they are arrays or other incomparables."""
    try:
        return bool(first == second)
    except (TypeError, ValueError, RuntimeError):
        return False
