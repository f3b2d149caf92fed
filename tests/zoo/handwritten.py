"""Models as people write them by hand, none of them for apex."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .cases import Case, Entry, ids, rand, uniform


def mlp(*widths: int, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


# Losses as a script has them, outside of the model.
def mse(model: Any, *inputs: Any) -> Tensor:
    return F.mse_loss(model(*inputs[:-1]), inputs[-1])


def cross_entropy(model: Any, *inputs: Any) -> Tensor:
    logits = model(*inputs[:-1])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), inputs[-1].reshape(-1))


def own(model: Any, *inputs: Any) -> Tensor:
    """Return the loss that the model itself returns."""
    return model(*inputs)


# Time, positions and noise.


class TimeEmbedding(nn.Module):
    """Sines and cosines of a time in 0..999."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2)))
        self.mlp = mlp(width, width, width, act=nn.SiLU)

    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None] * self.frequencies
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))


class Denoiser(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time = TimeEmbedding(width)
        self.enter, self.leave = nn.Linear(8, width), mlp(width, 2 * width, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.leave(F.silu(self.enter(x) + self.time(t)))


class PositionNetwork(nn.Module):
    """Positions up to 5000 are an input, a float, as of a genome or a long recording."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wavelengths", torch.logspace(0, 3.5, 32))
        self.net = mlp(64 + 4, 64, 64, 1)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        angles = 2 * math.pi * positions[..., None] / self.wavelengths
        return self.net(torch.cat([angles.sin(), angles.cos(), x], dim=-1)).squeeze(-1)


class NoiseInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(32, 64, 64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 0.1 * torch.randn(x.shape, device=x.device))


class ZerosInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.net = nn.Linear(32, 64), mlp(64, 64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.net(h + torch.zeros(h.shape, device=x.device))


class NoisyFeatures(nn.Module):
    """A dropout by hand and noise like a hidden activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        keep = (torch.rand(h.shape, device=h.device) > 0.2).float()
        return self.second(h * keep / 0.8 + 0.05 * torch.randn_like(h))


class Modulated(nn.Module):
    """A block of a DiT: its norms are scaled and shifted by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp(width, 4 * width, width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, dim=-1)
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x) * (1 + scale1) + shift1)
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + gate1 * self.out(attention)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer, whose timesteps become float32 sines in forward."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.time, self.label = mlp(width, width, width, act=nn.SiLU), nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Modulated(width, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 16)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        half = self.width // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angles = t[:, None].float() * frequencies[None]
        c = self.time(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)) + self.label(y)
        h = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            h = block(h, c)
        return self.head(self.norm(h))


class ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, after), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(width, after)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class DiffusionUNet(nn.Module):
    """A U-Net with its noise schedule: the loss is inside, and noise is added by a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), dim=0))
        self.time = TimeEmbedding(32)
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.down = ResidualBlock(16, 32, 32)
        self.middle = ResidualBlock(32, 32, 32)
        self.up = ResidualBlock(32 + 16, 16, 32)
        self.leave = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 1000, (len(x),), device=x.device)
        noise = torch.randn_like(x)
        alpha = self.alpha[t][:, None, None, None]
        h = self.enter(alpha.sqrt() * x + (1 - alpha).sqrt() * noise)
        embedding = self.time(t)
        low = self.middle(self.down(F.avg_pool2d(h, 2), embedding), embedding)
        h = self.up(torch.cat([F.interpolate(low, scale_factor=2, mode="nearest"), h], dim=1), embedding)
        return F.mse_loss(self.leave(h), noise)


# Images.


