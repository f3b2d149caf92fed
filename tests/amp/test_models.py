"""Kinds of modules at every level, several models, optimizers and losses at once, and the plain script."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import amp
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam, FusedSGD
from tests.amp.common import LEVELS, quiet, small_model
from tests.support.warm import run_python


class Scale(torch.autograd.Function):
    """A function with a backward pass by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (grad * weight).to(x.dtype), (grad * x).sum(0).to(weight.dtype)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(6)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Scale.apply(x, self.weight))


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn, self.last = kind(6, 8, **options), nn.LazyLinear(4)
        self.last(self.rnn(torch.zeros(1, 1, 6))[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x[:, None])[0])[:, 0]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(6, 8), nn.GRUCell(8, 8), nn.RNNCell(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(self.gru(self.lstm(x)[0]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.fused, self.last = nn.LayerNorm(8), FusedLayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding((x * 2).long().clamp(0, 9))
        attended, _ = self.attention(embedded, embedded, embedded)
        direct = F.scaled_dot_product_attention(embedded, embedded, embedded)
        return self.last(self.fused(self.norm(attended + direct))).mean(1)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4)
        self.up, self.group = nn.ConvTranspose2d(4, 4, 2), nn.GroupNorm(2, 4)
        self.instance, self.last = nn.InstanceNorm2d(4, affine=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(x.reshape(-1, 1, 2, 3).repeat(1, 1, 2, 2))), 1)
        x = F.interpolate(self.instance(self.group(self.up(x))), scale_factor=2, mode="bilinear")
        return self.last(F.dropout(F.gelu(F.avg_pool2d(x, 2)).mean((2, 3)), 0.0))


MODELS = {
    "custom function": Custom,
    "batch norm": small_model,
    "LSTM": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "cells": Cells,
    "attention": Attention,
    "convolutions": Convolutional,
    "transformer": lambda: nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), nn.Linear(6, 4)),
}
LOSSES = {
    "mse": lambda out, target: F.mse_loss(out, target),
    "l1": lambda out, target: nn.SmoothL1Loss()(out, target),
    "cross entropy": lambda out, target: nn.CrossEntropyLoss()(out, target.argmax(1)),
    "nll": lambda out, target: nn.NLLLoss()(out.log_softmax(1), target.argmax(1)),
    "logits": lambda out, target: nn.BCEWithLogitsLoss()(out, (target > 0).float()),
    "kl": lambda out, target: nn.KLDivLoss(reduction="batchmean")(out.log_softmax(1), target.softmax(1)),
    "cosine": lambda out, target: nn.CosineEmbeddingLoss()(out, target, torch.ones(len(out))),
    "triplet": lambda out, target: nn.TripletMarginLoss()(out, target, -target),
    "by hand": lambda out, target: ((out - target) ** 2).sum() / len(out),
}


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(8, 6, generator=generator) * 4, torch.randn(8, 4, generator=generator)


