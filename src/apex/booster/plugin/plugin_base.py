"""What plugins have in common."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

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

__all__ = ["Boosted", "DPPluginBase", "PipelinePluginBase", "Plugin", "own_precision"]

Boosted = tuple[Any, Any, Any, Any, Any]


class Plugin(ABC):
    """A way of training: `configure` makes models and optimizers ready for it.

    A plugin whose `configure` takes a sixth argument, the precision, sets `takes_precision`; for others the Booster
    configures precision after them.
    """

    takes_precision = False

    def supported_devices(self) -> list[str]:
        """Kinds of devices; empty for all."""
        return []

    def supported_precisions(self) -> list[str]:
        """Names of precisions that the plugin takes."""
        return ["fp16", "fp16_apex", "bf16", "fp8", "fp16_naive"]

    def control_precision(self) -> bool:
        """Whether the plugin has a precision of its own, which the Booster's gives way to."""
        return False

    def control_device(self) -> bool:
        """Whether the plugin decides where models are."""
        return False

    def support_no_sync(self) -> bool:
        """Whether gradients can be added up before they are exchanged."""
        return False

    def support_lora(self) -> bool:
        """Whether models may have LoRA adapters."""
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
        """All five, ready for training."""

    def control_checkpoint_io(self) -> bool:
        """Whether the plugin saves and loads in a way of its own, `get_checkpoint_io()`."""
        return False

    def get_checkpoint_io(self) -> Any:
        """What saves and loads, with the methods of `apex.booster.checkpoint_io.CheckpointIO`."""
        return CheckpointIO()

    @contextlib.contextmanager
    def no_sync(self, model: Any = None, optimizer: Any = None) -> Iterator[None]:
        """Gradients of backward passes inside are not exchanged."""
        raise NotImplementedError(f"{type(self).__name__} has no no_sync")
        yield

    def enable_lora(self, model: nn.Module, pretrained_dir: str | None = None, lora_config: Any = None) -> nn.Module:
        """A model with adapters, new ones or those that were saved in a folder; needs the package peft."""
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
    # Whether models may have experts, parameters with `allreduce = False` that differ between processes.
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
            refuse_experts(
                model.parameters(), type(self).__name__, "Use HybridParallelPlugin with zero_stage=0 for such models"
            )
        return *self._boost(model, optimizer, criterion, precision), dataloader, lr_scheduler

    def _boost(self, model: Any, optimizer: Any, criterion: Any, precision: Any) -> tuple[Any, Any, Any]:
        raise NotImplementedError

    def data_place(self) -> tuple[int, int]:
        """The number of parts that the data is divided into, and the number of this process's part."""
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
        """A DataLoader with a DistributedSampler; workers are seeded with `seed`. Other arguments are DataLoader's."""
        ranks, rank = self.data_place()
        sampler: Any = (distributed_sampler_cls or DistributedSampler)(
            dataset, num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
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


def _seed_worker(seed: int, worker: int) -> None:
    random.seed(seed + worker)
    torch.manual_seed(seed + worker)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed((seed + worker) % 2**32)


class PipelinePluginBase(DPPluginBase):
    """A plugin whose processes may have different stages of a model."""

    @abstractmethod
    def execute_pipeline(self, data_iter: Iterator[Any], model: Any, criterion: Any, *options: Any) -> dict[str, Any]:
        """One step's passes over the microbatches of the next batch; see `Booster.execute_pipeline`."""


def own_precision(plugin: str, precision: Any, use_fp8: bool, **scaling: Any) -> MixedPrecision:
    """Return the precision of a plugin that has its own: a name, a MixedPrecision, or float8 if `use_fp8`.

    "fp16" and "bf16" mean weights in that type, and float32 ones beside the optimizer. `scaling` has the arguments of
    the loss scale, which "fp16" alone has.
    """
    naive = FP16NaiveMixedPrecision(**scaling)  # complains of wrong numbers in every precision
    if use_fp8:
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