def conv(before: int, after: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deeper = conv(3, 16), conv(16, 32, 2)
        self.branch = nn.Sequential(conv(32, 32), nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deeper(self.stem(x))
        return self.head(torch.relu(x + self.branch(x)).mean(dim=(2, 3)))


class Segmenter(nn.Module):
    """Logits are resized to the mask's size, and the loss is computed in forward, as in SegFormer."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = conv(3, 16, 2), conv(16, 32, 2)
        self.side, self.head = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 5, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        near = self.down1(x)
        far = F.interpolate(self.down2(near), size=near.shape[2:], mode="bilinear", align_corners=False)
        logits = F.interpolate(self.head(far + self.side(near)), size=mask.shape[1:], mode="bilinear")
        probabilities = logits.softmax(dim=1)[:, 1]
        dice = 1 - 2 * (probabilities * (mask == 1)).sum() / (probabilities.sum() + (mask == 1).sum() + 1)
        return F.cross_entropy(logits, mask) + dice


class Detector(nn.Module):
    """Boxes on a grid: offsets are decoded by exp, compared by IoU, and queries matched by cdist."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 16, 2), conv(16, 32, 2))
        self.head = nn.Conv2d(32, 5, 1)
        y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        self.register_buffer("centers", torch.stack([x, y], dim=-1).view(-1, 2) * 64 + 32)  # in pixels of 512

    def forward(self, images: Tensor, boxes: Tensor) -> Tensor:
        raw = self.head(self.body(images)).flatten(2).transpose(1, 2)
        center = self.centers + 64 * raw[..., 0:2].tanh()
        size = 64 * raw[..., 2:4].clamp(-4, 4).exp()
        predicted = torch.cat([center - size / 2, center + size / 2], dim=-1)
        distances = torch.cdist(center, (boxes[..., :2] + boxes[..., 2:]) / 2)
        best = distances.argmin(dim=1)
        chosen = predicted.gather(1, best[..., None].expand(-1, -1, 4))
        corner = torch.minimum(chosen[..., 2:], boxes[..., 2:]) - torch.maximum(chosen[..., :2], boxes[..., :2])
        overlap = corner.clamp(min=0).prod(dim=-1)
        areas = (chosen[..., 2:] - chosen[..., :2]).prod(dim=-1) + (boxes[..., 2:] - boxes[..., :2]).prod(dim=-1)
        iou = overlap / (areas - overlap + 1e-6)
        objectness = torch.zeros_like(raw[..., 4]).scatter(1, best, 1.0)
        score = F.binary_cross_entropy_with_logits(raw[..., 4], objectness)
        return (1 - iou).mean() + score + F.smooth_l1_loss(chosen, boxes, beta=16.0) / 512


class ViT(nn.Module):
    """A vision transformer by hand: class token, positions, layer scale."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(2))
        self.mlps = nn.ModuleList(mlp(width, 2 * width, width) for _ in range(2))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((width,), 0.1)) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for index in range(2):
            h = self.norms[2 * index](x)
            x = x + self.scales[2 * index] * self.attention[index](h, h, h, need_weights=False)[0]
            x = x + self.scales[2 * index + 1] * self.mlps[index](self.norms[2 * index + 1](x))
        return self.head(self.norm(x)[:, 0])


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 64, 2 * 8), mlp(8, 64, 64)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mu, logvar = self.encoder(x).chunk(2, dim=-1)
        return mu, logvar

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x)
        std = torch.exp(0.5 * logvar)
        return self.decode(mu + std * torch.randn_like(std)), mu, logvar


def vae_loss(model: Any, x: Tensor) -> Tensor:
    reconstruction, mu, logvar = model(x)
    divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=-1)
    return F.binary_cross_entropy_with_logits(reconstruction, (x > 0).float()) + 0.1 * divergence.mean()


def vae_loss_by_methods(model: Any, x: Tensor) -> Tensor:
    """Compute the loss from methods of the model; its forward pass is not called."""
    mu, logvar = model.encode(x)
    return F.mse_loss(model.decode(mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)), x) + mu.pow(2).mean()


class VQVAE(nn.Module):
    """Codes are chosen by distance; gradients pass straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(32, 64, 16), mlp(16, 64, 32)
        self.codes = nn.Embedding(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        distances = z.pow(2).sum(-1, keepdim=True) - 2 * z @ self.codes.weight.t() + self.codes.weight.pow(2).sum(-1)
        code = self.codes(distances.argmin(dim=-1))
        commitment = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return F.mse_loss(self.decoder(z + (code - z).detach()), x) + commitment


class Radiance(nn.Module):
    """A radiance field: coordinates in sines up to 2^9, colours composed along rays by exp and cumprod."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("octaves", 2.0 ** torch.arange(10) * math.pi)
        self.net = mlp(60, 64, 64, 4, act=nn.ReLU)

    def forward(self, points: Tensor, depths: Tensor) -> Tensor:
        angles = (points[..., None] * self.octaves).flatten(-2)
        colour, density = self.net(torch.cat([angles.sin(), angles.cos()], dim=-1)).split([3, 1], dim=-1)
        steps = torch.diff(depths, dim=-1, append=depths[:, -1:] + 1.0)
        alpha = 1 - torch.exp(-F.softplus(density.squeeze(-1)) * steps)
        light = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1] + 1e-10], dim=-1), dim=-1)
        return ((alpha * light)[..., None] * colour.sigmoid()).sum(dim=-2)


# Text, audio and sequences.


class CTC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(20, 32, 3, padding=1)
        self.rnn = nn.GRU(32, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 12)

    def forward(self, features: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        h = torch.relu(self.convolution(features)).transpose(1, 2)
        scores = self.head(self.rnn(h)[0]).log_softmax(dim=-1).transpose(0, 1)
        frames = torch.full((len(features),), scores.shape[0], dtype=torch.long)
        return F.ctc_loss(scores, targets, frames, lengths)


class FNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.mlps = nn.ModuleList(mlp(width, 2 * width, width) for _ in range(2))
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in range(2):
            x = self.norms[2 * index](x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
            x = self.norms[2 * index + 1](x + self.mlps[index](x))
        return self.head(x)


class FourierOperator(nn.Module):
    """A Fourier neural operator, whose weights are complex."""

    def __init__(self, width: int = 16, modes: int = 8) -> None:
        super().__init__()
        self.modes = modes
        self.enter, self.local, self.leave = nn.Linear(2, width), nn.Conv1d(width, width, 1), mlp(width, 32, 1)
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x).transpose(1, 2)
        spectrum = torch.fft.rfft(h.float())
        mixed = torch.zeros_like(spectrum)
        mixed[..., : self.modes] = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], self.weight)
        h = F.gelu(torch.fft.irfft(mixed, n=h.shape[-1]) + self.local(h))
        return self.leave(h.transpose(1, 2))


class StateSpace(nn.Module):
    """A diagonal state space: complex poles by exp, a long convolution by FFT."""

    def __init__(self, width: int = 32, states: int = 8) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(width) * 3 - 5)
        self.log_real = nn.Parameter(torch.full((width, states), math.log(0.5)))
        self.imaginary = nn.Parameter(math.pi * torch.arange(states).float().repeat(width, 1))
        self.out = nn.Parameter(torch.randn(width, states, 2))
        self.skip, self.enter, self.leave = nn.Parameter(torch.ones(width)), nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        u = self.enter(x).transpose(1, 2)
        length = u.shape[-1]
        poles = -torch.exp(self.log_real) + 1j * self.imaginary
        step = poles * torch.exp(self.log_step)[:, None]
        coefficients = torch.view_as_complex(self.out) * (torch.exp(step) - 1) / poles
        powers = torch.exp(step[..., None] * torch.arange(length, device=x.device))
        kernel = 2 * torch.einsum("hn,hnl->hl", coefficients, powers).real
        y = torch.fft.irfft(torch.fft.rfft(u.float(), 2 * length) * torch.fft.rfft(kernel, 2 * length), 2 * length)
        return self.leave(F.gelu(y[..., :length] + u * self.skip[:, None]).transpose(1, 2))


class SelectiveScan(nn.Module):
    """A recurrence whose decay is exp of a parameter times a step, as in Mamba."""

    def __init__(self, width: int = 32, states: int = 8) -> None:
        super().__init__()
        self.embedding, self.enter = nn.Embedding(50, width), nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.parts, self.step = nn.Linear(width, 2 * states + 2), nn.Linear(2, width)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(width, 1))
        self.skip, self.norm, self.head = nn.Parameter(torch.ones(width)), nn.LayerNorm(width), nn.Linear(width, 50)
        self.states = states

    def forward(self, tokens: Tensor) -> Tensor:
        x, gate = self.enter(self.embedding(tokens)).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : tokens.shape[1]].transpose(1, 2))
        b, c, rank = self.parts(x).split([self.states, self.states, 2], dim=-1)
        step = F.softplus(self.step(rank))
        decay = torch.exp(step[..., None] * -torch.exp(self.log_decay))
        inputs = (step * x)[..., None] * b[:, :, None]
        state, outputs = torch.zeros_like(inputs[:, 0]), []
        for t in range(tokens.shape[1]):
            state = decay[:, t] * state + inputs[:, t]
            outputs.append((state * c[:, t, None]).sum(dim=-1))
        return self.head(self.norm((torch.stack(outputs, dim=1) + x * self.skip) * F.silu(gate)))


class LSTMTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 9)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=12)
        return self.head(hidden)


class GRUTranslator(nn.Module):
    """An encoder and a decoder of cells with additive attention; the state begins as zeros."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(60, width), nn.Embedding(60, width)
        self.encoder, self.cell = nn.GRU(width, width, batch_first=True), nn.GRUCell(2 * width, width)
        self.query, self.score = nn.Linear(width, width), nn.Linear(width, 1)
        self.head = nn.Linear(width, 60)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, _ = self.encoder(self.source(source))
        state = torch.zeros(len(source), memory.shape[-1], device=source.device)
        logits = []
        for t in range(target.shape[1]):
            weights = self.score(torch.tanh(memory + self.query(state)[:, None])).softmax(dim=1)
            context = (weights * memory).sum(dim=1)
            state = self.cell(torch.cat([self.target(target[:, t]), context], dim=-1), state)
            logits.append(self.head(state))
        return torch.stack(logits, dim=1)


class EinsumAttention(nn.Module):
    """Attention by einsum, with a bias of relative positions and -inf where a mask is."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, heads, width, width // heads) * width**-0.5)
        self.out = nn.Parameter(torch.randn(heads, width // heads, width) * width**-0.5)
        self.bias = nn.Embedding(64, heads)
        self.embedding, self.norm, self.head = nn.Embedding(50, width), nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = torch.einsum("bld,thdk->tbhlk", self.norm(x), self.weights)
        scores = torch.einsum("bhqk,bhsk->bhqs", q, k) * q.shape[-1] ** -0.5
        place = torch.arange(tokens.shape[1], device=tokens.device)
        scores = scores + self.bias((place[:, None] - place).clamp(0, 63)).permute(2, 0, 1)
        scores = scores.masked_fill(place[None] > place[:, None], torch.finfo(scores.dtype).min)
        mixed = torch.einsum("bhqs,bhsk->bhqk", scores.softmax(dim=-1), v)
        return self.head(x + torch.einsum("bhqk,hkd->bqd", mixed, self.out))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (self.rotated(each, turns) for each in (q, k))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def rotated(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Llama(nn.Module):
    """A Llama by hand: rotations are a complex table, far from the first position."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(100, width), RMSNorm(width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(2))
        self.head = nn.Linear(width, 100, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(4096.0), 10000 ** (-torch.arange(half) / half))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor, begin: int = 3000) -> Tensor:
        x, turns = self.embedding(tokens), self.turns[begin : begin + tokens.shape[1]]
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x)).float()


