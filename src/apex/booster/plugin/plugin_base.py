"""Base classes of plugins."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from ..._distributed.comparison import check_same_everywhere, check_settings
from ..._distributed.experts import refuse_experts
from ...logging import get_dist_logger
from ..checkpoint_io import CheckpointIO
from ..mixed_precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16NaiveMixedPrecision,
    FP32Precision,
    MixedPrecision,
    mixed_precision_factory,
)
from ..wrappers import OptimizerWrapper

__all__ = ["Boosted", "DPPluginBase", "PipelinePluginBase", "Plugin", "own_precision"]

Boosted = tuple[Any, Any, Any, Any, Any]


class Plugin(ABC):
    """A way to train, for example in several processes: `configure` prepares models and optimizers for it.

    If `takes_precision` is True, `configure` gets the precision as a sixth argument. Otherwise the Booster configures
    the precision after the plugin.
    """

    takes_precision = False
    # Whether models may have parameters that a LazyInitContext recorded; if not, boost computes them before.
    takes_lazy = False

    def supported_devices(self) -> list[str]:
        """Return the supported device types; an empty list means all."""
        return []

    def supported_precisions(self) -> list[str]:
        """Return the names of supported precisions."""
        return ["fp16", "fp16_apex", "bf16", "fp8", "fp16_naive"]

    def control_precision(self) -> bool:
        """Return whether the plugin has its own precision, which overrides the Booster's."""
        return False

    def control_device(self) -> bool:
        """Return whether the plugin decides on the device of models."""
        return False

    def support_no_sync(self) -> bool:
        """Return whether gradients can be accumulated before they are exchanged."""
        return False

    def support_lora(self) -> bool:
        """Return whether models may have LoRA adapters."""
        return False

    @abstractmethod
    def configure(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Return the five arguments, ready for training."""

    def control_checkpoint_io(self) -> bool:
        """Return whether the plugin saves and loads with its own `get_checkpoint_io()`."""
        return False

    def get_checkpoint_io(self) -> Any:
        """Return an object with the methods of `apex.booster.checkpoint_io.CheckpointIO`."""
        return CheckpointIO()

    @contextlib.contextmanager
    def no_sync(self, model: Any = None, optimizer: Any = None) -> Iterator[None]:
        """Accumulate the gradients of backward passes in the block without exchanging them."""
        raise NotImplementedError(f"{type(self).__name__} has no no_sync")
        yield

    def enable_lora(self, model: nn.Module, pretrained_dir: str | None = None, lora_config: Any = None) -> nn.Module:
        """Return a model with LoRA adapters: new ones, or loaded from `pretrained_dir`. Needs the package peft."""
        try:
            import peft
        except ImportError as error:
            raise ImportError("LoRA needs the package peft: pip install peft") from error
        if pretrained_dir is not None:
            return peft.PeftModel.from_pretrained(model, pretrained_dir, is_trainable=True)
        if lora_config is None:
            raise ValueError("enable_lora needs lora_config, a peft.LoraConfig, or pretrained_dir")
        return peft.get_peft_model(model, lora_config)


class DPPluginBase(Plugin):
    """A plugin whose processes have the same model and different data."""

    takes_precision = True
    # Whether models may have experts: parameters with `allreduce = False`, which differ between processes.
    takes_experts = False

    def __init__(self) -> None:
        connected = dist.is_available() and dist.is_initialized()
        assert connected, (
            f"{type(self).__name__} needs torch.distributed, which is not initialised: call apex.launch_from_torch() "
            "in a script that `apex run` starts"
        )
        self.logger = get_dist_logger()

    @property
    def dp_size(self) -> int:
        """The number of parts that the data is divided into."""
        return self.data_place()[0]

    def configure(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        precision: Any = None,
    ) -> Boosted:
        if not self.takes_experts:
            refuse_experts(model.parameters(), type(self).__name__, "Use HybridParallelPlugin for such models")
        self._compare(model, optimizer, precision)
        model, boosted, criterion = self._boost(model, optimizer, criterion, precision)
        if isinstance(boosted, OptimizerWrapper):
            boosted.compared_over = self.replica_groups()
        return model, boosted, criterion, dataloader, lr_scheduler

    def settings_group(self) -> Any:
        """Return the group of the processes that train together; None for the default group."""
        return None

    def replica_groups(self) -> list[Any]:
        """Return groups whose optimizers must have equal options; the first group must have equal models, too."""
        return [self.settings_group()]

    def _compare(self, model: nn.Module, optimizer: Any, precision: Any) -> None:
        """Raise in all processes, before anything is changed, if their plugins, precisions or models differ."""
        settings = {"plugin": type(self).__name__, "precision of the Booster": _settings_of(precision)}
        settings |= {"optimizer": None if optimizer is None else type(optimizer).__name__}
        if type(self).__module__.startswith("apex."):  # a user's subclass may have attributes that differ by rank
            settings |= {f"{name} of the plugin": _settings_of(value) for name, value in vars(self).items()}
        check_settings(settings, "settings", self.settings_group(), list(model.parameters()))
        check_same_everywhere(list(model.named_parameters()), "models", self.replica_groups()[0])

    def _boost(self, model: Any, optimizer: Any, criterion: Any, precision: Any) -> tuple[Any, Any, Any]:
        raise NotImplementedError

    def data_place(self) -> tuple[int, int]:
        """Return the number of parts that the data is divided into, and the index of this process's part."""
        return dist.get_world_size(), dist.get_rank()

    def prepare_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: Any = None,
        **kwargs: Any,
    ) -> DataLoader:
        """Return a DataLoader with a DistributedSampler and seeded workers; `kwargs` are passed to DataLoader.

        A `distributed_sampler_cls` of the user gets `seed` and `drop_last` only if it has these arguments.
        """
        ranks, rank = self.data_place()
        kind: Any = distributed_sampler_cls or DistributedSampler
        accepted = inspect.signature(kind).parameters.values()
        takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in accepted)
        names = {argument.name for argument in accepted}
        optional = {"seed": seed, "drop_last": drop_last}
        sampler: Any = kind(
            dataset,
            num_replicas=ranks,
            rank=rank,
            shuffle=shuffle,
            **{name: value for name, value in optional.items() if takes_all or name in names},
        )

        generator = torch.Generator().manual_seed(seed)
        options = {"worker_init_fn": functools.partial(_seed_worker, seed), "generator": generator, **kwargs}
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            pin_memory=pin_memory and torch.accelerator.is_available(),
            num_workers=num_workers,
            **options,
        )


