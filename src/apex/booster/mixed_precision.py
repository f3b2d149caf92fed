"""The five mixed precisions of the Booster, and the base class for a user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..amp import _autocast
from ..amp._amp_state import HALF, _amp_state
from ..amp._checks import has_known_step
from ..ops._host import on_host
from ..transformer.amp import GradScaler, HysteresisScaler
from ._masters import has_state_masters
from ._precision import CastModel, MixedOptimizer, autocast_criterion, cast_weights
from ._warnings import warn_user
from ._weight_copies import WeightCopies
from .wrappers import OptimizerWrapper, unwrapped

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
    """A precision for training: `configure` prepares a model, its optimizer and its criterion."""

    @abstractmethod
    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        """Return model, optimizer and criterion in this precision; the optimizer has a method `backward`."""


class Precision(MixedPrecision):
    """A precision of this package. `model` may also be a list of the chunks of a pipeline stage."""

    # The dtype of matrix products; None for the dtype of their inputs.
    dtype: torch.dtype | None = None
    # Whether the model's weights get this dtype.
    casts_weights = False

    def scaler(self) -> GradScaler | None:
        """Return a new loss scaler, or None if the precision needs none."""
        return None

    def prepare(self, model: nn.Module) -> None:
        """Replace layers of the model in place; called before anything else."""

    def configure_sharded(self, model: nn.Module, optimizer: Any, criterion: Any) -> tuple[Any, Any, Any]:
        """Return model, optimizer and criterion, for float32 parameters that FSDP2 casts when it gathers them."""
        return model, None if optimizer is None else MixedOptimizer(optimizer, self.scaler()), criterion

    def _under_autocast(self, model: Any, optimizer: Any, criterion: Any) -> tuple[Any, Any, Any]:
        """Return a model and a criterion under autocast, and an optimizer with this precision's loss scaler."""
        assert self.dtype is not None
        if optimizer is not None:
            change_each(model, self._check_weights)
            change_each(model, lambda chunk: _warn_of_lost_updates(chunk, optimizer))
        boosted = change_each(model, self._cast_model)
        wrapped = None if optimizer is None else MixedOptimizer(optimizer, self.scaler())
        return boosted, wrapped, autocast_criterion(criterion, self.dtype)

    def _cast_model(self, model: nn.Module) -> CastModel:
        """Return a model under autocast."""
        return CastModel(model, autocast=self.dtype)

    def _check_weights(self, model: nn.Module) -> None:
        """Raise TypeError for trained weights that can neither be unscaled nor be combined with activations."""
        for name, param in model.named_parameters():
            if param.requires_grad and param.dtype in HALF and (torch.float16 in (param.dtype, self.dtype)):
                raise TypeError(
                    f"{name} is {param.dtype}; {type(self).__name__} trains float32 weights: call "
                    "model.float() before the optimizer is made, or use mixed_precision='fp16_naive', which keeps "
                    "float32 masters of float16 weights"
                )

    def _in_half(self, model: Any, optimizer: Any, criterion: Any, cast_inputs: bool = True) -> tuple[Any, Any, Any]:
        """Return a model with half-precision weights, and an optimizer with float32 master weights."""
        assert self.dtype is not None
        chunks = model if isinstance(model, list) else [model]
        # A loss scaler unscales gradients in float32, which masters in the optimizer's state do not have.
        masters = cast_weights(chunks, optimizer, self.dtype, in_state=self.scaler() is None)
        casts: dict[str, Any] = {"inputs": self.dtype if cast_inputs else None, "outputs": torch.float32}
        boosted = change_each(model, lambda chunk: CastModel(chunk, **casts, masters=masters))
        wrapped = None if optimizer is None else MixedOptimizer(optimizer, self.scaler(), masters)
        return boosted, wrapped, criterion