class GPT(nn.Module):
    """A GPT whose head is its embedding, with learned positions and checkpointed blocks; returns a dict."""

    def __init__(self, width: int = 64, checkpointed: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(100, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=norm_first)
            for norm_first in (True, False)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100, bias=False)
        self.head.weight = self.wte.weight
        self.checkpointed = checkpointed
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        length = tokens.shape[1]
        x = self.wte(tokens) + self.wpe(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.checkpointed else block(x, mask)
        logits = self.head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


@dataclass
class Prediction:
    mean: Tensor
    log_variance: Tensor


class Forecaster(nn.Module):
    """A distribution of the next value, returned as a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.enter, self.leave = nn.Linear(3, 32), nn.Linear(32, 2)

    def forward(self, past: Tensor, future: Tensor) -> Prediction:
        mean, log_variance = self.leave(self.transformer(self.enter(past), self.enter(future))).unbind(-1)
        return Prediction(mean, log_variance)


def gaussian_nll(model: Any, past: Tensor, future: Tensor, target: Tensor) -> Tensor:
    prediction = model(past, future)
    return F.gaussian_nll_loss(prediction.mean, target, prediction.log_variance.exp())


class CRF(nn.Module):
    """A tagger with the negative log-likelihood of a chain, by logsumexp."""

    def __init__(self, tags: int = 6) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(50, 32), nn.LSTM(32, 32, batch_first=True)
        self.head, self.transitions = nn.Linear(32, tags), nn.Parameter(torch.randn(tags, tags))

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        scores = self.head(self.lstm(self.embedding(tokens))[0])
        path = scores.gather(2, tags[..., None]).squeeze(-1).sum(1) + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        alpha = scores[:, 0]
        for t in range(1, tokens.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.transitions, dim=1) + scores[:, t]
        return (torch.logsumexp(alpha, dim=1) - path).mean()


class Vocoder(nn.Module):
    """A generator of audio by transposed convolutions with weight norm."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.net = nn.Sequential(
            norm(nn.Conv1d(20, 32, 7, padding=3)),
            nn.LeakyReLU(0.1),
            norm(nn.ConvTranspose1d(32, 16, 16, 8, 4)),
            nn.LeakyReLU(0.1),
            norm(nn.Conv1d(16, 1, 7, padding=3)),
            nn.Tanh(),
        )

    def forward(self, mel: Tensor) -> Tensor:
        return self.net(mel).squeeze(1)


