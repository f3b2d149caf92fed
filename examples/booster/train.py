"""A small residual network learns to tell shapes apart, in every precision of the Booster, on any number of processes.

apex run --nproc-per-node 1 train.py
apex run --nproc-per-node 2 train.py --mixed-precision fp16 bf16 --plugin zero
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import apex
from apex.booster import Booster
from apex.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from apex.logging import get_dist_logger
from apex.mixed_precision import mixed_precision_factory
from apex.nn.lr_scheduler import LinearWarmupLR

CLASSES = 4
WARMUP_EPOCHS = 50


class Block(nn.Module):
    """Two convolutions with a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.around: nn.Module = nn.Identity()
        if before != after or stride != 1:
            self.around = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x) + self.around(x))


def residual_network(width: int) -> nn.Module:
    """ResNet-18 with fewer channels and a smaller first layer."""
    widths = [width, width, 2 * width, 4 * width, 8 * width]
    blocks = [
        block
        for stage, (before, after) in enumerate(itertools.pairwise(widths))
        for block in (Block(before, after, 1 if stage == 0 else 2), Block(after, after, 1))
    ]
    first = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, CLASSES))


def images(count: int, side: int, seed: int) -> TensorDataset:
    """Noise with a bright bar, whose place and direction are the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    pictures = torch.randn(count, 3, side, side, generator=generator)
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        first = side // 4 if label % 2 else side // 2
        bar = picture[:, first : first + 3] if label < 2 else picture[:, :, first : first + 3]
        bar += 2.0
    return TensorDataset(pictures, labels)


def train(precision: str, plugin_name: str, epochs: int, loader: DataLoader, width: int) -> float:
    """Trains a new model; the mean loss of the last epoch in this process."""
    torch.manual_seed(0)
    model = residual_network(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    lr_scheduler = LinearWarmupLR(optimizer, epochs, WARMUP_EPOCHS)

    if plugin_name == "zero":
        booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision=mixed_precision_factory(precision)))
    else:
        booster = Booster(
            mixed_precision=precision, plugin=TorchDDPPlugin() if plugin_name == "ddp" else TorchFSDPPlugin()
        )
    model, optimizer, criterion, loader, lr_scheduler = booster.boost(model, optimizer, criterion, loader, lr_scheduler)

    losses: list[float] = []
    for epoch in range(epochs):
        losses = []
        for pictures, labels in loader:
            optimizer.zero_grad()
            outputs = model(pictures.to(booster.device))
            loss = criterion(outputs, labels.to(booster.device))
            booster.backward(loss, optimizer)
            optimizer.step()
            losses.append(loss.item())
        lr_scheduler.step()
        mean = sum(losses) / len(losses)
        get_dist_logger().info(f"{precision}: epoch {epoch + 1} of {epochs}, loss {mean:.4f}", ranks=[0])
    apex.amp.shutdown()
    return mean


def main() -> None:
    parser = apex.get_default_parser()
    names = ["fp16", "fp16_apex", "bf16", "fp8", "fp16_naive"]
    parser.add_argument("--mixed-precision", nargs="+", choices=names, default=["fp16"], help="one or several")
    parser.add_argument("--plugin", choices=["ddp", "zero", "fsdp"], default="ddp")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="samples in a step of all processes")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layers")
    parser.add_argument("--side", type=int, default=16, help="rows and columns of an image")
    arguments = parser.parse_args()

    apex.launch_from_torch(backend=arguments.backend)
    processes = torch.distributed.get_world_size()
    plugin = TorchDDPPlugin()
    loader = plugin.prepare_dataloader(
        images(arguments.samples, arguments.side, seed=0), arguments.batch // processes, shuffle=True, drop_last=True
    )
    for precision in arguments.mixed_precision:
        train(precision, arguments.plugin, arguments.epochs, loader, arguments.width)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
