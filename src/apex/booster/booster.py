"""The Booster: prepares a model, optimizer, criterion, data loader and scheduler for a precision and a plugin."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._arguments import checked
from ..amp._checks import check_loss
from ..checkpoint._huggingface import AdapterFolder
from ..checkpoint._ranks import is_first
from ..lazy._recorded import materialize
from ..ops._host import default_device
from ._report import StageReport
from ._stages import Stages
from .checkpoint_io import CheckpointIO
from .mixed_precision import FP32Precision, MixedPrecision, Precision, mixed_precision_factory
from .plugin.plugin_base import Boosted, PipelinePluginBase, Plugin
from .wrappers import ModelWrapper, OptimizerWrapper, check_boosted, check_model, masters_of, save_exact, unwrapped

__all__ = ["Booster"]

# Number of steps skipped in a row after which trace_overflow="auto" traces one step.
_AUTO_TRACE_AFTER = 3
# By model: a weak reference to the boosted optimizer that has float32 masters of the model's weights.
_OPTIMIZERS: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def _io_method(method: Any) -> Any:
    """Return a method of the Booster that calls this method of its `checkpoint_io`."""

    @functools.wraps(method)
    def forward(self: Booster, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_io, method.__name__)(*args, **kwargs)

    return forward


class Booster:
    """A front for training a model in a precision and, with a plugin, in several processes.

        booster = Booster(mixed_precision="bf16", plugin=TorchDDPPlugin())
        model, optimizer, criterion, dataloader, lr_scheduler = booster.boost(model, optimizer, criterion, dataloader)
        booster.backward(criterion(model(inputs), targets), optimizer)
        optimizer.step()

    - `device`: the device of models; by default the accelerator of this process, or the CPU without an accelerator;
    - `mixed_precision`: "fp16", "fp16_apex", "bf16", "fp8", "fp16_naive" or a MixedPrecision; None for float32;
    - `plugin`: None for one device. A plugin's own device or precision takes precedence over these arguments;
    - `fuse`: whether `boost` applies `apex.fuse` to models and optimizers;
    - `compile`: whether steps (`step`) run the model compiled; a dict has options of torch.compile;
    - `capture`: whether steps are captured in CUDA graphs, as by `apex.graphs.capture`;
    - `trace_overflow`: whether messages about skipped steps name the module whose numbers were the first that are not
      finite, as by `apex.amp.trace_overflow`; "auto" traces one step after three skipped ones in a row.

    `fuse`, `compile` and `capture` are True, False or "auto": applied only if it works here and makes the step quicker.
    `report` lists each stage with its effect, or the reason why it was not applied.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: MixedPrecision | str | None = None,
        plugin: Plugin | None = None,
        *,
        fuse: bool | str = False,
        compile: bool | str | dict[str, Any] = False,
        capture: bool | str = False,
        trace_overflow: bool | str = False,
    ) -> None:
        assert plugin is None or isinstance(plugin, Plugin), (
            f"plugin must be a Plugin of apex.booster.plugin or None, not {type(plugin).__name__}"
        )
        self.plugin = plugin
        if plugin is not None and plugin.control_device() and device is not None:
            _warn(f"{type(plugin).__name__} decides on the device: device={device!r} is ignored")
            device = None
        self.device = _default_device() if device is None else torch.device(device)
        if mixed_precision is not None and plugin is not None and plugin.control_precision():
            _warn(f"{type(plugin).__name__} has a precision of its own: mixed_precision={mixed_precision!r} is ignored")
            mixed_precision = None
        if isinstance(mixed_precision, str):
            mixed_precision = mixed_precision_factory(mixed_precision)
        if not isinstance(mixed_precision, MixedPrecision | None):
            raise ValueError(
                "mixed_precision must be a name or a MixedPrecision of apex.booster.mixed_precision, not "
                f"{mixed_precision!r}"
            )
        if trace_overflow not in (True, False, "auto"):
            raise ValueError(f"trace_overflow must be True, False or 'auto', not {trace_overflow!r}")
        if trace_overflow and compile:
            raise ValueError(
                f"trace_overflow={trace_overflow!r} does not go with compile={compile!r}: compiled steps do not call "
                "the modules, so they cannot be traced; pass compile=False"
            )
        self._trace_overflow = trace_overflow
        self.mixed_precision = mixed_precision
        self.step = Stages(fuse, compile, capture, plugin, mixed_precision)
        controls = plugin is not None and plugin.control_checkpoint_io()
        self.checkpoint_io = plugin.get_checkpoint_io() if controls else CheckpointIO()  # type: ignore[union-attr]

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Return the five arguments, ready for training; use the returned objects instead of the arguments.

        The model is returned in a `ModelWrapper`, in every precision. A scheduler made on the original optimizer keeps
        working. Parameter groups and state of the optimizer do not change.
        """
        _check_trainable(model, optimizer)
        precision = self.mixed_precision
        _check_replicated(model, precision)
        name_of = {id(param): name for name, param in model.named_parameters()}
        params = [] if optimizer is None else [param for group in optimizer.param_groups for param in group["params"]]
        self.step.check_model(model)
        if self.plugin is None or not self.plugin.takes_lazy or self.step.fuse:
            materialize([*model.parameters(), *model.buffers()])
        if self.plugin is None:
            _check_device(model)
        if not (self.plugin is not None and self.plugin.control_device()):
            _move(model, optimizer, self.device)
        boosted: Any = optimizer
        with self.step.fused(model, optimizer):
            if self.plugin is None:
                model, boosted, criterion = (precision or FP32Precision()).configure(model, optimizer, criterion)
            else:
                takes_it = self.plugin.takes_precision and (precision is None or isinstance(precision, Precision))
                arguments = (model, optimizer, criterion, dataloader, lr_scheduler, *((precision,) if takes_it else ()))
                model, boosted, criterion, dataloader, lr_scheduler = self.plugin.configure(*arguments)
                if precision is not None and not takes_it:
                    model, boosted, criterion = precision.configure(model, boosted, criterion)
        if not isinstance(model, ModelWrapper):
            model = ModelWrapper(model)
        if optimizer is not None:
            model._take_optimizer(optimizer)
        if isinstance(boosted, OptimizerWrapper):
            boosted.watched.append(optimizer)
            if boosted.names is None:
                boosted.names = [name_of.get(id(param)) for param in params]
            model._optimizer = weakref.ref(boosted)
            if getattr(boosted, "masters", None) is not None:
                _OPTIMIZERS[unwrapped(model)] = weakref.ref(boosted)
            if self._trace_overflow:
                self._start_trace(model, boosted)
        self.step.after(model, boosted)
        return model, boosted, criterion, dataloader, lr_scheduler

    def _start_trace(self, model: Any, optimizer: OptimizerWrapper) -> None:
        """Trace overflows of a boosted model; warn if its optimizer never skips a step."""
        try:
            optimizer.trace_overflow(model, _AUTO_TRACE_AFTER if self._trace_overflow == "auto" else None)
        except RuntimeError as error:
            _warn(f"trace_overflow={self._trace_overflow!r} has no effect: {error}")

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        """Run a backward pass from the loss times its scale; `optimizer` is the one that `boost` returned."""
        check_loss(loss)
        check_boosted(optimizer)
        optimizer.backward(loss)

    def report(self) -> StageReport:
        """Return the effect of each stage of `boost` and of steps, or why a stage did nothing; its text is a table."""
        return self.step.report()

    def find_fastest(self, step: Any, batch: Any) -> StageReport:
        """Time a step in all combinations of the "auto" stages, and keep the fastest; return the report.

        `step` is a function that `step` has decorated, and returns the loss, or a tuple or dict whose first item is the
        loss. `batch` is its argument, a tuple of its arguments or a dict of its keyword arguments. Every combination
        runs ten steps from the same state, which is put back afterwards. A combination is left out if one of its losses
        differs from the plain step's by more than 5%. Models and optimizers need twice their memory.
        """
        return self.step.find_fastest(step, batch)

    def no_sync(self, model: Any = None, optimizer: Any = None) -> contextlib.AbstractContextManager[None]:
        """Return a context that accumulates gradients locally; the next backward pass outside exchanges them."""
        assert self.plugin is not None, "no_sync needs a plugin: without one nothing is exchanged"
        if not self.plugin.support_no_sync():
            raise NotImplementedError(
                f"{type(self.plugin).__name__} has no no_sync with these arguments; TorchDDPPlugin and TorchFSDPPlugin "
                "have it, LowLevelZeroPlugin with stage=1, and HybridParallelPlugin with pp_size=1. Without no_sync "
                "every backward pass exchanges its gradients, which adds up to the same"
            )
        return self.plugin.no_sync(model, optimizer)

    @checked
    def execute_pipeline(
        self,
        data_iter: Any,
        model: Any,
        criterion: Any,
        optimizer: Any = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run the next batch of `data_iter` through the pipeline in microbatches: forward, and backward if training.

        Backward passes run if an optimizer is given. `criterion(outputs, inputs)` gets the last stage's outputs and the
        microbatch. The result's "loss" is the mean over microbatches, its "outputs" are of the whole batch. Both are
        None in processes without the last stage, or if they were not requested.
        """
        assert isinstance(self.plugin, PipelinePluginBase), (
            f"execute_pipeline needs a plugin with pipelines (HybridParallelPlugin), not {type(self.plugin).__name__}"
        )
        if not hasattr(data_iter, "__next__"):
            raise TypeError(
                f"data_iter must be an iterator, such as iter(dataloader), not a {type(data_iter).__name__}"
            )
        if optimizer is not None:
            check_boosted(optimizer)
        return self.plugin.execute_pipeline(data_iter, model, criterion, optimizer, return_loss, return_outputs)

    @checked
    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | os.PathLike[str] | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Return a model with LoRA adapters. Call it before `boost`; it needs the package peft."""
        if quantize or bnb_quantization_config is not None:
            raise NotImplementedError("quantized base weights are not supported; quantize must be False")
        assert self.plugin is not None, "LoRA needs a plugin"
        assert self.plugin.support_lora(), f"{type(self.plugin).__name__} has no LoRA"
        folder = None if pretrained_dir is None else os.fspath(pretrained_dir)
        return self.plugin.enable_lora(model, folder, lora_config)

    save_model = _io_method(CheckpointIO.save_model)
    load_model = _io_method(CheckpointIO.load_model)
    save_optimizer = _io_method(CheckpointIO.save_optimizer)
    load_optimizer = _io_method(CheckpointIO.load_optimizer)
    save_lr_scheduler = _io_method(CheckpointIO.save_lr_scheduler)
    load_lr_scheduler = _io_method(CheckpointIO.load_lr_scheduler)
    save_training = _io_method(CheckpointIO.save_training)
    resume_latest = _io_method(CheckpointIO.resume_latest)
    wait_for_saves = _io_method(CheckpointIO.wait_for_saves)

    @checked
    def save_lora_as_pretrained(
        self, model: Any, checkpoint: str | os.PathLike[str], use_safetensors: bool = False
    ) -> None:
        """Save the LoRA adapters of a model, whole or not at all, for `enable_lora(pretrained_dir=...)`.

        All processes must call it.
        """
        adapted = unwrapped(model)
        if not hasattr(adapted, "save_pretrained"):
            raise TypeError(f"model must be one with adapters, from enable_lora, not a {type(adapted).__name__}")
        masters, exact = masters_of(model), None
        if masters is not None and not masters.is_local:
            exact = masters.read(list(adapted.parameters()), is_first())
        save = functools.partial(save_exact, model, "save_pretrained", exact=exact)
        files = AdapterFolder(lambda folder: save(str(folder), safe_serialization=use_safetensors))
        CheckpointIO()._write(lambda _: files, checkpoint, False, "host", "wait")


def _check_trainable(model: Any, optimizer: Any) -> None:
    """Raise unless `boost` can train `model` with `optimizer`."""
    if isinstance(optimizer, nn.Module) and not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__} and optimizer a {type(optimizer).__name__}: they are in the wrong "
            "order; call boost(model, optimizer, ...)"
        )
    check_model(model)
    if optimizer is None:
        return
    if isinstance(optimizer, OptimizerWrapper):
        raise ValueError("the optimizer has been boosted already; give the one that it was made from")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, not a {type(optimizer).__name__}")
    if _OPTIMIZERS.get(unwrapped(model), lambda: None)() is not None:
        raise ValueError(
            "the model has been boosted already, with another optimizer that has float32 masters of its weights: use "
            "one optimizer with several parameter groups, or BF16MixedPrecision('O4'), which has no masters"
        )
    if hasattr(optimizer, "_master_of"):
        raise ValueError(
            f"the optimizer ({type(optimizer).__name__}) has been boosted already, with another model: put both models "
            "into one nn.ModuleList and boost that"
        )
    known = {id(param) for param in model.parameters()}
    updated = [param for group in optimizer.param_groups for param in group["params"]]
    if known and updated and not any(id(param) in known for param in updated):
        raise ValueError(
            f"none of the parameters of the optimizer ({type(optimizer).__name__}) belongs to the model "
            f"({type(model).__name__}), which would not be trained; make the optimizer from model.parameters()"
        )


def _check_replicated(model: nn.Module, precision: Any) -> None:
    """Raise if weights would be cast that torch's DistributedDataParallel or FSDP manages already.

    DistributedDataParallel would exchange no gradients of them. FSDP gathers weights of the dtype that it has noted.
    """
    if not getattr(precision, "casts_weights", False):
        return
    instead = "or a precision with float32 weights such as BF16MixedPrecision('O4')"
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "the model is in torch's DistributedDataParallel already, which would not exchange gradients of weights "
            f"that are cast to {precision.dtype} now: boost the bare model first and wrap the returned one, use "
            f"TorchDDPPlugin, {instead}"
        )
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
        raise ValueError(
            f"the model is sharded by FSDP already, which would not know that its weights are cast to "
            f"{precision.dtype} now: use TorchFSDPPlugin with the bare model, {instead}"
        )


def _check_device(model: nn.Module) -> None:
    """Raise if a model has parameters without data, whose masters and state would have none either."""
    lazy = [name for name, param in model.named_parameters() if nn.parameter.is_lazy(param)]
    if lazy:
        raise ValueError(
            f"{lazy[0]} has no shape yet, because it belongs to a lazy module of PyTorch: call the model once with an "
            "example before you make the optimizer and boost"
        )
    empty = [name for name, param in model.named_parameters() if param.is_meta]
    if empty:
        raise ValueError(
            f"{empty[0]} is on the meta device and has no values: call model.to_empty(device=...) and initialise or "
            "load it before boost, or build the model in apex.lazy.LazyInitContext"
        )


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return default_device()
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _move(model: nn.Module, optimizer: Any, device: torch.device) -> None:
    """Move a model and the optimizer state of its parameters to a device."""
    if any(tensor.is_meta for tensor in model.parameters()):
        return
    model.to(device)
    for state in () if optimizer is None else optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and name != "step":
                state[name] = value.to(device)


def _warn(message: str) -> None:
    """Issue a warning in the first process only."""
    if is_first():
        warnings.warn(message, stacklevel=3)
