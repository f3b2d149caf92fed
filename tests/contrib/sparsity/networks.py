"""Networks of every kind that a permutation must not change, small enough to be searched in a moment.

Each has `example()`, the inputs, and what is expected of a permutation: of how many parameters the input channels
(`columns`) and the output channels (`rows`) are permuted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from apex.normalization import FusedLayerNorm

IMAGE = (2, 16, 6, 6)


class Network(nn.Module):
    shape: tuple[int, ...] = IMAGE
    columns: int
    rows: int
    without_examples: tuple[int, int] | None = None  # where less is known without them

    def example(self) -> tuple[Tensor, ...]:
        return (torch.randn(self.shape, dtype=torch.float64),)


class Convolutions(Network):
    columns, rows = 3, 6  # all but the first convolution; weights and biases of all but the last

    def __init__(self, norm: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for index, (inside, outside) in enumerate(((16, 32), (32, 16), (16, 32), (32, 16))):
            self.layers.append(nn.Conv2d(inside, outside, 3, padding=1))
            if norm is not None and index < 3:
                made = norm(outside, affine=True) if norm is nn.InstanceNorm2d else norm(outside)
                self.layers.append(made)
            self.layers.append(nn.ReLU())
        if norm is not None:
            self.rows += 6

    def forward(self, input: Tensor) -> Tensor:  # under a name other than x, with an output behind a ReLU
        return self.layers(input)


class Convolutions1d(Network):
    shape, columns, rows = (2, 16, 9), 1, 2

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(16, 32, 3), nn.Conv1d(32, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.gelu(self.first(x)))


class Convolutions3d(Convolutions1d):
    shape, columns, rows = (1, 16, 3, 4, 4), 1, 4

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(16, 32, 1), nn.Sequential(nn.BatchNorm3d(32), nn.Conv3d(32, 16, 3))


class Grouped(Network):
    """32 channels in two groups of 16: they are permuted within groups."""

    columns, rows = 2, 2  # after the grouped one, whose rows stay, the last has none

    def __init__(self, groups: int = 2, sibling: int | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 32, 1)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=groups)
        self.sibling = None if sibling is None else nn.Conv2d(32, 32, 1, groups=sibling)
        self.last = nn.Conv2d(32, 16, 1)
        self.columns = 1 + (sibling is not None)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = self.grouped(x)
        return self.last(torch.relu(y if self.sibling is None else y + self.sibling(x)))


class Forks(Network):
    """Two branches that join, and one that joins them with their common input."""

    columns, rows = 4, 8

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 1)
        self.after, self.last = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        joined = self.left(stem).relu() + self.right(stem)
        return self.last(functional.relu(self.after(joined) + stem))


class FrozenSibling(Network):
    """A network whose `first` layer also feeds an unknown operation."""

    columns, rows = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.norm = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1), nn.GroupNorm(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.one(x) + self.norm(x)[:, :16]


class FrozenCoparent(Network):
    """A network that adds its input to the channels of `first`."""

    shape, columns, rows = (2, 32, 5, 5), 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 16, 1)

    def forward(self, input: Tensor) -> Tensor:
        return self.last(self.first(input) + input)


class Depthwise(Network):
    columns, rows = 2, 6

    def __init__(self) -> None:
        super().__init__()
        self.first, self.depthwise = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.sibling, self.last = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.hardswish(self.first(x))
        return self.last(self.depthwise(x) + self.sibling(x))


class Attributes(Network):
    columns, rows = 1, 4

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.scale, self.shift = nn.Parameter(torch.randn(32, 1, 1)), nn.Parameter(torch.randn(1, 32, 6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.scale + self.shift)


class SquareAttribute(Network):
    """A matrix attribute that the graph multiplies with; its channels are not followed."""

    shape, columns, rows = (3, 16), 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)
        self.square, self.bias = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.matmul(self.first(x), self.square) + self.bias)


class Attention(Network):
    shape, columns, rows = (2, 5, 16), 2, 4

    def __init__(self, cross: bool = False) -> None:
        super().__init__()
        self.before, self.other = nn.Linear(16, 32), nn.Linear(16, 32)
        self.attention, self.last = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 16)
        self.cross = cross
        self.rows = 6 if cross else 4

    def forward(self, x: Tensor) -> Tensor:
        query = self.before(x)
        memory = self.other(x) if self.cross else query
        return self.last(self.attention(query, memory, memory, need_weights=False)[0])


class Concatenations(Network):
    """Channels concatenated once and again; with `whole` also the input's channels, which stay in order."""

    columns, rows = 2, 8

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.whole = nn.Conv2d(16, 32, 1), nn.Conv2d(16, 16, 1), whole
        self.norm, self.next = nn.BatchNorm2d(48), nn.Conv2d(48, 32, 1)
        self.last = nn.Conv2d(96 if whole else 80, 16, 1)
        if whole:
            self.without_examples = (0, 0)  # nobody knows how many channels the input has

    def forward(self, x: Tensor) -> Tensor:
        both = self.norm(torch.cat([self.one(x), self.two(x)], dim=1))
        parts = (both, self.next(both), x) if self.whole else (both, self.next(both))
        return self.last(torch.cat(parts, 1).relu())