def learn(model: nn.Module, optimizer: Any, data: tuple[Tensor, Tensor], loss_function: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_function(model(data[0]), data[1])
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_modules(name: str, level: str, data: tuple) -> None:
    """Every kind trains at every level, and starts from the loss of float32."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        expected = F.mse_loss(model(data[0]), data[1]).item()
    torch.manual_seed(0)
    model = MODELS[name]()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.05), opt_level=level)
    losses = learn(model, optimizer, data, F.mse_loss, 8)
    assert losses[0] == pytest.approx(expected, rel=0.05)
    assert losses[-1] < losses[0]
    model.eval()
    with torch.no_grad():
        assert torch.isfinite(model(data[0])).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, level: str, data: tuple) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    expected = LOSSES[name](model(data[0]), data[1]).item()
    model, optimizer = quiet(model, FusedSGD(model.parameters(), lr=0.02), opt_level=level)
    losses = learn(model, optimizer, data, LOSSES[name], 5)
    assert losses[0] == pytest.approx(expected, rel=0.03, abs=1e-3)
    assert losses[-1] < losses[0]


def test_batch_norms_stay_in_float32() -> None:
    model = quiet(small_model(), opt_level="O2")
    for _ in range(3):
        model(torch.randn(5, 6) * 100)
    assert model[1].running_var.dtype == torch.float32
    assert model[1].running_var.max() > 100


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kinds", [(torch.optim.Adam, FusedAdam), (FusedAdam, FusedAdam)], ids=["mixed", "fused"])
def test_gan(level: str, kinds: tuple) -> None:
    """Two models, two optimizers, three losses, each with a scale of its own."""
    torch.manual_seed(0)
    generator: Any = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    critic: Any = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    pairs = zip(kinds, (generator, critic), strict=True)
    optimizers = [kind(net.parameters(), lr=0.01, eps=1e-4) for kind, net in pairs]
    [generator, critic], optimizers = quiet([generator, critic], optimizers, opt_level=level, num_losses=3)
    makes, judges = optimizers
    criterion = nn.BCEWithLogitsLoss()
    before = [[p.detach().clone() for p in net.parameters()] for net in (generator, critic)]
    for step in range(4):
        real = torch.randn(6, 2) + 3
        judges.zero_grad()
        factor = float("inf") if step == 1 and level in ("O1", "O2") else 1.0
        with amp.scale_loss(criterion(critic(real), torch.ones(6, 1)) * factor, judges, loss_id=0) as scaled:
            scaled.backward()
        fake = generator(torch.randn(6, 3))
        with amp.scale_loss(criterion(critic(fake.detach()), torch.zeros(6, 1)), judges, loss_id=1) as scaled:
            scaled.backward()
        skipped = [p.detach().clone() for p in critic.parameters()]
        judges.step()
        if factor != 1.0:
            assert all(torch.equal(a, b) for a, b in zip(skipped, critic.parameters(), strict=True))
        makes.zero_grad()
        with amp.scale_loss(criterion(critic(fake), torch.ones(6, 1)), makes, loss_id=2) as scaled:
            scaled.backward()
        makes.step()
    for net, start in zip((generator, critic), before, strict=True):
        assert all(torch.isfinite(p).all() for p in net.parameters())
        assert not all(torch.equal(a, b) for a, b in zip(start, net.parameters(), strict=True))
    scales = [each["loss_scale"] for each in amp.state_dict().values()]
    start = 2.0**16 if level in ("O1", "O2") else 1.0
    assert scales == [start / 2 if level in ("O1", "O2") else 1.0, start, start]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_several_models_with_one_optimizer(level: str) -> None:
    models = [nn.Linear(3, 3) for _ in range(3)]
    optimizer = FusedAdam([{"params": m.parameters(), "lr": 0.1 * (i + 1)} for i, m in enumerate(models)])
    models, optimizer = quiet(models, optimizer, opt_level=level)
    before = [m.weight.detach().clone() for m in models]
    out = torch.randn(4, 3)
    for model in models:
        out = model(out)
    with amp.scale_loss(out.float().pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(not torch.equal(a, m.weight) for a, m in zip(before, models, strict=True))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_optimizers_that_share_a_model(level: str) -> None:
    """Both update the same parameters in turn, each with its own loss; with masters each has its own."""
    model = small_model()
    optimizers = [FusedSGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)]
    model, optimizers = quiet(model, optimizers, opt_level=level, num_losses=2)
    for loss_id, optimizer in enumerate(optimizers):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.randn(5, 6)).float().pow(2).mean(), optimizer, loss_id) as scaled:
            scaled.backward()
        optimizer.step()
        assert not torch.equal(before, model[0].weight)


SCRIPT = """
import sys, warnings
warnings.simplefilter("error")
import torch
from apex import amp

device = sys.argv[1]
for level in sys.argv[2:]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level)
    x, y = torch.randn(16, 4, device=device), torch.randn(16, 1, device=device)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    print("loss", loss.item())
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_three_lines(device: str, tmp_path: Path) -> None:
    """Run in a new process, in which a warning is an error."""
    result = run_python("-c", SCRIPT, device, "O1", "O2", cwd=tmp_path, environment=os.environ)
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[1]) for line in result.stdout.splitlines() if line.startswith("loss ")]
    assert len(losses) == 2
    assert max(losses) < 2.0
