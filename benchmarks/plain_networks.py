"""Models as their users write them, with nothing of apex in them, and batches for `plain_models.py`.

A language model computes its loss itself if it is given labels, as those of transformers do. Rows that need
transformers say so if it is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


class Attention(nn.Module):
    """Attention of `heads` heads of `channels`, with fewer heads of keys and values, norms of both, and rotations."""

    def __init__(self, width: int, heads: int, groups: int, channels: int, normed: bool) -> None:
        super().__init__()
        self.channels, self.is_grouped = channels, groups != heads
        self.q_proj = nn.Linear(width, heads * channels, bias=False)
        self.k_proj = nn.Linear(width, groups * channels, bias=False)
        self.v_proj = nn.Linear(width, groups * channels, bias=False)
        self.o_proj = nn.Linear(heads * channels, width, bias=False)
        self.q_norm = nn.RMSNorm(channels, eps=1e-6) if normed else nn.Identity()
        self.k_norm = nn.RMSNorm(channels, eps=1e-6) if normed else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        split = (each.unflatten(-1, (-1, self.channels)) for each in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        query, key, value = split
        query, key, value = (
            each.transpose(1, 2)
            for each in (rotate(self.q_norm(query), cos, sin), rotate(self.k_norm(key), cos, sin), value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.is_grouped)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A layer of Llama or, with norms of queries and keys, of Qwen3."""

    def __init__(self, width: int, inner: int, heads: int, groups: int, channels: int, normed: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.self_attn = Attention(width, heads, groups, channels, normed)
        self.mlp = GatedMLP(width, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """A decoder of language: Llama's or Qwen3's architecture."""

    def __init__(self, layers: int, width: int, inner: int, heads: int, groups: int, channels: int, vocabulary: int,
                 normed: bool, tied: bool = True) -> None:  # fmt: skip
        super().__init__()
        self.channels = channels
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DecoderLayer(width, inner, heads, groups, channels, normed) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width, 1e-6), nn.Linear(width, vocabulary, bias=False)
        _initialize(self)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        speeds = 1e6 ** (-torch.arange(0, self.channels, 2, device=tokens.device) / self.channels)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device), speeds).repeat(1, 2)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).float().flatten(0, 1), labels.flatten())


class Block(nn.Module):
    """A transformer block of nn modules: GPT-2's if `causal`, otherwise a vision transformer's."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        approximate = "tanh" if causal else "none"
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate=approximate), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2 with its loss."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, max(1, width // 64), True) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        _initialize(self)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).float().flatten(0, 1), labels.flatten())


class ViT(nn.Module):
    """A vision transformer on patches of 16 x 16; returns logits."""

    def __init__(self, layers: int, width: int, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // 16) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64), False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Bert(nn.Module):
    """An nn.TransformerEncoder with the loss of masked words; labels are -100 elsewhere."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, vocabulary)
        _initialize(self)
        self.decoder.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.words(tokens) + self.positions.weight[: tokens.shape[1]]))
        logits = self.decoder(self.transform(self.encoder(x)))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


