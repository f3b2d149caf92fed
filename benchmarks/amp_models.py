"""The networks that `benchmarks/amp.py` trains, and their data: ResNet-50 and GPT-2 in shape, and those of the demo."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Images per batch. Few of them keep the host busier than the GPU; many hide what the host does.
IMAGES = {"resnet50": 128, "resnet50-256": 256, "resnet50-32": 32}
MODELS = (*IMAGES, "gpt2", "demo-gpt", "demo-conv", "layers")
# The small networks of `apex demo`, at the size that it has on this device.
_DEMO = {"demo-gpt": "gpt", "demo-conv": "conv"}


class NormReLU(nn.BatchNorm2d):
    """Batch norm, then what is to be added, then ReLU: one operator each, in place where that is possible."""

    def __init__(self, channels: int, fuse_relu: bool) -> None:
        super().__init__(channels)
        self.relu = fuse_relu

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        if z is not None:
            y += z
        return F.relu(y, inplace=True) if self.relu else y


def fused_norm(channels: int, fuse_relu: bool) -> nn.Module:
    """The same in one operator."""
    from apex.contrib.groupbn import BatchNorm2d_NHWC

    return BatchNorm2d_NHWC(channels, fuse_relu, torch_channels_last=True)


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, norm: Callable[[int, bool], nn.Module], inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolution1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), norm(width, True)
        self.convolution2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width, True)
        self.convolution3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), norm(4 * width, True)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), norm(4 * width, False))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.convolution1(x))
        y = self.norm2(self.convolution2(y))
        return self.norm3(self.convolution3(y), self.shortcut(x))


def resnet50(norm: Callable[[int, bool], nn.Module] = NormReLU, first: int = 64) -> nn.Module:
    """A network of ResNet-50's shape; `norm` makes a batch norm, with ReLU or without, for so many channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, first, 7, 2, 3, bias=False), norm(first, True), nn.MaxPool2d(3, 2, 1)]
    inputs = first
    for width, count in ((first, 3), (2 * first, 4), (4 * first, 6), (8 * first, 3)):
        for index in range(count):
            layers.append(Bottleneck(norm, inputs, width, 2 if index == 0 and width > first else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model of GPT-2 small's shape."""

    def __init__(self, vocabulary: int = 50304, length: int = 1024, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


Loss = Callable[[Tensor, Tensor], Tensor]


def problem(
    name: str, device: str, small: bool, *, fused_norms: bool = False, half_outputs: bool = False
) -> tuple[nn.Module, Tensor, Tensor, Loss]:
    """Model, inputs, targets and loss."""
    torch.manual_seed(0)
    if name == "layers":  # 300 tensors
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(150))).to(device), *_pair(device), F.mse_loss
    if name in _DEMO:
        from apex._cli.demo.tasks import loss_of, make_task

        task = make_task(_DEMO[name], 1, torch.device(device))
        return task.new_model(), *task.batches[0], loss_of
    if name in IMAGES:
        batch, size = (2, 64) if small else (IMAGES[name], 224)
        model = resnet50(fused_norm if fused_norms else NormReLU).to(device, memory_format=torch.channels_last)
        images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
        return model, images, torch.randint(1000, (batch,), device=device), F.cross_entropy
    batch, length = (1, 32) if small else (8, 1024)
    model = GPT(512, 32, 64, 2) if small else GPT()
    tokens = torch.randint(512, (batch, length), device=device)
    return model.to(device), tokens, tokens.roll(-1, 1), half_token_loss if half_outputs else token_loss


def _pair(device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 8, 64, device=device).unbind()  # type: ignore[return-value]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """As scripts have it; autocast computes it in float32, for which it casts the logits."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def half_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The same numbers without logits in float32: the pass that reads them casts."""
    return F.nll_loss(F.log_softmax(logits.flatten(0, 1), -1, dtype=torch.float32), targets.flatten())