def _warn_of_lost_updates(model: nn.Module, optimizer: Any) -> None:
    """Warn if the optimizer trains bfloat16 weights and keeps no more precise values of them."""
    trained = {param for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
    names = [name for name, param in model.named_parameters() if param in trained and param.dtype == torch.bfloat16]
    exact = has_state_masters(optimizer) or getattr(optimizer, "_takes_gradients", False)  # ZeRO has float32 weights
    if names and has_known_step(optimizer) and not exact and not getattr(optimizer, "stochastic_rounding", False):
        warn_user(
            f"{len(names)} trained parameters are bfloat16 ({names[0]} is the first), and {type(optimizer).__name__} "
            "keeps no float32 values of them: updates of less than 1/512 of a weight are lost. Call model.float() "
            'before the optimizer is made, or use BF16MixedPrecision("O5") or FP8MixedPrecision(opt_level="O5"), which '
            "keep float32 masters"
        )


def change_each(model: Any, change: Callable[[nn.Module], Any]) -> Any:
    """Return `change(model)`, or the list of changed chunks if the model is a list of chunks."""
    return [change(chunk) for chunk in model] if isinstance(model, list) else change(model)


class FP32Precision(Precision):
    """Training without casts and without a loss scale."""

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
        self.scaler()  # raises for invalid numbers

    def scaler(self) -> GradScaler:
        return GradScaler(*self._scaling)

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        return self._under_autocast(model, optimizer, criterion)


class BF16MixedPrecision(Precision):
    """`bf16`: autocast to bfloat16 (O4); with "O5" bfloat16 weights and float32 masters in the optimizer.

    There is no loss scale, because bfloat16 has the range of float32. With `weight_copies` a forward pass casts all
    weights that products read at once, and a fused optimizer takes their gradients in bfloat16: half the bytes, and
    the numbers of autocast, except that embeddings and fused norms give bfloat16 activations.
    """

    dtype = torch.bfloat16

    def __init__(self, opt_level: str = "O4", *, weight_copies: bool = False) -> None:
        if opt_level not in ("O4", "O5"):
            raise ValueError(f"opt_level={opt_level!r} is not known; use 'O4' (autocast) or 'O5' (bfloat16 weights)")
        if weight_copies and opt_level == "O5":
            raise ValueError("weight_copies=True goes with opt_level='O4': the weights of 'O5' are bfloat16 themselves")
        self.opt_level, self.weight_copies = opt_level, weight_copies
        self.casts_weights = opt_level == "O5"

    def _cast_model(self, model: nn.Module) -> CastModel:
        if not self.weight_copies:
            return super()._cast_model(model)
        return CastModel(model, autocast=self.dtype, copies=WeightCopies(model, torch.bfloat16))

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        return (self._in_half if self.opt_level == "O5" else self._under_autocast)(model, optimizer, criterion)


class FP8MixedPrecision(BF16MixedPrecision):
    """`fp8`: `bf16` with linear layers that multiply in float8 if that is quicker.

    `opt_level` and `weight_copies` are as in `BF16MixedPrecision`. The other arguments are passed to
    `apex.fp8.convert`, whose report on each layer is in `converted`. On a CPU the products are emulated, with the same
    numbers and without the speed.
    """

    def __init__(
        self,
        scaling: str = "tensorwise",
        emulate: bool = False,
        *,
        opt_level: str = "O4",
        weight_copies: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(opt_level, weight_copies=weight_copies)
        self.options = {"scaling": scaling, "emulate": emulate, **options}
        self.converted: list[Any] = []

    def prepare(self, model: nn.Module) -> None:
        from .. import fp8

        emulate = self.options["emulate"] or all(map(on_host, model.parameters()))
        report = fp8.convert(model, **{**self.options, "emulate": emulate})
        self.converted += report
        if all(row.reason for row in report):
            counts = Counter(row.reason for row in report)
            reasons = "; ".join(f"{count} of {len(report)}: {reason}" for reason, count in counts.items())
            warn_user(
                "fp8: no layer of the model multiplies in float8, so that it trains in bfloat16: "
                f"{reasons or 'it has no linear layer'}. FP8MixedPrecision takes the arguments of apex.fp8.convert, "
                "such as smallest_weight"
            )

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        change_each(model, self.prepare)
        return super().configure(model, optimizer, criterion)


class FP16NaiveMixedPrecision(Precision):
    """`fp16_naive`: float16 weights and inputs, float32 outputs, and float32 masters in the optimizer.

    Batch norms stay in float32. The loss scale starts at `initial_scale`. It is multiplied by `growth_factor` after
    `growth_interval` steps without overflow, and by `backoff_factor` after `hysteresis` overflows since it last grew.
    It stays between `min_scale` and `max_scale`. If `log_num_zeros_in_grad` is set, every step logs the number of zero
    elements in gradients; if `verbose` is set, skipped steps are logged.
    """

    dtype = torch.float16
    casts_weights = True

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
        limits = (min_scale, max_scale)
        self._scaling = (initial_scale, growth_factor, backoff_factor, growth_interval, hysteresis, *limits)
        self.scaler()  # raises for invalid numbers

    def scaler(self) -> GradScaler:
        return HysteresisScaler(*self._scaling, verbose=self._verbose)

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        boosted, wrapped, criterion = self._in_half(model, optimizer, criterion, self._cast_inputs)
        if wrapped is not None:
            wrapped.log_zeros = self._log_zeros
        return boosted, wrapped, criterion


# Arguments of `apex.amp.initialize` for a dynamic loss scale, in the order of a GradScaler's arguments, with defaults.
_SCALING = {
    "dynamic_init_scale": 2.0**16,
    "scale_growth_factor": 2.0,
    "scale_backoff_factor": 0.5,
    "scale_window": 2000,
}


class FP16ApexMixedPrecision(Precision):
    """`fp16_apex`: `apex.amp` at any opt level; the arguments are passed to `apex.amp.initialize`.

    O1 and O4 cast only inside of the boosted model and criterion. The model's outputs are float32 unless
    `cast_model_outputs` is given, so that a loss computed outside is not rounded to half precision.
    """

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
        arguments = {name: value for name, value in locals().items() if name not in ("self", "options", "__class__")}
        self.options: dict[str, Any] = {**arguments, **options}
        from ..amp.frontend import opt_levels

        if opt_level not in opt_levels:
            raise ValueError(f"opt_level={opt_level!r} is not known; use one of {', '.join(sorted(opt_levels))}")
        settings = opt_levels[opt_level].settings
        self.dtype = cast_model_type or settings["patch_torch_functions_type"] or settings["cast_model_type"]
        self._loss_scale = settings["loss_scale"] if loss_scale is None else loss_scale
        self._casts_operators = bool(
            settings["patch_torch_functions"] if patch_torch_functions is None else patch_torch_functions
        )

    def scaler(self) -> GradScaler | None:
        """Return a GradScaler with the rule of `apex.amp`, for sharded models, which `apex.amp` cannot train."""
        low, high = self.options["min_loss_scale"] or 2.0**-24, self.options["max_loss_scale"]
        if self._loss_scale == "dynamic":
            start, growth, backoff, window = (self.options.get(name, default) for name, default in _SCALING.items())
            return HysteresisScaler(start, growth, backoff, window, hysteresis=1, min_scale=low, max_scale=high)
        scale = float(self._loss_scale)
        return None if scale == 1.0 else HysteresisScaler(scale, min_scale=scale, max_scale=scale)

    def configure(self, model: nn.Module, optimizer: Any = None, criterion: Any = None) -> tuple[Any, Any, Any]:
        from .. import amp

        options = self.options
        if self._casts_operators and isinstance(model, nn.Module) and options["cast_model_outputs"] is None:
            options = {**options, "cast_model_outputs": torch.float32}
        models, optimizer = amp.initialize(model, [] if optimizer is None else optimizer, **options)
        properties = _amp_state.opt_properties
        if properties.patch_torch_functions:
            # Autocast that is enabled on the thread would cast other models' operators too.
            _autocast.leave_thread()
            criterion = autocast_criterion(criterion, properties.patch_torch_functions_type)
        return models, AmpOptimizer(optimizer) if optimizer else None, criterion


class AmpOptimizer(OptimizerWrapper):
    """An optimizer of `apex.amp`; `loss_id` of `backward` selects one of several loss scalers."""

    # Whether gradients stay scaled after a backward pass, because they are accumulated or reduced later.
    delays_unscale = False

    def backward(
        self, loss: Tensor, inputs: Any = None, retain_graph: bool = False, loss_id: int = 0, **kwargs: Any
    ) -> None:
        from .. import amp

        delays = self.delays_unscale or self.finalize is not None
        with self._held(), amp.scale_loss(loss, self.optim, loss_id, None, delays) as scaled:
            scaled.backward(inputs=inputs, retain_graph=retain_graph, **kwargs)

    def scale_loss(self, loss: Tensor) -> Tensor:
        from .. import amp

        with amp.scale_loss(loss, self.optim, delay_unscale=True) as scaled:
            return scaled

    def trace_overflow(self, model: nn.Module, after_skips: int | None = None) -> Any:
        from .. import amp

        return amp.trace_overflow(unwrapped(model), after_skips=after_skips)

    def _unscale(self) -> None:
        from .. import amp

        if self.optim._amp_stash.params_have_scaled_gradients:
            nothing = torch.zeros((), dtype=torch.float32, device=self.parameters[0].device)
            with amp.scale_loss(nothing, self.optim):
                pass

    def _gradients(self) -> list[Tensor]:
        if not self.optim._amp_stash.optimizer_unscales:
            return super()._gradients()
        return [param.grad for param in self.optim._amp_stash.model_params if param.grad is not None]

    def _grad_norm(self, norm_type: float) -> Tensor:
        norm, stash = super()._grad_norm(norm_type), self.optim._amp_stash
        # An optimizer made with materialize_master_grads=False has scaled gradients until its step.
        return norm / stash.inner.most_recent_scale if stash.optimizer_unscales else norm

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
    """Return the precision of this name, with default arguments."""
    if mixed_precision_type not in _PRECISIONS:
        raise ValueError(
            f"mixed_precision={mixed_precision_type!r} is not known; use one of {', '.join(_PRECISIONS)}, or None for "
            "float32"
        )
    return _PRECISIONS[mixed_precision_type]()