def _settings_of(value: Any) -> Any:
    """Return a precision's settings except its verbosity, as a dict; return any other value unchanged."""
    if not isinstance(value, MixedPrecision):
        return value
    settings = {**vars(value), **vars(value).get("options", {}), "options": None}
    return {"kind": type(value).__name__} | {k: v for k, v in settings.items() if not k.startswith("verbos")}


def _seed_worker(seed: int, worker: int) -> None:
    random.seed(seed + worker)
    torch.manual_seed(seed + worker)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed((seed + worker) % 2**32)


class PipelinePluginBase(DPPluginBase):
    """A plugin whose processes may have different stages of a model."""

    @abstractmethod
    def execute_pipeline(self, data_iter: Iterator[Any], model: Any, criterion: Any, *options: Any) -> dict[str, Any]:
        """Run the microbatches of the next batch; see `Booster.execute_pipeline`."""


# Arguments of a plugin's constructor for the loss scale of "fp16".
_SCALING = (
    *("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"),
    *("max_scale", "verbose"),
)


def own_precision(plugin: str, arguments: Mapping[str, Any]) -> MixedPrecision:
    """Return the precision of a plugin that has its own, from the arguments of the plugin's constructor.

    `use_fp8` asks for float8, else `precision` is a name or a MixedPrecision. "fp16" and "bf16" mean weights of that
    dtype and float32 weights in the optimizer. The arguments of the loss scale have an effect on "fp16" only.
    """
    precision = arguments["precision"]
    scaling: dict[str, Any] = {name: arguments[name] for name in _SCALING if name in arguments}
    naive = FP16NaiveMixedPrecision(**scaling)  # raises for invalid numbers, whatever the precision is
    if arguments["use_fp8"]:
        return FP8MixedPrecision()
    if isinstance(precision, MixedPrecision):
        return precision
    known = {"fp16": naive, "fp16_naive": naive, "bf16": BF16MixedPrecision("O5"), "fp32": FP32Precision()}
    if precision in known:
        return known[precision]
    if precision not in ("fp8", "fp16_apex"):
        raise ValueError(
            f"precision={precision!r} is not known to {plugin}; use one of {', '.join(known)}, fp8, fp16_apex, or a "
            "MixedPrecision"
        )
    return mixed_precision_factory(precision)
