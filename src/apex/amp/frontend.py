"""Opt levels, their properties, `initialize`, and loss scales in a checkpoint."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from .._arguments import Count, checked
from . import _autocast
from ._amp_state import _amp_state, maybe_print, warn_or_err
from ._checks import (
    check_count,
    check_flags,
    check_scaling,
    check_type,
    checked_loss_scale,
    checked_number,
    checked_scale,
    is_flag,
)
from ._initialize import as_lists, as_they_came, initialize_models_and_optimizers, release
from ._overflow_trace import OverflowTrace
from .scaler import LossScaler, _overflow_messages


def _settings(
    level: str | None = None,
    cast: Any = None,
    patch: Any = None,
    batchnorm: Any = None,
    masters: Any = None,
    scale: Any = 1.0,
) -> dict[str, Any]:
    """Return the properties of an opt level, or by default of none."""
    return {
        "opt_level": level,
        "cast_model_type": cast,
        "patch_torch_functions": patch is not None,
        "patch_torch_functions_type": patch,
        "keep_batchnorm_fp32": batchnorm,
        "master_weights": masters,
        "loss_scale": scale,
    }


class Properties:
    """The settings of a session: an opt level sets them and a user may override them; `options` holds them all."""

    options: dict[str, Any]

    def __init__(self) -> None:
        self.__dict__["options"] = {"enabled": False, **_settings()}

    def _update_options_dict(self, new_options: dict[str, Any]) -> None:
        for name, value in new_options.items():
            if name not in self.options:
                raise ValueError(f"tried to set the unexpected option {name!r}")
            self.options[name] = value

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            super().__setattr__(name, value)
            return
        self.options[name] = self._checked(name, value)

    def _checked(self, name: str, value: Any) -> Any:
        casts_functions = self.opt_level in ("O1", "O4")
        if name == "cast_model_type":
            check_type(name, None if value is False else value)
        if name == "patch_torch_functions_type":
            check_type(name, value, (torch.float16, torch.bfloat16))
        if name in ("patch_torch_functions", "master_weights"):
            check_flags(**{name: value})
        if name == "cast_model_type" and casts_functions and value not in (None, False, torch.float32):
            warn_or_err(
                f"{self.opt_level} casts at function calls and leaves the model's weights in float32; for a model cast "
                f"to another type use opt_level='O2', 'O3' or 'O5'. cast_model_type was {value}"
            )
        if name == "patch_torch_functions" and value and not casts_functions:
            warn_or_err("patch_torch_functions=True comes with opt_level='O1' or 'O4' and cannot be set with others")
        if name == "keep_batchnorm_fp32":
            value = {"True": True, "False": False, "None": None}.get(value, value) if isinstance(value, str) else value
            if not is_flag(value):
                raise ValueError(f"keep_batchnorm_fp32 must be a bool, 'True', 'False' or None, not {value!r}")
            if casts_functions and value is not None:
                warn_or_err(
                    f"with opt_level {self.opt_level} batch norms run in float32 by themselves, so keep_batchnorm_fp32 "
                    f"should be None. keep_batchnorm_fp32 was {value}"
                )
        if name == "master_weights" and casts_functions and value is not None:
            warn_or_err(
                f"master_weights make no sense with {self.opt_level}, whose model weights are float32 themselves"
            )
        return checked_loss_scale(name, value) if name == "loss_scale" else value


class _Level:
    """An opt level; calling it sets its properties."""

    brief = ""
    more = ""
    settings: dict[str, Any]

    def __call__(self, properties: Properties) -> Properties:
        properties.options.update(self.settings, enabled=True)
        return properties


class O0(_Level):
    """Training entirely in float32."""

    brief = "O0:  Pure FP32 training."
    more = "The model is cast to float32 and nothing else happens: the baseline for accuracy.\n"
    settings = _settings("O0", torch.float32, None, None, False, 1.0)


class O1(_Level):
    """Autocast: functions that benefit from float16 run in it."""

    brief = "O1:  Insert automatic casts around Pytorch functions and Tensor methods."
    more = "Weights stay in float32; matrix products and convolutions run in float16, what needs range in float32.\n"
    settings = _settings("O1", None, torch.float16, None, None, "dynamic")


class O2(_Level):
    """The model in float16 with float32 batch norms and master weights."""

    brief = "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n"
    more = "The model is cast to float16 except for batch norms; the optimizer updates float32 copies of its weights.\n"
    settings = _settings("O2", torch.float16, None, True, True, "dynamic")


class O3(_Level):
    """Training entirely in float16."""

    brief = "O3:  Pure FP16 training."
    more = "The model is cast to float16 and nothing else happens: the baseline for speed.\n"
    settings = _settings("O3", torch.float16, None, False, False, 1.0)


class O4(_Level):
    """O1 with bfloat16, which needs no loss scale."""

    brief = "O4:  Insert automatic casts around Pytorch functions and Tensor methods, to bfloat16."
    more = "Weights stay in float32; matrix products and convolutions run in bfloat16.\n"
    settings = _settings("O4", None, torch.bfloat16, None, None, 1.0)


class O5(_Level):
    """O2 with bfloat16, which needs no loss scale."""

    brief = "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.\n"
    more = (
        "The model is cast to bfloat16 except for batch norms; the optimizer updates float32 copies of its weights.\n"
    )
    settings = _settings("O5", torch.bfloat16, None, True, True, 1.0)


# Arguments of LossScaler, and their names in `initialize`.
_NAMES = {
    "init_scale": "dynamic_init_scale",
    "scale_factor": "scale_growth_factor",
    "backoff_factor": "scale_backoff_factor",
}

opt_levels = {"O3": O3(), "O2": O2(), "O1": O1(), "O0": O0(), "O4": O4(), "O5": O5()}


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
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
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    dynamic_init_scale: float = 2.0**16,
    scale_growth_factor: float = 2.0,
    scale_backoff_factor: float = 0.5,
    scale_window: int = 2000,
    combine_grad: bool | None = None,
    combine_ddp: bool | None = None,
    ddp_replica_count: int = 4,
    user_cast_preferred: bool | None = None,
    check_combined_tensors: bool | None = None,
    overflow_patience: int = 100,
) -> Any:
    """Prepare models and optimizers for mixed precision and return them as they were passed, single or in lists.

    `opt_level` sets all properties (see docs/amp.md); each argument that is not None overrides one of them. If
    `optimizers` is None, only the models are returned.

    - `cast_model_type`, `keep_batchnorm_fp32`, `master_weights`: see O2, O3 and O5.
    - `patch_torch_functions`, `patch_torch_functions_type`: see O1 and O4.
    - `loss_scale`: a number, or "dynamic". A dynamic scale starts at `dynamic_init_scale`. It is multiplied by
      `scale_growth_factor` after `scale_window` steps without overflow, and by `scale_backoff_factor` after an
      overflow, and stays between `min_loss_scale` and `max_loss_scale`. An error is raised after `overflow_patience`
      skipped steps in a row with the scale at its minimum (or below 1, without one).
    - `cast_model_outputs`: the dtype of the models' outputs, float32 by default if the model is cast.
    - `num_losses`: the number of losses with their own scale (`loss_id` of `scale_loss`); 0 to prepare models alone,
      if a later call brings the optimizer.
    - `combine_grad`: gradients lie in one buffer per dtype; `check_combined_tensors` checks this at every step. With
      `combine_ddp`, which implies `combine_grad`, `scale_loss` averages these buffers over all processes, each in
      `ddp_replica_count` messages, before it unscales them: no DistributedDataParallel is needed.
    - `user_cast_preferred`: functions registered by the user keep their registered cast in O1. They always do; the
      argument is accepted for scripts that pass it.
    - `verbosity`: 0 prints nothing.
    """
    check_flags(enabled=enabled)
    if not enabled:
        release(*as_lists(models, optimizers))
        _amp_state.opt_properties = Properties()
        _autocast.leave_thread()
        return as_they_came(models, optimizers)
    if not isinstance(opt_level, str) or opt_level not in opt_levels:
        raise RuntimeError(
            f"unexpected optimization level {opt_level!r}; options are {', '.join(sorted(map(repr, opt_levels)))} "
            "(the letter O, not the number zero)"
        )
    check_type("cast_model_outputs", cast_model_outputs)
    check_count("num_losses", num_losses, least=0)
    check_count("ddp_replica_count", ddp_replica_count)
    check_count("overflow_patience", overflow_patience)
    if not isinstance(verbosity, int):
        raise TypeError(f"verbosity must be an integer, not {verbosity!r}")
    check_flags(
        combine_grad=combine_grad,
        combine_ddp=combine_ddp,
        user_cast_preferred=user_cast_preferred,
        check_combined_tensors=check_combined_tensors,
    )
    scaling: dict[str, Any] = {
        "init_scale": dynamic_init_scale,
        "scale_factor": scale_growth_factor,
        "scale_window": scale_window,
        "min_loss_scale": min_loss_scale,
        "max_loss_scale": max_loss_scale,
        "backoff_factor": scale_backoff_factor,
    }
    check_scaling(**scaling, names=_NAMES)
    verbosity_before = _amp_state.verbosity
    _amp_state.verbosity = int(verbosity)
    try:
        properties = _chosen_properties(
            opt_level,
            {
                "cast_model_type": cast_model_type,
                "patch_torch_functions": patch_torch_functions,
                "patch_torch_functions_type": patch_torch_functions_type,
                "keep_batchnorm_fp32": keep_batchnorm_fp32,
                "master_weights": master_weights,
                "loss_scale": loss_scale,
            },
        )
        scalers = [LossScaler(properties.loss_scale, **scaling) for _ in range(num_losses)]
        params = (param for model in as_lists(models, None)[0] for param in model.parameters())
        # A scale on the meta device would lose its value.
        device = next((param.device for param in params if not param.is_meta), None)
        if device is not None:
            for scaler in scalers:
                scaler.to(device)
        combine = {"check": bool(check_combined_tensors), "ddp_parts": ddp_replica_count if combine_ddp else None}
        combines = combine_grad or check_combined_tensors or combine_ddp
        result = initialize_models_and_optimizers(
            models, optimizers, properties, cast_model_outputs, combine if combines else None
        )
    except BaseException:
        _amp_state.verbosity = verbosity_before
        raise
    _amp_state.opt_properties = properties
    _amp_state.min_loss_scale = min_loss_scale
    _amp_state.max_loss_scale = max_loss_scale
    _amp_state.overflow_patience = overflow_patience
    _amp_state.loss_scalers = scalers
    return result


def _chosen_properties(opt_level: str, overrides: dict[str, Any]) -> Properties:
    level = opt_levels[opt_level]
    properties = level(Properties())
    maybe_print(f"Selected optimization level {level.brief}", True)
    maybe_print("Defaults for this optimization level are:", True)
    _print_options(properties)
    maybe_print("Processing user overrides (additional kwargs that are not None)...", True)
    for name, value in overrides.items():
        if value is not None:
            setattr(properties, name, value)
    maybe_print("After processing overrides, optimization options are:", True)
    _print_options(properties)
    return properties


def _print_options(properties: Properties) -> None:
    for name, value in properties.options.items():
        maybe_print(f"{name:22} : {value}", True)


@checked
def trace_overflow(model: torch.nn.Module, *, after_skips: Count | None = None) -> OverflowTrace:
    """Make messages about skipped steps name the module whose numbers were the first that are not finite.

    This is the first leaf module of `model`, in the order of execution, whose output is not finite or, if all outputs
    are, the first in the backward pass whose output has such a gradient. The message has the largest magnitudes of the
    module's inputs. Nothing waits for the device, and captured steps are traced too. Call it after `initialize`, with a
    dynamic loss scale. Compiled models do not call their modules and cannot be traced.

    Every step is traced until `remove()` of the result is called; with `after_skips`, only one step each time so many
    steps in a row were skipped. `save(path)` of the result writes the last step's magnitudes for `apex compare`.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError("amp.trace_overflow was called before amp.initialize; initialize first, then trace")
    if not any(scaler.dynamic for scaler in _amp_state.loss_scalers):
        raise RuntimeError(
            "amp.trace_overflow needs a dynamic loss scale, because no other skips steps; this session has "
            f"loss_scale={_amp_state.opt_properties.loss_scale}: call amp.initialize with loss_scale='dynamic'"
        )
    return _overflow_messages.trace(model, after_skips)


