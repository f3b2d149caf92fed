"""The five mixed precisions of the Booster, and what a precision of one's own derives from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from ..transformer.amp import GradScaler
from ._precision import CastModel, HysteresisScaler, MixedOptimizer, autocast_criterion, cast_weights
from .wrappers import OptimizerWrapper

__all__ = [
    "BF16MixedPrecision",
    "FP8MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "MixedPrecision",
    "mixed_precision_factory",
]


class MixedPrecision(ABC):
    """A way of training: `configure` makes a model, its optimizer and its criterion ready for it."""

    @abstractmethod
    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        """The three of them in this precision; the optimizer has a method `backward`."""


class Precision(MixedPrecision):
    """A precision of this package: it also says what a model whose parameters are sharded (FSDP2) needs of it."""

    # What matrix products are in.
    dtype: torch.dtype | None = None

    def scaler(self) -> GradScaler | None:
        """A new loss scale, or None where it is not needed."""
        return None

    def configure_sharded(self, model: nn.Module, optimizer: Any, criterion: Any) -> tuple[Any, Any, Any]:
        """As `configure`, for float32 parameters that FSDP2 casts when it gathers them."""
        return model, None if optimizer is None else MixedOptimizer(optimizer, self.scaler()), criterion


class FP32Precision(Precision):
    """Everything as it is."""

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        return model, None if optimizer is None else OptimizerWrapper(optimizer), criterion


class FP16TorchMixedPrecision(Precision):
    """`fp16`: autocast to float16 around model and criterion, float32 weights, a dynamic loss scale."""

    dtype = torch.float16

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._scaling = (init_scale, growth_factor, backoff_factor, growth_interval)
        self.scaler()  # complains of wrong numbers now

    def scaler(self) -> GradScaler:
        return GradScaler(*self._scaling)

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        boosted = CastModel(model, autocast=self.dtype)
        wrapped = None if optimizer is None else MixedOptimizer(optimizer, self.scaler())
        return boosted, wrapped, autocast_criterion(criterion, self.dtype)


class BF16MixedPrecision(Precision):
    """`bf16`: autocast to bfloat16 (O4); with "O5" bfloat16 weights, float32 masters beside the optimizer.

    The range of bfloat16 is that of float32: there is no loss scale.
    """

    dtype = torch.bfloat16

    def __init__(self, opt_level: str = "O4") -> None:
        if opt_level not in ("O4", "O5"):
            raise ValueError(f"opt_level={opt_level!r} is not known; use 'O4' (autocast) or 'O5' (bfloat16 weights)")
        self.opt_level = opt_level

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        if self.opt_level == "O5":
            return (*_in_half(model, optimizer, self.dtype), criterion)
        boosted = CastModel(model, autocast=self.dtype)
        wrapped = None if optimizer is None else MixedOptimizer(optimizer)
        return boosted, wrapped, autocast_criterion(criterion, self.dtype)


class FP8MixedPrecision(BF16MixedPrecision):
    """`fp8`: linear layers in float8 where that pays, the rest as in `bf16`."""

    def __init__(self) -> None:
        super().__init__()

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        return super().configure(_float8(model), optimizer, criterion)

    def configure_sharded(self, model: nn.Module, optimizer: Any, criterion: Any) -> tuple[Any, Any, Any]:
        return super().configure_sharded(_float8(model), optimizer, criterion)


def _float8(model: nn.Module) -> nn.Module:
    return model


class FP16NaiveMixedPrecision(Precision):
    """`fp16_naive`: float16 weights, inputs cast to it, float32 outputs, float32 masters beside the optimizer.

    Batch norms stay in float32. The loss scale starts at `initial_scale`, is multiplied by `growth_factor` after
    `growth_interval` steps without overflow, and by `backoff_factor` when there were `hysteresis` overflows since it
    grew; it is at least `min_scale` and at most `max_scale`. With `log_num_zeros_in_grad` every step logs how many
    elements of gradients are zero; with `verbose` skipped steps are logged.
    """

    dtype = torch.float16

    def __init__(
        self,
        log_num_zeros_in_grad: bool = False,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        verbose: bool | None = None,
        *,
        growth_interval: int = 1000,
        min_scale: float = 1.0,
        cast_inputs: bool = True,
    ) -> None:
        self._log_zeros, self._cast_inputs, self._verbose = bool(log_num_zeros_in_grad), cast_inputs, bool(verbose)
        self._scaling = (
            initial_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            min_scale,
            max_scale,
        )
        self.scaler()  # complains of wrong numbers now

    def scaler(self) -> GradScaler:
        return HysteresisScaler(*self._scaling, verbose=self._verbose)

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        boosted, wrapped = _in_half(model, optimizer, self.dtype, self.scaler(), cast_inputs=self._cast_inputs)
        if wrapped is not None and self._log_zeros:
            wrapped.log_zeros = True
        return boosted, wrapped, criterion


def _in_half(
    model: nn.Module, optimizer: Any, dtype: torch.dtype, scaler: GradScaler | None = None, cast_inputs: bool = True
) -> tuple[CastModel, MixedOptimizer | None]:
    """A model with half-precision weights, and its optimizer with float32 ones."""
    masters = cast_weights(model, optimizer, dtype)
    boosted = CastModel(model, inputs=dtype if cast_inputs else None, outputs=torch.float32)
    boosted.masters = masters
    return boosted, None if optimizer is None else MixedOptimizer(optimizer, scaler, masters)


class FP16ApexMixedPrecision(Precision):
    """`fp16_apex`: `apex.amp` at any opt level; arguments are those of `apex.amp.initialize`."""

    def __init__(
        self,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: torch.dtype | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        **options: Any,
    ) -> None:
        self.options = dict(
            opt_level=opt_level,
            cast_model_type=cast_model_type,
            patch_torch_functions=patch_torch_functions,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=loss_scale,
            cast_model_outputs=cast_model_outputs,
            num_losses=num_losses,
            verbosity=verbosity,
            min_loss_scale=min_loss_scale,
            max_loss_scale=max_loss_scale,
            **options,
        )
        from ..amp.frontend import opt_levels

        if opt_level not in opt_levels:
            raise ValueError(f"opt_level={opt_level!r} is not known; use one of {', '.join(sorted(opt_levels))}")
        settings = opt_levels[opt_level].settings
        self.dtype = cast_model_type or settings["patch_torch_functions_type"] or settings["cast_model_type"]
        self._loss_scale = settings["loss_scale"] if loss_scale is None else loss_scale

    def scaler(self) -> GradScaler | None:
        """For sharded models, which `apex.amp` does not scale losses of: its rule, in a scaler of PyTorch's kind."""
        low, high = self.options["min_loss_scale"] or 2.0**-24, self.options["max_loss_scale"]
        if self._loss_scale == "dynamic":
            return HysteresisScaler(growth_interval=2000, hysteresis=1, min_scale=low, max_scale=high)
        scale = float(self._loss_scale)
        return None if scale == 1.0 else HysteresisScaler(scale, min_scale=scale, max_scale=scale)

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        from .. import amp

        if optimizer is None:
            return amp.initialize(model, **self.options), None, criterion
        model, optimizer = amp.initialize(model, optimizer, **self.options)
        return model, AmpOptimizer(optimizer), criterion