class ChannelsFirstNorm(nn.LayerNorm):
    """A layer norm over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, norm, two dense layers and a scale for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


def convnext(depths: tuple[int, ...], widths: tuple[int, ...]) -> nn.Module:
    stages: list[nn.Module] = []
    before = 3
    for index, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        step = 2 if index else 4
        stages += [] if index == 0 else [ChannelsFirstNorm(before)]
        stages += [nn.Conv2d(before, width, step, step)] + ([] if index else [ChannelsFirstNorm(width)])
        stages += [nn.Sequential(*(ConvNeXtBlock(width) for _ in range(depth)))]
        before = width
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(before), nn.Linear(before, 1000))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut, with the names of torchvision."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """A narrow convolution between two of single pixels, beside a shortcut, with the names of torchvision."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu, self.downsample = nn.ReLU(inplace=True), _shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def resnet(depths: tuple[int, ...], first: int, block: Any, has_stem: bool) -> nn.Module:
    kernel, stride = (7, 2) if has_stem else (3, 1)
    layers: list[nn.Module] = [nn.Conv2d(3, first, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(first)]
    layers += [nn.ReLU(inplace=True)] + ([nn.MaxPool2d(3, 2, 1)] if has_stem else [])
    inputs = first
    for index, depth in enumerate(depths):
        width, blocks = first * 2**index, []
        for number in range(depth):
            blocks.append(block(inputs, width, 2 if index and not number else 1))
            inputs = block.expansion * width
        layers.append(nn.Sequential(*blocks))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class UNetBlock(nn.Module):
    """Twice group norm, SiLU and convolution, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        groups = min(32, inputs // 4), min(32, outputs // 4)
        self.first = nn.Sequential(nn.GroupNorm(groups[0], inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.second = nn.Sequential(
            nn.GroupNorm(groups[1], outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.second(self.first(x))


class UNet(nn.Module):
    """Two blocks at every resolution on the way down, and two on the way up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths, before = (width, 2 * width, 4 * width), width
        self.first, self.last = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for each in widths:
            self.down.append(nn.Sequential(UNetBlock(before, each), UNetBlock(each, each)))
            before = each
        for each in widths[-2::-1]:
            self.up.append(nn.Sequential(UNetBlock(before + each, each), UNetBlock(each, each)))
            before = each

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.first(x), []
        for index, blocks in enumerate(self.down):
            x = blocks(F.avg_pool2d(x, 2) if index else x)
            seen.append(x)
        seen.pop()
        for blocks in self.up:
            x = blocks(torch.cat((F.interpolate(x, scale_factor=2.0, mode="nearest"), seen.pop()), 1))
        return self.last(x)


def _initialize(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def _hugging_face(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a model of transformers with a loss: `name`Config, `name`ForCausalLM and so on."""

    def make() -> nn.Module:
        import transformers

        head = {"T5": "ForConditionalGeneration", "Dinov2": "ForImageClassification"}.get(name, "ForCausalLM")
        return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**sizes))

    return make


def _tokens(count: int, length: int, vocabulary: int, masked: bool = False) -> Callable[[], Batch]:
    def draw() -> Batch:
        tokens = torch.randint(vocabulary, (count, length))
        return tokens, torch.where(torch.rand(count, length) < 0.15, tokens, -100) if masked else tokens.roll(-1, 1)

    return draw


def _completions(count: int, prompt: int, length: int, vocabulary: int) -> Callable[[], Batch]:
    """Return a function that draws completions of one prompt: tokens, mask, advantages, earlier log-probabilities.

    Tokens and the prompt have `length` and `prompt` positions; mask and log-probabilities have a number for each
    position of the completions, which end at different lengths.
    """

    def draw() -> Batch:
        tokens, rewards = torch.randint(vocabulary, (count, length)), torch.randn(count)
        tokens[:, :prompt] = tokens[0, :prompt]
        ends = torch.randint((length - prompt) // 2, length - prompt + 1, (count, 1))
        mask = (torch.arange(length - prompt) < ends).float()
        earlier = 0.1 * torch.randn(mask.shape) - math.log(vocabulary)
        return tokens, mask, (rewards - rewards.mean()) / rewards.std(), earlier

    return draw


def _images(count: int, channels: int, side: int, classes: int | None = 1000) -> Callable[[], Batch]:
    def draw() -> Batch:
        images = torch.randn(count, channels, side, side)
        return images, torch.randint(classes, (count,)) if classes else torch.randn_like(images)

    return draw


def own_loss(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return model(tokens, labels)


def labelled_loss(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=labels).loss


def policy_loss(model: Any, tokens: Tensor, mask: Tensor, advantages: Tensor, earlier: Tensor) -> Tensor:
    """Return the loss of GRPO without a reference model, averaged over the tokens of all completions."""
    count = mask.shape[1]
    logits = model(input_ids=tokens, logits_to_keep=count + 1, use_cache=False).logits[:, :-1].float()
    ratio = (logits.log_softmax(-1).gather(-1, tokens[:, -count:, None]).squeeze(-1) - earlier).exp()
    losses = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return (losses * mask).sum() / mask.sum()


def class_loss(model: Any, images: Tensor, targets: Tensor) -> Tensor:
    outputs = model(images)
    return F.cross_entropy(getattr(outputs, "logits", outputs), targets)


def image_loss(model: Any, images: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(model(images).float(), targets)


class Row(NamedTuple):
    """A model, its batch and its loss, and the model and batch at sizes for a CPU."""

    make: Callable[[], nn.Module]
    draw: Callable[[], Batch]
    loss: Callable[..., Tensor]
    tiny: Callable[[], nn.Module]
    tiny_draw: Callable[[], Batch]
    has_images: bool = False
    liger: str = ""  # the name of Liger-Kernel's function that patches this model


_QWEN = {"num_hidden_layers": 14, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
         "max_position_embeddings": 4096}  # fmt: skip
_LLAMA = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
          "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
          "max_position_embeddings": 4096}  # fmt: skip
_MIXTRAL = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16,
            "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
            "max_position_embeddings": 2048}  # fmt: skip
_TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16}  # fmt: skip
_FEW_TOKENS, _FEW_IMAGES = _tokens(2, 16, 64), _images(2, 3, 32)
_T5 = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "vocab_size": 32128,
       "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}  # fmt: skip
_DINO = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224, "num_labels": 1000}


def _tiny_hugging_face(name: str) -> Callable[[], nn.Module]:
    return _hugging_face(name, **_TINY, **({"head_dim": 16} if name == "Qwen3" else {}))


ROWS = {
    "vit_b16": Row(lambda: ViT(12, 768, 224), _images(128, 3, 224), class_loss,
                   lambda: ViT(2, 64, 32), _FEW_IMAGES, True),
    "vit_l16": Row(lambda: ViT(24, 1024, 224), _images(64, 3, 224), class_loss,
                   lambda: ViT(3, 64, 32), _FEW_IMAGES, True),
    "bert_base": Row(lambda: Bert(12, 768, 30522, 512), _tokens(32, 512, 30522, masked=True), own_loss,
                     lambda: Bert(2, 64, 64, 16), _FEW_TOKENS),
    "qwen3": Row(lambda: Decoder(14, 1024, 3072, 16, 8, 128, 151936, normed=True), _tokens(2, 4096, 151936), own_loss,
                 lambda: Decoder(2, 32, 48, 2, 1, 16, 64, normed=True), _FEW_TOKENS),
    "llama_1b": Row(lambda: Decoder(16, 2048, 8192, 32, 8, 64, 128256, normed=False), _tokens(2, 4096, 128256),
                    own_loss, lambda: Decoder(2, 32, 48, 2, 1, 16, 64, normed=False), _FEW_TOKENS),
    "convnext_t": Row(lambda: convnext((3, 3, 9, 3), (96, 192, 384, 768)), _images(96, 3, 224), class_loss,
                      lambda: convnext((1, 2), (8, 16)), _FEW_IMAGES, True),
    "resnet_basic": Row(lambda: resnet((3, 3, 3), 64, BasicBlock, False), _images(256, 3, 32), class_loss,
                        lambda: resnet((1, 1), 8, BasicBlock, False), _FEW_IMAGES, True),
    "gpt2": Row(lambda: GPT2(12, 768, 50257, 1024), _tokens(16, 1024, 50257), own_loss,
                lambda: GPT2(2, 64, 64, 16), _FEW_TOKENS),
    "resnet50": Row(lambda: resnet((3, 4, 6, 3), 64, Bottleneck, True), _images(128, 3, 224), class_loss,
                    lambda: resnet((1, 1), 8, Bottleneck, True), _FEW_IMAGES, True),
    "unet": Row(lambda: UNet(320), _images(8, 4, 64, None), image_loss,
                lambda: UNet(8), _images(2, 4, 8, None), True),
    "hf_qwen3": Row(_hugging_face("Qwen3", **_QWEN), _tokens(2, 4096, 151936), labelled_loss,
                    _tiny_hugging_face("Qwen3"), _FEW_TOKENS, liger="apply_liger_kernel_to_qwen3"),
    "grpo": Row(_hugging_face("Qwen3", **_QWEN), _completions(8, 256, 1024, 151936), policy_loss,
                _tiny_hugging_face("Qwen3"), _completions(4, 4, 16, 64)),
    "hf_llama_1b": Row(_hugging_face("Llama", **_LLAMA), _tokens(2, 4096, 128256), labelled_loss,
                       _tiny_hugging_face("Llama"), _FEW_TOKENS, liger="apply_liger_kernel_to_llama"),
    "hf_mixtral": Row(_hugging_face("Mixtral", **_MIXTRAL), _tokens(4, 2048, 32000), labelled_loss,
                      _tiny_hugging_face("Mixtral"), _FEW_TOKENS, liger="apply_liger_kernel_to_mixtral"),
    "hf_t5": Row(_hugging_face("T5", **_T5), _tokens(16, 512, 32128), labelled_loss,
                 _hugging_face("T5", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64,
                               decoder_start_token_id=0), _FEW_TOKENS),
    "hf_dinov2": Row(_hugging_face("Dinov2", **_DINO), _images(64, 3, 224), class_loss,
                     _hugging_face("Dinov2", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32,
                                   patch_size=16, num_labels=1000), _FEW_IMAGES, True),
}  # fmt: skip