# The largest step count that its dtype, int32, can hold.
_LARGEST_COUNT = 2**31 - 1


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return every loss scaler's scale and number of steps since it changed: `loss_scaler0`, `loss_scaler1`, ..."""
    result: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_amp_state.loss_scalers):
        result[f"loss_scaler{index}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Load a result of `state_dict`; change nothing if it does not fit.

    A scale saved under another opt level is ignored, with a warning, if it would do harm: a static scale stays as set
    by `initialize`, and a dynamic scale does not start from 1, the scale of levels without loss scaling.
    """
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError("amp.load_state_dict was called before amp.initialize; initialize first, then load")
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"amp.load_state_dict takes what amp.state_dict() returned, not {type(state_dict).__name__}")
    names = [name for name in state_dict if str(name).startswith("loss_scaler")]
    unexpected = [name for name in state_dict if name not in names]
    if unexpected:
        raise RuntimeError(f"error in loading amp's state_dict: unexpected key(s) {', '.join(map(repr, unexpected))}")
    if len(names) != len(_amp_state.loss_scalers):
        raise RuntimeError(
            f"the state_dict has {len(names)} loss scaler(s), this session {len(_amp_state.loss_scalers)}: call "
            f"amp.initialize with num_losses={len(names)} to load it"
        )
    scalers = {f"loss_scaler{index}": scaler for index, scaler in enumerate(_amp_state.loss_scalers)}
    saved = {name: _checked_entry(name, state_dict[name], list(scalers)) for name in names}
    for name, (scale, count) in saved.items():
        scalers[name]._loss_scale = _chosen_scale(name, scale, scalers[name])
        # A count beyond the window, from a static scale or a longer window, would prevent the scale from ever growing.
        beyond = scalers[name].dynamic and count >= scalers[name]._scale_seq_len
        scalers[name]._unskipped = 0 if beyond else min(count, _LARGEST_COUNT)


def _checked_entry(name: str, entry: Any, known: list[str]) -> tuple[float, int]:
    """Return scale and step count of one entry; raise an error if no scaler could have saved it."""
    if name not in known or not isinstance(entry, Mapping) or set(entry) != {"loss_scale", "unskipped"}:
        raise RuntimeError(
            f"error in loading amp's state_dict: {name!r} holds {entry!r}; expected are 'loss_scale' and 'unskipped' "
            f"for each of {', '.join(known)}"
        )
    scale = checked_scale(f"loss_scale of {name!r}", entry["loss_scale"])
    count = checked_number(f"unskipped of {name!r}", entry["unskipped"], 0, math.inf, "an integer of at least 0")
    if not count.is_integer():
        raise TypeError(f"unskipped of {name!r} must be an integer of at least 0, not {entry['unskipped']!r}")
    return scale, int(count)


def _chosen_scale(name: str, saved: float, scaler: LossScaler) -> float:
    present = scaler.loss_scale()
    if not scaler.dynamic and saved != present:
        warnings.warn(
            f"{name!r} was saved with loss scale {saved}, but this session has a static scale, which stays {present}; "
            f"for the saved one call amp.initialize with loss_scale={saved}",
            stacklevel=3,
        )
        return present
    if scaler.dynamic and saved == 1.0 and present > 1.0:
        warnings.warn(
            f"{name!r} was saved with loss scale 1.0, as by a run without loss scaling; from there gradients in "
            f"float16 would be lost for thousands of steps, so the dynamic scale stays {present}",
            stacklevel=3,
        )
        return present
    return saved
