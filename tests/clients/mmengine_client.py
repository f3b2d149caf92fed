"""mmengine: the Runner with ApexOptimWrapper.

Its checkpoints hold objects of its own, which PyTorch 2.6 and later load only when they are told to.
"""

import copy
import os
import tempfile
from pathlib import Path

import torch
from checks import falls, run
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from apex import amp


class Model(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(inputs), targets)}


class Losses(Hook):
    def __init__(self) -> None:
        self.values: list[float] = []

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: object = None, outputs: object = None
    ) -> None:
        self.values.append(outputs["loss"].item())


def runner(folder: str, level: str, epochs: int, losses: Losses, **settings: object) -> Runner:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = [(row, row[:2] * 2) for row in inputs]
    return Runner(
        Model(), folder, DataLoader(data, batch_size=16), custom_hooks=[losses], log_level="ERROR",
        optim_wrapper={
            "type": "ApexOptimWrapper", "opt_level": level, "verbosity": 0, "accumulative_counts": 1,
            "clip_grad": {"max_norm": 10.0}, "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9},
        },
        train_cfg={"by_epoch": True, "max_epochs": epochs},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1}}, **settings,
    )  # fmt: skip


os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"


def check_runner() -> str:
    """`Runner` with `ApexOptimWrapper` and clipping at O1, and resumed from its own checkpoint"""
    with tempfile.TemporaryDirectory() as folder:
        whole, first, second = Losses(), Losses(), Losses()
        for losses, epochs, settings in ((whole, 12, {}), (first, 6, {}), (second, 12, {"resume": True})):
            torch.manual_seed(0)
            place = f"{folder}/{'whole' if losses is whole else 'parts'}"
            Path(place).mkdir(exist_ok=True)
            trainer = runner(place, "O1", epochs, copy.copy(losses), **settings)
            losses.values = next(hook for hook in trainer.hooks if isinstance(hook, Losses)).values
            trainer.train()
            amp.shutdown()
        assert first.values + second.values == whole.values
    return f"{falls(whole.values, 'iterations')}; resumed losses equal, bit for bit"


run(__name__, "mmengine")
