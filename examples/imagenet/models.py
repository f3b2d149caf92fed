"""ResNets (He et al., 2015), with the stride of a bottleneck on its 3x3 convolution."""

from __future__ import annotations

from torch import Tensor, nn


def _conv_norm(before: int, after: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return [conv, nn.BatchNorm2d(after)]


class Residual(nn.Module):
    """Two or, in a bottleneck, three convolutions beside a path that changes as little as possible."""

    def __init__(self, before: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        after = 4 * width if bottleneck else width
        if bottleneck:
            layers = [*_conv_norm(before, width, 1), nn.ReLU(), *_conv_norm(width, width, 3, stride)]
        else:
            layers = _conv_norm(before, width, 3, stride)
        self.body = nn.Sequential(*layers, nn.ReLU(), *_conv_norm(width, after, 1 if bottleneck else 3))
        nn.init.zeros_(self.body[-1].weight)  # every block begins as the identity
        straight = stride == 1 and before == after
        self.shortcut = nn.Identity() if straight else nn.Sequential(*_conv_norm(before, after, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """Pictures (B, 3, H, W) to logits (B, classes)."""

    def __init__(self, depths: tuple[int, ...], width: int, bottleneck: bool, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_conv_norm(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Residual(channels, width << stage, stride, bottleneck))
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


def make_model(name: str, classes: int) -> ResNet:
    """One of ARCHITECTURES."""
    return ResNet(classes=classes, **ARCHITECTURES[name])
