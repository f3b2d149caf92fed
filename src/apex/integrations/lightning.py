"""`ApexPrecision`: a precision plugin for Lightning's Trainer and for Fabric."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import fp8
from .._fuse import fuse
from ..amp._containers import applier, to_type
from ..amp._model_casts import _cast_model
from ..booster._masters import StateMasters
from ..booster._report import StageReport, StageRow, fused_row
from ..ops._host import HOST, on_host
from ..optimizers._base import FusedOptimizer
from ..optimizers._formats import master_of

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision
elif importlib.util.find_spec("pytorch_lightning") is not None:
    from pytorch_lightning import LightningModule
    from pytorch_lightning.plugins.precision import Precision
else:
    raise ImportError("apex.integrations.lightning needs Lightning 2.2 or newer: pip install lightning")

__all__ = ["ApexPrecision"]

# Lightning's name of each precision.
_NAMES = {"32": "32-true", "bf16": "bf16-mixed", "bf16-true": "bf16-true", "fp16": "16-mixed", "fp8": "bf16-mixed"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class ApexPrecision(Precision):
    """A precision plugin that fuses the model and its optimizers.

        trainer = lightning.Trainer(plugins=[ApexPrecision("bf16")])
        fabric = lightning.Fabric(plugins=[ApexPrecision("bf16")])

    Give it as a plugin, without `precision=`. The precisions:

    - "32": float32;
    - "bf16", "fp16": autocast, float32 weights; "fp16" has a dynamic loss scale;
    - "bf16-true": bfloat16 weights, and float32 masters in the state of optimizers that have a fused counterpart;
    - "fp8": "bf16" with float8 products in large linear layers; emulated on a CPU.

    If `fuse` is False, only the precision is set. `report` lists fused modules, float8 layers and fused optimizers.
    Gradients are clipped after they are unscaled. This holds for fused optimizers too, which Lightning's own float16
    plugin refuses to clip. With Fabric, optimizers are fused in their first step.
    """

    def __init__(self, precision: str = "bf16", *, fuse: bool = True, scaler: Any = None) -> None:
        if precision not in _NAMES:
            raise ValueError(f"precision={precision!r} is not known; use one of {', '.join(_NAMES)}")
        if scaler is not None and precision != "fp16":
            raise ValueError(f"scaler is for precision='fp16', not {precision!r}")
        self.precision: Any = _NAMES[precision]
        self.report = StageReport()
        self.scaler = scaler
        if precision == "fp16" and scaler is None:
            self.scaler = torch.amp.GradScaler(_device_type())
        self._kind, self._fuses = precision, fuse
        self._exact: dict[Tensor, Tensor] = {}
        self._masters: dict[int, Any] = {}
        self._has_trainer = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Fuse and cast a module."""
        if self._fuses:
            self.report.append(fused_row(fuse(module, verbose=False)))
        if self._kind == "fp8":
            emulate = all(map(on_host, module.parameters()))
            converted = [row for row in fp8.convert(module, emulate=emulate) if not row.reason]
            self.report.append(StageRow("fp8", bool(converted), f"{len(converted)} layers in float8"))
        if self._kind == "bf16-true":
            self._exact |= {param: param.detach() for param in module.parameters()}
            _cast_model(module, torch.bfloat16, True)
        return module

    def convert_input(self, data: Any) -> Any:
        """Cast floats to bfloat16 if the weights are, and to autocast's dtype in Fabric, as its own plugins do.

        A Trainer gives whole batches, with targets of losses: autocast casts what its operators need.
        """
        dtype = None if self._has_trainer else _DTYPES.get(self._kind)
        dtype = torch.bfloat16 if self._kind == "bf16-true" else dtype
        return data if dtype is None else applier(data, lambda value: to_type(dtype, value))

    def convert_output(self, data: Any) -> Any:
        """Cast outputs to float32, in which losses are computed outside of a module; Fabric alone asks for it."""
        return data if self._kind == "32" else applier(data, lambda value: to_type(torch.float32, value))

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return autocast, if the precision has it."""
        if self._kind not in _DTYPES:
            return contextlib.nullcontext()
        return torch.autocast(_device_type(), _DTYPES[self._kind], cache_enabled=False)

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Fuse the optimizers of a Trainer."""
        self._has_trainer = True
        for optimizer in optimizers:
            self._prepare(optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    def _prepare(self, optimizer: Any) -> None:
        """Fuse an optimizer, and make its masters if the weights are bfloat16; only the first call does."""
        if id(optimizer) in self._masters:
            return
        self._masters[id(optimizer)] = None
        if self._fuses and not isinstance(optimizer, FusedOptimizer):
            kind, [row] = type(optimizer).__name__, fuse(optimizer, verbose=False)
            self.report.append(StageRow("fuse optimizer", not row.reason, row.reason or f"{kind} is {row.rule}"))
        if self._kind == "bf16-true" and isinstance(optimizer, FusedOptimizer) and not optimizer.stochastic_rounding:
            optimizer.master_weights = True
            self._masters[id(optimizer)] = StateMasters(optimizer, self._exact_weights(optimizer))

    def _exact_weights(self, optimizer: Any) -> dict[Tensor, Tensor]:
        """Return float32 values of parameters: masters that were loaded, or the values before the module was cast.

        Leaves out parameters that have changed since, because a checkpoint was loaded into the module.
        """
        exact = {}
        for param, value in self._exact.items():
            for each in (master_of(optimizer.state.get(param, {}), value), value):
                if each.shape == param.shape and torch.equal(each.to(param.dtype), param):
                    exact[param] = each.float()
                    break
        return exact

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the hooks of a Trainer's module."""
        return super().pre_backward(tensor, module) if _in_trainer(module) else tensor

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Run a backward pass from the loss times its scale."""
        tensor = tensor if self.scaler is None else self.scaler.scale(tensor)
        if _in_trainer(model):
            super().backward(tensor, model, *args, **kwargs)
        else:
            tensor.backward(*args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        """Call the hooks of a Trainer's module."""
        return super().post_backward(tensor, module) if _in_trainer(module) else tensor.detach()

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        """Run the closure of a Trainer, unscale and clip gradients, and step the optimizer."""
        self._prepare(optimizer)
        if not _in_trainer(model):
            if self.scaler is None:
                return optimizer.step(**kwargs) if closure is None else optimizer.step(closure, **kwargs)
            result = self.scaler.step(optimizer, **kwargs)
            self.scaler.update()
            return result
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        loss = closure() if closure is not None else None
        if loss is None and model.automatic_optimization:  # the training step returned None: there are no gradients
            self._after_closure(model, optimizer)
            return None
        self.unscale_gradients(optimizer)
        self._after_closure(model, optimizer)
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return loss if result is None else result

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide gradients by the loss scale."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loss scale."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state from `state_dict`."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict)


def _in_trainer(module: Any) -> bool:
    """Return whether a module belongs to a Trainer; Fabric passes any module, or None."""
    return isinstance(module, LightningModule) and getattr(module, "_trainer", None) is not None


def _device_type() -> str:
    """Return the device type that autocast and the loss scale are for."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return HOST.type if accelerator is None else accelerator.type
