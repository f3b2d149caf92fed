"""What `apex demo` trains: a small transformer that learns to predict a made-up language.

The language is a Markov chain of order two: the next character depends on the two before it, so the model has to attend
to its past, and the lowest loss that any model can reach is known.

B: sequences in a batch, T: characters in a sequence, V: characters in the alphabet, D: width of the model.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median

import torch
from torch import Tensor, nn
from torch.nn import functional

NormFactory = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Settings:
    """Sizes of the model, the data and the run."""

    steps: int
    batch: int = 24
    context: int = 48
    alphabet: int = 8
    width: int = 64
    heads: int = 4
    layers: int = 2
    learning_rate: float = 1e-2
    seed: int = 2024


@dataclass
class Run:
    """One training run: the loss in nats per character and the duration in seconds, of every step."""

    parameters: int
    tokens_per_step: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def first_loss(self) -> float:
        return self.losses[0]

    @property
    def final_loss(self) -> float:
        """The mean of the last tenth of the run, ten steps at most, because a single batch is noisy."""
        return fmean(self.losses[-max(1, min(10, len(self.losses) // 10)) :])

    @property
    def seconds_per_step(self) -> float:
        """The median, which leaves out the compilation of kernels in the first step."""
        return median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step


class Language:
    """A random Markov chain of order two over `alphabet` characters, and sequences drawn from it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        generator = torch.Generator().manual_seed(settings.seed)
        size = settings.alphabet
        # Sharp transitions leave much to learn: a factor of 3 puts most of the probability on two or three characters.
        self.transitions = (3 * torch.randn(size, size, size, generator=generator)).softmax(-1)  # V, V, V

    def batches(self) -> Iterator[Tensor]:
        """Endless batches of B, T + 1 characters; the same ones each time it is called."""
        generator = torch.Generator().manual_seed(self._settings.seed + 1)
        size = self._settings.alphabet
        while True:
            characters = list(torch.randint(size, (2, self._settings.batch), generator=generator))
            while len(characters) < self._settings.context + 1:
                probabilities = self.transitions[characters[-2], characters[-1]]
                characters.append(torch.multinomial(probabilities, 1, generator=generator)[:, 0])
            yield torch.stack(characters, 1)

    def lowest_loss(self, batches: int = 32) -> float:
        """The loss of a model that knows the chain, over the first batches.

        The second character of a sequence is drawn evenly and can only be guessed.
        """
        sample = torch.cat(list(itertools.islice(self.batches(), batches)))
        known = self.transitions[sample[:, :-2], sample[:, 1:-1]].gather(-1, sample[:, 2:, None]).log().neg()
        guessed = torch.tensor(float(self._settings.alphabet)).log()
        return float((known.sum(1).mean() + guessed) / self._settings.context)


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each behind a norm and beside a residual path."""

    def __init__(self, width: int, heads: int, norm: NormFactory) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = norm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.perceptron_norm = norm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # B, T, D
        split = self.projections(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.perceptron(self.perceptron_norm(x))


class CharacterModel(nn.Module):
    """A small decoder-only transformer: characters (B, T) to logits (B, T, V)."""

    def __init__(self, settings: Settings, norm: NormFactory) -> None:
        super().__init__()
        width = settings.width
        self.characters = nn.Embedding(settings.alphabet, width)
        self.positions = nn.Embedding(settings.context, width)
        self.blocks = nn.Sequential(*(Block(width, settings.heads, norm) for _ in range(settings.layers)))
        self.norm = norm(width)
        self.logits = nn.Linear(width, settings.alphabet)

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        return self.logits(self.norm(self.blocks(self.characters(characters) + self.positions(positions))))


class Trainer:
    """A model with its optimizer and its record. The first weights depend on the seed alone, not on the norm."""

    def __init__(self, settings: Settings, norm: NormFactory, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.model = CharacterModel(settings, norm).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, partial(_learning_rate_factor, settings.steps)
        )
        self.run = Run(sum(p.numel() for p in self.model.parameters()), settings.batch * settings.context)

    def step(self, sequences: Tensor) -> float:
        """One step on B, T + 1 characters; returns the loss."""
        start = time.perf_counter()
        logits = self.model(sequences[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.run.losses.append(loss.item())  # waits for the device
        self.run.seconds.append(time.perf_counter() - start)
        return self.run.losses[-1]


def _learning_rate_factor(steps: int, step: int) -> float:
    """Up in a straight line over the first fifth of the run, then down along a cosine."""
    progress = (step + 1) / (steps + 1)
    return min(progress / 0.2, 0.5 * (1 + math.cos(math.pi * progress)))


def train_side_by_side(
    settings: Settings,
    norms: dict[str, NormFactory],
    device: torch.device,
    on_step: Callable[[str, float], None] = lambda name, loss: None,
) -> dict[str, Run]:
    """Trains one model per norm on the same batches and calls `on_step` with each name and loss.

    The runs take turns at every step, so that other work on the machine slows all of them alike.
    """
    trainers = {name: Trainer(settings, norm, device) for name, norm in norms.items()}
    for batch in itertools.islice(Language(settings).batches(), settings.steps):
        sequences = batch.to(device)
        for name, trainer in trainers.items():
            on_step(name, trainer.step(sequences))
    return {name: trainer.run for name, trainer in trainers.items()}