class ConcatenatedRows(Network):
    """Concatenation along the batch: both parts have their channels in the same order."""

    columns, rows = 1, 4

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(16, 32, 1), nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.one(x), self.two(x)], dim=0))


class Flattened(Network):
    """A mean over the image keeps channels separate; flattening an image of several pixels does not."""

    columns, rows = 2, 4

    def __init__(self, side: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3)
        self.pool, self.last = nn.AdaptiveAvgPool2d(side), nn.Linear(32 * side * side, 16)
        if side > 1:
            self.columns, self.rows = 1, 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.second(self.first(x).relu()).relu())
        return self.last(x.view(x.size(0), -1))


class Shared(Network):
    """A layer that is used twice, so its input and output channels have the same order."""

    shape, columns, rows = (3, 16), 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.twice(self.twice(self.first(x).tanh()).tanh()))


class Reordered(Network):
    """Views, chunks and rolls of channels; unknown operations keep their order."""

    shape, columns, rows = (3, 16), 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(32, 32)
        self.third, self.last = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.first(x).chunk(2, dim=-1)
        x = self.second(one * two.sigmoid()).roll(1, -1)
        return self.last(self.third(x).view(3, 4, 8).flatten(1))


class Tied(Network):
    """Two layers with one weight, one of them a subclass, and norms between them."""

    shape, columns, rows = (3, 16), 2, 7

    class Subclass(nn.Linear):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 32), self.Subclass(32, 32)
        self.two.weight = self.one.weight
        self.norm, self.last = nn.LayerNorm(32), self.Subclass(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(self.norm(self.one(self.first(x)))).relu())


class Unknown(Network):
    """Layers and functions that are not followed: they and their neighbours stay, the others are permuted."""

    columns, rows = 1, 2

    def __init__(self) -> None:
        super().__init__()
        self.transposed, self.expanding = nn.ConvTranspose2d(32, 32, 2, 2), nn.Conv2d(32, 64, 3, groups=32)
        self.weight = nn.Parameter(torch.randn(32, 64, 1, 1))
        self.first, self.second, self.last = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 1), nn.Conv2d(32, 16, 1)
        self.pool = nn.MaxPool2d(2, return_indices=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.expanding(self.transposed(self.first(x)))
        x, _ = self.pool(functional.conv2d(x, self.weight))
        return self.last(self.second(x).relu())


class ResNet(Network):
    """Bottlenecks as in ResNet-50, with a projection and strides."""

    shape = (2, 3, 16, 16)
    columns, rows = 12, 36

    class Bottleneck(nn.Module):
        def __init__(self, inside: int, width: int, stride: int = 1) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
            self.bn2, self.bn3 = nn.BatchNorm2d(width), nn.BatchNorm2d(4 * width)
            self.conv3, self.relu = nn.Conv2d(width, 4 * width, 1, bias=False), nn.ReLU(inplace=True)
            self.downsample = None
            if stride > 1 or inside != 4 * width:
                down = nn.Conv2d(inside, 4 * width, 1, stride, bias=False)
                self.downsample = nn.Sequential(down, nn.BatchNorm2d(4 * width))

        def forward(self, x: Tensor) -> Tensor:
            identity = x if self.downsample is None else self.downsample(x)
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
            out += identity
            return self.relu(out)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.layers = nn.Sequential(self.Bottleneck(16, 8), self.Bottleneck(32, 8), self.Bottleneck(32, 16, 2))
        self.pool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.layers(self.stem(x))), 1))


