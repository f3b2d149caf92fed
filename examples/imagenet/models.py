"""ResNets (He et al., 2015), with the stride of a bottleneck on its 3x3 convolution."""

from __future__ import annotations

from torch import Tensor, nn

from apex.contrib.groupbn import BatchNorm2d_NHWC


class ConvNorm(nn.Module):
    """A convolution and its batch norm, plus what is to be added, then ReLU; `fused`: all but the first in one pass."""

    def __init__(
        self, before: int, after: int, kernel: int, stride: int = 1, *, relu: bool = True, fused: bool
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        self.fused, self.relu = fused, relu
        self.norm = BatchNorm2d_NHWC(after, relu, torch_channels_last=True) if fused else nn.BatchNorm2d(after)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        if self.fused:
            return self.norm(self.conv(x), z)
        y = self.norm(self.conv(x))
        y = y if z is None else y + z
        return y.relu() if self.relu else y


class Residual(nn.Module):
    """Two or, in a bottleneck, three convolutions beside a path that changes as little as possible."""

    def __init__(self, before: int, width: int, stride: int, bottleneck: bool, fused: bool) -> None:
        super().__init__()
        after = 4 * width if bottleneck else width
        if bottleneck:
            layers = [ConvNorm(before, width, 1, fused=fused), ConvNorm(width, width, 3, stride, fused=fused)]
        else:
            layers = [ConvNorm(before, width, 3, stride, fused=fused)]
        self.body = nn.Sequential(*layers)
        self.last = ConvNorm(width, after, 1 if bottleneck else 3, fused=fused)
        nn.init.zeros_(self.last.norm.weight)  # every block begins as the identity
        straight = stride == 1 and before == after
        self.shortcut = nn.Identity() if straight else ConvNorm(before, after, 1, stride, relu=False, fused=fused)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x), self.shortcut(x))


class ResNet(nn.Module):
    """Pictures (B, 3, H, W) to logits (B, classes)."""

    def __init__(self, depths: tuple[int, ...], width: int, bottleneck: bool, classes: int, fused: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, width, 7, 2, fused=fused), nn.MaxPool2d(3, 2, 1))
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Residual(channels, width << stage, stride, bottleneck, fused))
                channels = (width << stage) * (4 if bottleneck else 1)
        self.blocks = nn.Sequential(*blocks)
        self.logits = nn.Linear(channels, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.logits(self.blocks(self.stem(pictures)).mean((2, 3)))


ARCHITECTURES = {
    "resnet18": {"depths": (2, 2, 2, 2), "width": 64, "bottleneck": False},
    "resnet50": {"depths": (3, 4, 6, 3), "width": 64, "bottleneck": True},
    "tiny": {"depths": (1, 1), "width": 4, "bottleneck": False},  # for trying the script out
}


def make_model(name: str, classes: int, fused: bool = False) -> ResNet:
    """One of ARCHITECTURES; `fused` norms want pictures in channels-last format."""
    return ResNet(classes=classes, fused=fused, **ARCHITECTURES[name])
