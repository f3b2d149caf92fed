"""The stages of a Booster that make a step quicker: fuse, compile, capture."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._triton import has_triton

from .. import _fuse
from .._fuse.rule import FusedModule, restore
from ..ops._graph import CudaGraphs
from ..optimizers._base import FusedOptimizer
from ._compile import CompiledModel
from ._masters import has_state_masters
from ._report import StageReport, StageRow, fused_row
from ._snapshot import TrainingSnapshot
from ._step import EAGER, BoostedStep, Variant, _wait
from .mixed_precision import BF16MixedPrecision, FP16ApexMixedPrecision
from .plugin.torch_ddp_plugin import TorchDDPPlugin
from .wrappers import is_replicated, unwrapped

# Modes of torch.compile that make CUDA graphs themselves.
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")
_STEPS, _LARGEST_DIFFERENCE = 10, 0.05


class Stages:
    """A Booster's `step`: settings of fuse, compile and capture, their outcome, and the decorator of training steps.

    `graphs` makes the backend of captures, and "auto" compiles with `compile_options`; tests replace both.
    """

    graphs: Callable[[], Any] = CudaGraphs
    # Without dynamic shapes: only calls with the shapes of the first call run compiled.
    compile_options: ClassVar[dict[str, Any]] = {"dynamic": False}

    def __init__(self, fuse: Any, compile: Any, capture: Any, plugin: Any, precision: Any) -> None:
        for name, value in (("fuse", fuse), ("compile", compile), ("capture", capture)):
            is_options = name == "compile" and isinstance(value, dict)
            if not isinstance(value, bool) and value != "auto" and not is_options:
                more = ", or a dict of options of torch.compile" if name == "compile" else ""
                raise ValueError(f"{name}={value!r} is not known; use True, False or 'auto'{more}")
        self.fuse, self.compile, self.capture = fuse, compile, capture
        self._plugin, self._precision = plugin, precision
        self._options: dict[str, Any] = compile if isinstance(compile, dict) else {}
        self._rows: list[StageRow] = []
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._wrappers: list[Any] = []  # weak references to the boosted optimizers
        self._compiled: list[CompiledModel] = []
        self._compiles_whole = plugin is None  # a plugin's hooks and exchanges would be compiled with the step
        self._steps: list[BoostedStep] = []
        obstacle = self._capture_obstacle()
        if capture is True and obstacle:
            raise ValueError(f"capture=True is not possible: {obstacle}")
        # Why a stage is off, by its name.
        self._reasons = {
            name: "not asked for" for name in ("fuse", "compile", "capture") if getattr(self, name) is False
        }
        if capture == "auto" and obstacle:
            self._reasons["capture"] = obstacle

    def _capture_obstacle(self) -> str:
        """Return the reason why the Booster's settings do not allow captures, "" if they do."""
        mode = self._options.get("mode")
        if mode in _WITH_GRAPHS or self._options.get("options", {}).get("triton.cudagraphs"):
            return f"torch.compile(mode={mode!r}) makes graphs of its own; use another mode, or capture=False"
        plugin, precision = self._plugin, self._precision
        if isinstance(plugin, TorchDDPPlugin) and plugin.ddp == "torch":
            return (
                "torch's DistributedDataParallel starts its exchanges from the host, in hooks that a graph does not "
                "repeat; use TorchDDPPlugin(ddp='apex')"
            )
        if plugin is not None and not isinstance(plugin, TorchDDPPlugin):
            return f"steps with {type(plugin).__name__} are not captured; only TorchDDPPlugin(ddp='apex') is"
        if not isinstance(precision, BF16MixedPrecision | FP16ApexMixedPrecision | None):
            return (
                f"{type(precision).__name__} has a loss scale, or state, that graphs do not follow; use 'bf16', "
                "'fp8' or 'fp16_apex'"
            )
        return ""

    def check_model(self, model: nn.Module) -> None:
        """Raise if `capture=True` and the model cannot be captured."""
        replicated = any(isinstance(module, DistributedDataParallel) for module in model.modules())
        if replicated and self.capture is True:
            raise ValueError(
                "capture=True is not possible: the model is in torch's DistributedDataParallel, which starts its "
                "exchanges from the host; use apex.parallel.DistributedDataParallel"
            )
        if replicated and self.capture:
            self._reasons["capture"] = "the model is in torch's DistributedDataParallel"

    @contextlib.contextmanager
    def fused(self, model: nn.Module, optimizer: Any) -> Iterator[None]:
        """Fuse a model and its optimizer, before the block casts anything; undo it if the block raises an error."""
        rows = len(self._rows)
        masters = getattr(optimizer, "master_weights", None)
        was_fused = {module for module in model.modules() if isinstance(module, FusedModule)}
        optimizer_class = type(optimizer)
        self.before(model, optimizer)
        try:
            yield
        except BaseException:
            del self._rows[rows:]
            for module in list(model.modules()):
                if isinstance(module, FusedModule) and module not in was_fused:
                    restore(module)
            if type(optimizer) is not optimizer_class:
                _fuse.unfuse(optimizer)
            elif masters is not None:
                optimizer.master_weights = masters
            raise

    def before(self, model: nn.Module, optimizer: Any) -> None:
        """Fuse a model and its optimizer. Called when they are on their device, before anything is cast."""
        device = next((str(param.device) for param in model.parameters()), "no parameters")
        self._rows.append(StageRow("device", True, device))
        if self.fuse == "auto" and self.graphs().device_of(model.parameters()) is None:
            self._reasons["fuse"] = "not on a GPU: fused modules are PyTorch's operators here; fuse=True does it anyway"
        if "fuse" in self._reasons:
            self._rows.append(StageRow("fuse", False, self._reasons["fuse"]))
            return
        self._rows.append(fused_row(_fuse.fuse(model, verbose=False)))
        if optimizer is not None:
            self._rows.append(self._fuse_optimizer(optimizer, model))

    def _fuse_optimizer(self, optimizer: Any, model: nn.Module) -> StageRow:
        kind = type(optimizer).__name__
        sparse = [module for module in model.modules() if getattr(module, "sparse", False) is True]
        if sparse and not isinstance(optimizer, FusedOptimizer):
            text = f"{type(sparse[0]).__name__} has sparse gradients, which fused optimizers do not take"
            return StageRow("fuse optimizer", False, text)
        if self._plugin is not None and not isinstance(self._plugin, TorchDDPPlugin):
            return StageRow("fuse optimizer", False, f"{type(self._plugin).__name__} makes its own from {kind}")
        [row] = _fuse.fuse(optimizer, verbose=False)
        is_half = isinstance(self._precision, BF16MixedPrecision) and self._precision.opt_level == "O5"
        if is_half and hasattr(optimizer, "master_weights") and getattr(optimizer, "master_bits", None) is None:
            optimizer.master_weights = not optimizer.stochastic_rounding
        masters = " with float32 masters in its state" if has_state_masters(optimizer) else ""
        if not row.reason:
            return StageRow("fuse optimizer", True, f"{kind} is {type(optimizer).__name__}{masters}")
        if hasattr(optimizer, "master_weights"):
            return StageRow("fuse optimizer", True, f"{kind} is fused already{masters}")
        return StageRow("fuse optimizer", False, row.reason)

    def after(self, model: nn.Module, optimizer: Any) -> None:
        """Note a boosted model and its optimizer, and decide whether steps compile and capture."""
        inner = unwrapped(model)
        self._models.append(inner)
        self._compiles_whole &= not is_replicated(model)
        if optimizer is not None:
            self._optimizers.append(optimizer.unwrap())
            self._wrappers.append(weakref.ref(optimizer))
        precision, plugin = self._precision, self._plugin
        level = getattr(precision, "opt_level", None) or getattr(precision, "options", {}).get("opt_level", "")
        kind = type(precision).__name__.removesuffix("MixedPrecision")
        text = "float32" if precision is None else f"{kind} {level}".rstrip()
        converted = [row for row in getattr(precision, "converted", ()) if not row.reason]
        text += f", {len(converted)} layers in float8" if converted else ""
        text += ", half-precision copies of weights" if getattr(precision, "weight_copies", False) else ""
        self._rows.append(StageRow("precision", precision is not None, text))
        self._rows.append(StageRow("plugin", plugin is not None, type(plugin).__name__ if plugin else "one device"))
        on_gpu = self.graphs().device_of(inner.parameters()) is not None
        if self.capture and not on_gpu:
            self._reasons.setdefault("capture", "the model is not on one GPU that has graphs; steps run eagerly")
        obstacle = self._compile_obstacle(on_gpu) if self.compile == "auto" else ""
        if obstacle:
            self._reasons.setdefault("compile", obstacle)
        elif self.compile:
            options = self.compile_options if self.compile == "auto" else self._options
            self._compiled.append(CompiledModel(inner, options, getattr(precision, "dtype", None)))

    def _compile_obstacle(self, on_gpu: bool) -> str:
        """Return the reason why "auto" does not compile a model, "" if it does."""
        if not on_gpu:
            return "not on a GPU, where compiling takes longer than it saves; compile=True does it anyway"
        if not has_triton():
            return "torch.compile needs Triton, which is not installed"
        if self._plugin is not None and not isinstance(self._plugin, TorchDDPPlugin):
            return f"not tried with {type(self._plugin).__name__}; compile=True does it anyway"
        return ""

    def _choices(self, stage: str) -> list[bool]:
        """Return the settings of a stage that a step may run with."""
        setting = getattr(self, stage)
        if stage in self._reasons:
            return [False]
        return [False, True] if setting == "auto" else [bool(setting)]

    def variants(self) -> list[Variant]:
        """Return the variants of a step, the simplest first and the likely winner last."""
        settings = itertools.product(self._choices("compile"), self._choices("capture"))
        possible = [Variant(*pair) for pair in settings]
        # Compiled steps that are not captured are measured only if no step can be captured.
        likely = [variant for variant in possible if not (variant.compile and not variant.capture)]
        return likely if EAGER in likely and len(likely) > 1 else possible

    def __call__(self, function: Callable[..., Any]) -> Any:
        """Return a boosted step, or the function itself if nothing is to be compiled or captured."""
        if not callable(function):
            raise TypeError(f"step decorates a function, not {function!r}")
        if not self._models:
            raise RuntimeError("step comes after boost: nothing was boosted that the function could train")
        variants = self.variants()
        if variants == [EAGER]:
            return function
        self._steps.append(self._boosted(function, variants))
        return self._steps[-1]

    def _boosted(self, function: Callable[..., Any], variants: list[Variant]) -> BoostedStep:
        """Return a step with this Booster's settings that runs in one of the variants."""
        return BoostedStep(
            function,
            variants,
            self._compiled,
            self._models,
            first_shapes_only=self.compile == "auto",
            compiles_whole=self._compiles_whole,
            backend=self.graphs,
        )

    def reset(self) -> None:
        """Drop the graphs of all steps; later calls capture anew. Does nothing where steps are not captured."""
        for step in self._steps:
            step.reset()

    def report(self) -> StageReport:
        """Return the rows of `boost`, and of compile and capture in each step."""
        report = StageReport(self._rows)
        for stage in ("compile", "capture"):
            if stage in self._reasons or not self._steps:
                report.append(StageRow(stage, False, self._reasons.get(stage, "no step was decorated")))
                continue
            for step in self._steps:
                problem = step.problems.get(stage)
                done = not problem and step.choice is not None and getattr(step.choice, stage)
                name = getattr(step.function, "__name__", "step")
                report.append(StageRow(stage, done, f"{name}: {problem or step.report()}"))
        return report

    def find_fastest(self, step: Any, batch: Any) -> StageReport:
        """Time the combinations of a step, apply the fastest one and return the report."""
        if not isinstance(step, BoostedStep) and not callable(step):
            raise TypeError(f"step must be a function that booster.step has decorated, not {step!r}")
        if not self._models:
            raise RuntimeError("find_fastest comes after boost: nothing was boosted whose state could be put back")
        function = step.function if isinstance(step, BoostedStep) else step
        args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})
        fusions = self._choices("fuse")
        variants = [Variant(*pair) for pair in itertools.product(self._choices("compile"), self._choices("capture"))]
        if len(self._choices("compile")) > 1 and self._compiles_whole:
            variants += [variant._replace(whole=True) for variant in variants if variant.compile]
        wrappers = [wrapper for reference in self._wrappers if (wrapper := reference()) is not None]
        before = TrainingSnapshot(self._models, self._optimizers, wrappers)
        losses: dict[Any, list[float]] = {}
        seconds: dict[Any, float] = {}
        try:
            for is_fused, variant in itertools.product(fusions, variants):
                self._set_fused(is_fused)
                trial = self._boosted(function, [variant])
                try:
                    losses[is_fused, variant], times = _timed(trial, args, kwargs)
                    seconds[is_fused, variant] = statistics.median(times[variant.untimed :])
                except Exception as error:
                    if not variant.compile or not losses:  # an error of the step itself, not of the compiler
                        raise
                    words = f"{'fused, ' if is_fused else ''}{variant}: {type(error).__name__}"
                    self._rows.append(StageRow("find_fastest", False, words))
                trial.reset()
                before.restore()
        finally:
            before.restore()
            self._set_fused(fusions[-1])
        expected = losses[fusions[0], variants[0]]
        right = [combination for combination in seconds if _agree(losses[combination], expected)]
        is_fused, variant = min(right, key=lambda combination: seconds[combination])
        self._set_fused(is_fused)
        for key in seconds:
            words = f"{'fused, ' if key[0] else ''}{key[1]}: {1e3 * seconds[key]:.2f} ms"
            wrong = "" if key in right else "; its losses differ"
            self._rows.append(StageRow("find_fastest", key == (is_fused, variant), words + wrong))
        if isinstance(step, BoostedStep):
            step.choose(variant)
            step.reset()
        return self.report()

    def _set_fused(self, is_fused: bool) -> None:
        for model in self._models:
            if is_fused:
                _fuse.fuse(model, verbose=False)
            elif "fuse" not in self._reasons:
                _fuse.unfuse(model)


def _timed(step: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[float], list[float]]:
    """Return the losses and the seconds of ten steps."""
    losses, times = [], []
    for _ in range(_STEPS):
        _wait()
        begin = time.perf_counter()
        outputs = step(*args, **kwargs)
        _wait()
        times.append(time.perf_counter() - begin)
        losses.append(_loss_of(outputs))
    return losses, times


def _loss_of(outputs: Any) -> float:
    """Return the loss that a step returned: a number, or the first item of a tuple or dict."""
    first = outputs
    if isinstance(first, dict):
        first = next(iter(first.values()), None)
    elif isinstance(first, tuple | list):
        first = first[0] if first else None
    if not isinstance(first, Tensor | float | int):
        raise TypeError(f"step must return the loss, or a tuple or dict that begins with it, not {outputs!r}")
    return float(first.detach()) if isinstance(first, Tensor) else float(first)


def _agree(losses: list[float], expected: list[float]) -> bool:
    """Return whether no loss differs from the expected one by more than 5%; two NaN are equal."""
    pairs = list(zip(losses, expected, strict=True))
    return all(abs(a - b) <= _LARGEST_DIFFERENCE * abs(b) + 1e-6 or (a != a and b != b) for a, b in pairs)