class MobileNet(Network):
    """Inverted residuals with depthwise convolutions and squeeze-and-excitation."""

    shape = (2, 3, 16, 16)

    class Block(nn.Module):
        def __init__(self, width: int, inner: int) -> None:
            super().__init__()
            self.expand = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish())
            depthwise = nn.Conv2d(inner, inner, 3, 1, 1, groups=inner, bias=False)
            self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(inner), nn.ReLU6())
            self.squeeze, self.excite = nn.Conv2d(inner, 16, 1), nn.Conv2d(16, inner, 1)
            self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

        def forward(self, x: Tensor) -> Tensor:
            y = self.depthwise(self.expand(x))
            scale = self.excite(functional.relu(self.squeeze(functional.adaptive_avg_pool2d(y, 1))))
            return x + self.project(functional.hardsigmoid(scale) * y)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.blocks = nn.Sequential(self.Block(16, 32), self.Block(16, 48))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 16))
        self.columns, self.rows = 9, 29

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean([2, 3]))


class Transformer(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = [each(y).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)]
        attended = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class VisionTransformer(Network):
    shape = (2, 3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 32)), nn.Parameter(torch.randn(1, 5, 32))
        self.blocks = nn.Sequential(Transformer(32, nn.LayerNorm), Transformer(32, FusedLayerNorm))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 16)
        self.columns, self.rows = 11, 26
        self.without_examples = (2, 4)  # nobody knows how many dimensions the result of attention has

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class Bert(Network):
    """Embeddings that the last layer shares, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(48, 32), nn.Embedding(8, 32)
        self.norm = nn.LayerNorm(32)
        self.blocks = nn.Sequential(Transformer(32, nn.LayerNorm), Transformer(32, nn.LayerNorm))
        self.head = nn.Linear(32, 48)
        self.head.weight = self.words.weight
        self.columns, self.rows = 11, 23

    def example(self) -> tuple[Tensor, ...]:
        return torch.randint(48, (2, 8)), torch.arange(8)

    def forward(self, words: Tensor, places: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(self.words(words) + self.places(places))
        if mask is not None:
            x = x * mask
        return self.head(self.blocks(x))


NETWORKS = {
    "convolutions": Convolutions,
    "batch norm": lambda: Convolutions(nn.BatchNorm2d),
    "sync batch norm": lambda: Convolutions(nn.SyncBatchNorm),
    "instance norm": lambda: Convolutions(nn.InstanceNorm2d),
    "1-d": Convolutions1d,
    "3-d": Convolutions3d,
    "grouped": Grouped,
    "grouped siblings": lambda: Grouped(2, 1),
    "siblings of different groups": lambda: Grouped(2, 4),
    "forks": Forks,
    "frozen sibling": FrozenSibling,
    "frozen coparent": FrozenCoparent,
    "depthwise": Depthwise,
    "attributes": Attributes,
    "square attribute": SquareAttribute,
    "attention": Attention,
    "cross attention": lambda: Attention(cross=True),
    "concatenations": Concatenations,
    "concatenated input": lambda: Concatenations(whole=True),
    "concatenated rows": ConcatenatedRows,
    "flattened": Flattened,
    "flattened image": lambda: Flattened(2),
    "shared": Shared,
    "reordered": Reordered,
    "tied": Tied,
    "unknown": Unknown,
    "ResNet": ResNet,
    "MobileNet": MobileNet,
    "ViT": VisionTransformer,
    "BERT": Bert,
}