class AmpOptimizer(OptimizerWrapper):
    """An optimizer of `apex.amp`; `loss_id` of `backward` says which of several losses is scaled."""

    # Set where gradients are not exchanged yet: they stay scaled then, to be exchanged with those of later passes.
    delays_unscale = False

    def backward(
        self, loss: Tensor, inputs: Any = None, retain_graph: bool = False, loss_id: int = 0, **kwargs: Any
    ) -> None:
        from .. import amp

        with amp.scale_loss(loss, self.optim, loss_id=loss_id, delay_unscale=self.delays_unscale) as scaled:
            scaled.backward(inputs=inputs, retain_graph=retain_graph, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        from ..amp._amp_state import _amp_state

        return loss.float() * _amp_state.loss_scalers[0].scale_tensor().to(loss.device).reshape(())

    def scaler_state(self) -> dict[str, Any]:
        from .. import amp

        return {"amp": amp.state_dict()}

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        from .. import amp

        if "amp" in state:
            amp.load_state_dict(state["amp"])


_PRECISIONS: dict[str, type[Precision]] = {
    "fp16": FP16TorchMixedPrecision,
    "fp16_apex": FP16ApexMixedPrecision,
    "bf16": BF16MixedPrecision,
    "fp8": FP8MixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
}


def mixed_precision_factory(mixed_precision_type: str) -> MixedPrecision:
    """A precision by its name, with its defaults."""
    if mixed_precision_type not in _PRECISIONS:
        raise ValueError(
            f"mixed_precision_type={mixed_precision_type!r} is not known; use one of {', '.join(_PRECISIONS)}"
        )
    return _PRECISIONS[mixed_precision_type]()