def spectral_loss(model: Any, mel: Tensor, audio: Tensor) -> Tensor:
    made, window = model(mel), torch.hann_window(64, device=audio.device)
    spectra = [torch.stft(each, 64, 16, window=window, return_complex=True).abs() for each in (made, audio)]
    logarithms = [each.clamp(min=0.1).log() for each in spectra]
    return F.l1_loss(*spectra) + F.l1_loss(*logarithms)


# Graphs, sets, mixtures, recommendations.


class GraphNetwork(nn.Module):
    """Attention over the edges of a graph, by scatter_reduce and index_add."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter, self.score = nn.Linear(8, width), nn.Linear(2 * width, 1)
        self.message, self.update = nn.Linear(width, width), nn.GRUCell(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h, (source, target) = self.enter(x), edges
        for _ in range(2):
            score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], dim=-1))).squeeze(-1)
            most = torch.full((len(x),), -1e4, device=x.device, dtype=score.dtype)
            most = most.scatter_reduce(0, target, score.detach(), "amax")
            weight = (score - most[target]).exp()
            total = torch.zeros(len(x), device=x.device, dtype=weight.dtype).index_add(0, target, weight)
            message = self.message(h[source]) * (weight / (total[target] + 1e-9))[:, None]
            h = self.update(
                torch.zeros(h.shape, device=x.device, dtype=message.dtype).index_add_(0, target, message), h
            )
        return self.head(h)


class MixtureOfExperts(nn.Module):
    """Two of four experts for each token: masks, index_add, and a loss that balances them."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(50, width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(mlp(width, 2 * width, width, act=nn.SiLU) for _ in range(experts))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        h = self.norm(x)
        probabilities = F.softmax(self.router(h), dim=-1, dtype=torch.float)
        weights, chosen = probabilities.topk(2, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(h.dtype)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            row, which = torch.where(chosen == number)
            out.index_add_(0, row, (expert(h[row]) * weights[row, which, None]).to(out.dtype))
        share = F.one_hot(chosen, len(self.experts)).float().sum(1).mean(0)
        loss = F.cross_entropy(self.head(x + out), labels.flatten())
        return loss + 0.01 * len(self.experts) * (share * probabilities.mean(0)).sum()


class Recommender(nn.Module):
    """A factorization machine beside a deep network, over bags of items."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.users = nn.EmbeddingBag(200, 16, mode="sum"), nn.Embedding(50, 16)
        self.linear, self.offset = nn.EmbeddingBag(200, 1, mode="sum"), nn.Parameter(torch.zeros(1))
        self.deep = mlp(32 + 4, 32, 1, act=nn.ReLU)

    def forward(self, user: Tensor, items: Tensor, numbers: Tensor) -> Tensor:
        person, things = self.users(user), self.bag(items)
        pairs = (person * things).sum(dim=-1)
        deep = self.deep(torch.cat([person, things, numbers.log1p()], dim=-1)).squeeze(-1)
        return self.offset + self.linear(items).squeeze(-1) + pairs + deep


def click_loss(model: Any, user: Tensor, items: Tensor, numbers: Tensor, clicks: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(user, items, numbers), clicks)


# Contrast, agents, physics, flows, and other arithmetic.


class Contrastive(nn.Module):
    """Two encoders and `logit_scale`, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Sequential(conv(3, 16, 2), nn.Flatten(), nn.Linear(16 * 64, 32)), mlp(24, 64, 32)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class SelfDistilled(nn.Module):
    """Outputs are compared with those of a sharp, centred teacher; the centre is a buffer that forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(32, 64, 40), mlp(32, 64, 40)
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 40))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        target = self.teacher(y).detach()
        loss = -(((target - self.center) / 0.04).softmax(-1) * (self.student(x) / 0.1).log_softmax(-1)).sum(-1).mean()
        self.center.mul_(0.9).add_(target.mean(0, keepdim=True).to(self.center.dtype), alpha=0.1)
        return loss


class Triplet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(32, 64, 16)

    def forward(self, *views: Tensor) -> list[Tensor]:
        return [F.normalize(self.net(view), dim=-1) for view in views]


def triplet_loss(model: Any, *views: Tensor) -> Tensor:
    anchor, near, far = model(*views)
    return F.triplet_margin_loss(anchor, near, far) + (1 - F.cosine_similarity(anchor, near)).mean()


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.value = mlp(12, 64, 64, act=nn.Tanh), nn.Linear(64, 1)
        self.policy, self.mean = nn.Linear(64, 5), nn.Linear(64, 2)
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, observation: Tensor) -> tuple[Any, Any, Tensor]:
        h = torch.tanh(self.body(observation))
        moves = torch.distributions.Categorical(logits=self.policy(h))
        forces = torch.distributions.Normal(self.mean(h), self.log_std.exp())
        return moves, forces, self.value(h).squeeze(-1)


def ppo_loss(model: Any, observation: Tensor, move: Tensor, force: Tensor, before: Tensor, gain: Tensor) -> Tensor:
    moves, forces, value = model(observation)
    ratio = (moves.log_prob(move) + forces.log_prob(force).sum(-1) - before).exp()
    policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    return (
        policy + 0.5 * F.smooth_l1_loss(value, gain * 20) - 0.01 * (moves.entropy() + forces.entropy().sum(-1)).mean()
    )


class Critic(nn.Module):
    """A critic whose loss has a penalty of the gradient by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.net = nn.Sequential(norm(nn.Linear(16, 64)), nn.Softplus(), norm(nn.Linear(64, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def penalty_loss(model: Any, real: Tensor, fake: Tensor) -> Tensor:
    between = ((real + fake) / 2).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return model(fake).mean() - model(real).mean() + 10 * (slope.norm(dim=-1) - 1).square().mean()


class Physics(nn.Module):
    """A solution of a heat equation, whose loss has second derivatives by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 32, 32, 1, act=nn.Tanh)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.stack([x, t], dim=-1)).squeeze(-1)


def heat_loss(model: Any, x: Tensor, t: Tensor) -> Tensor:
    x, t = x.clone().requires_grad_(), t.clone().requires_grad_()
    u = model(x, t)
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return (u_t - 0.1 * u_xx).square().mean() + (model(x, torch.zeros_like(t)) - torch.sin(math.pi * x)).square().mean()


class Flow(nn.Module):
    """Affine couplings, whose loss is a negative log-likelihood with their log-determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(4, 32, 8, act=nn.ReLU) for _ in range(4))
        self.scale = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * self.scale.exp()
        total = self.scale.sum().expand(len(x))
        for net in self.nets:
            kept, moved = x.chunk(2, dim=-1)
            log_scale, shift = net(kept).chunk(2, dim=-1)
            log_scale = torch.tanh(log_scale)
            x = torch.cat([moved * log_scale.exp() + shift, kept], dim=-1)
            total = total + log_scale.sum(dim=-1)
        return x, total


def flow_loss(model: Any, x: Tensor) -> Tensor:
    z, total = model(x)
    return -(torch.distributions.Normal(0.0, 1.0).log_prob(z).sum(-1) + total).mean()


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(x, beta)
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, beta = ctx.saved_tensors
        s = torch.sigmoid(beta * x)
        slope = x * s * (1 - s)
        return dy * (s + beta * slope), (dy * slope * x).sum().reshape(beta.shape)


class OwnFunction(nn.Module):
    """An autograd Function of one's own, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.beta = nn.Linear(32, 64), nn.Linear(64, 10), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(_Swish.apply(self.first(x), self.beta))


class ExactRegion(nn.Module):
    """A part runs without autocast, with inputs that the model itself makes float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router, self.head = nn.Embedding(50, 32), nn.Linear(32, 4), nn.Linear(32, 50)
        self.parts, self.norm = nn.Parameter(torch.randn(4, 32, 32) * 0.2), nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        with torch.autocast(x.device.type, enabled=False):
            weights = self.router(x.float()).softmax(dim=-1)
        return self.head(x + torch.einsum("ble,edf,bld->blf", weights, self.parts, x))


class Uncertainty(nn.Module):
    """Several losses, weighed by the exponent of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.log_vars = mlp(16, 64, 64), nn.Parameter(torch.tensor([0.0, 1.0, -1.0]))
        self.classes, self.value, self.count = nn.Linear(64, 5), nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, x: Tensor, label: Tensor, value: Tensor, count: Tensor) -> Tensor:
        h = F.gelu(self.body(x))
        losses = torch.stack(
            [
                F.cross_entropy(self.classes(h), label, label_smoothing=0.1),
                F.huber_loss(self.value(h).squeeze(-1), value),
                F.poisson_nll_loss(self.count(h).squeeze(-1), count),
            ]
        )
        return (torch.exp(-self.log_vars) * losses + self.log_vars).sum()


class HyperNetwork(nn.Module):
    """Weights of one network are outputs of another."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.gate = mlp(8, 32, 16 * 16 + 16), nn.Bilinear(16, 8, 16)
        self.act = nn.PReLU(16)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        weight, bias = self.generator(task).split([256, 16])
        h = self.act(F.linear(x, weight.view(16, 16), bias))
        return h + torch.sigmoid(self.gate(x, task.expand(len(x), -1)))


def tagging(model: Any, tokens: Tensor, lengths: Tensor, tags: Tensor) -> Tensor:
    logits = model(tokens, lengths)
    return F.cross_entropy(logits.transpose(1, 2), tags)


def boxes(*shape: int) -> Tensor:
    corner = torch.rand(*shape, 2) * 350
    return torch.cat([corner, corner + 40 + torch.rand(*shape, 2) * 120], dim=-1)


def entry(name: str, make: Any, inputs: Any, loss: Any) -> Entry:
    return Entry(name, "handwritten", lambda: Case(make(), inputs(), loss))


ENTRIES = [
    entry("time embedding", Denoiser, lambda: (rand(64, 8), ids(1000, 64), rand(64, 8)), mse),
    entry("time embedding, float times", Denoiser, lambda: (rand(64, 8), ids(1000, 64).float(), rand(64, 8)), mse),
    entry("positions to 5000", PositionNetwork, lambda: (uniform(8, 32) * 5000, rand(8, 32, 4), rand(8, 32)), mse),
    entry("noise in forward", NoiseInForward, lambda: (rand(64, 32), rand(64, 32)), mse),
    entry("zeros in forward", ZerosInForward, lambda: (rand(64, 32), rand(64, 32)), mse),
    entry("noise like activations", NoisyFeatures, lambda: (rand(64, 32), ids(10, 64)), cross_entropy),
    entry("DiT", DiT, lambda: (rand(8, 4, 8, 8), ids(1000, 8), ids(11, 8), rand(8, 16, 16)), mse),
    entry("diffusion U-Net", DiffusionUNet, lambda: (rand(8, 3, 16, 16),), own),
    entry("convolutions, batch norm", ConvNet, lambda: (rand(16, 3, 16, 16), ids(10, 16)), cross_entropy),
    entry("segmentation", Segmenter, lambda: (rand(4, 3, 32, 32), ids(5, 4, 32, 32)), own),
    entry("detection", Detector, lambda: (rand(4, 3, 32, 32), boxes(4, 3)), own),
    entry("ViT", ViT, lambda: (rand(8, 3, 32, 32), ids(10, 8)), cross_entropy),
    entry("VAE", VAE, lambda: (rand(32, 64),), vae_loss),
    entry("VAE, methods called", VAE, lambda: (rand(32, 64),), vae_loss_by_methods),
    entry("VQ-VAE", VQVAE, lambda: (rand(64, 32),), own),
    entry(
        "radiance field", Radiance, lambda: (torch.rand(8, 16, 3), torch.rand(8, 16).sort()[0], torch.rand(8, 3)), mse
    ),
    entry("CTC", CTC, lambda: (rand(4, 20, 24), 1 + ids(11, 4, 5), torch.tensor([5, 4, 3, 5])), own),
    entry("FNet", FNet, lambda: (ids(100, 4, 16), ids(100, 4, 16)), cross_entropy),
    entry("Fourier operator", FourierOperator, lambda: (rand(4, 32, 2), rand(4, 32, 1)), mse),
    entry("state space", StateSpace, lambda: (rand(4, 64, 4), rand(4, 64, 4)), mse),
    entry("selective scan", SelectiveScan, lambda: (ids(50, 4, 12), ids(50, 4, 12)), cross_entropy),
    entry(
        "LSTM, packed",
        LSTMTagger,
        lambda: (ids(100, 6, 12), torch.tensor([12, 9, 3, 7, 12, 1]), ids(9, 6, 12)),
        tagging,
    ),
    entry("GRU with attention", GRUTranslator, lambda: (ids(60, 4, 10), ids(60, 4, 8), ids(60, 4, 8)), cross_entropy),
    entry("einsum attention", EinsumAttention, lambda: (ids(50, 4, 16), ids(50, 4, 16)), cross_entropy),
    entry("Llama", Llama, lambda: (ids(100, 4, 16), ids(100, 4, 16)), cross_entropy),
    entry("GPT, tied", GPT, lambda: (ids(100, 4, 16), ids(100, 4, 16)), lambda model, *batch: model(*batch)["loss"]),
    entry(
        "GPT, checkpointed",
        lambda: GPT(checkpointed=True),
        lambda: (ids(100, 4, 16), ids(100, 4, 16)),
        lambda model, x, y: F.cross_entropy(model(x)["logits"].flatten(0, 1), y.flatten()),
    ),
    entry("forecaster, dataclass", Forecaster, lambda: (rand(8, 12, 3), rand(8, 4, 3), rand(8, 4)), gaussian_nll),
    entry("CRF", CRF, lambda: (ids(50, 4, 10), ids(6, 4, 10)), own),
    entry("vocoder", Vocoder, lambda: (rand(4, 20, 16), rand(4, 128).tanh()), spectral_loss),
    entry("graph attention", GraphNetwork, lambda: (rand(40, 8), ids(40, 2, 160), ids(3, 40)), cross_entropy),
    entry("mixture of experts", MixtureOfExperts, lambda: (ids(50, 4, 16), ids(50, 4, 16)), own),
    entry(
        "recommender",
        Recommender,
        lambda: (ids(50, 32), ids(200, 32, 6), uniform(32, 4) * 1000, ids(2, 32).float()),
        click_loss,
    ),
    entry("contrastive", Contrastive, lambda: (rand(16, 3, 16, 16), rand(16, 24)), own),
    entry("self-distillation", SelfDistilled, lambda: (rand(32, 32), rand(32, 32)), own),
    entry("triplets", Triplet, lambda: (rand(16, 32), rand(16, 32), rand(16, 32)), triplet_loss),
    entry(
        "actor and critic",
        ActorCritic,
        lambda: (rand(64, 12), ids(5, 64), rand(64, 2), rand(64) * 0.2 - 3.5, rand(64)),
        ppo_loss,
    ),
    entry("gradient penalty", Critic, lambda: (rand(32, 16), rand(32, 16)), penalty_loss),
    entry("heat equation", Physics, lambda: (uniform(64), uniform(64)), heat_loss),
    entry("flow", Flow, lambda: (rand(32, 8),), flow_loss),
    entry("own autograd Function", OwnFunction, lambda: (rand(64, 32), ids(10, 64)), cross_entropy),
    entry("region without autocast", ExactRegion, lambda: (ids(50, 4, 16), ids(50, 4, 16)), cross_entropy),
    entry(
        "uncertainty weights", Uncertainty, lambda: (rand(64, 16), ids(5, 64), rand(64) * 10, ids(9, 64).float()), own
    ),
    entry("hypernetwork", HyperNetwork, lambda: (rand(32, 16), rand(8), rand(32, 16)), mse),
]
