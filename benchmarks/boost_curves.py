"""Losses of `apex.boost` beside `torch.autocast`: six models, 500 steps, three seeds.

    python benchmarks/boost_curves.py                           # every model, on a GPU
    python benchmarks/boost_curves.py --models gpt vit --resume # goes on after an interruption
    python benchmarks/boost_curves.py --plot                    # draws docs/boost_curves.svg from the record

Language models learn the text of this repository, byte by byte. The others learn images drawn around ten random
pictures: to name the picture, or to remove the noise. Both ways of a seed start from the same weights and see the same
batches. The mean of the last 50 losses over the seeds must lie within 0.3% of autocast's, or within twice the spread of
autocast's own seeds.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from plain_networks import GPT2, BasicBlock, Bert, Decoder, UNet, ViT, class_loss, image_loss, own_loss, resnet
from torch import Tensor, nn

import apex
from apex._bench.environment import describe, device_name, device_stem

ROOT = Path(__file__).parents[1]
STEPS, SEEDS, LAST = 500, 3, 50
MASK = 256  # the token in place of a hidden byte
CLASSES = 10
WAYS = ("autocast", "boost")


@functools.cache
def text() -> Tensor:
    """Return the bytes of this repository's pages."""
    pages = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    return torch.frombuffer(bytearray(pages), dtype=torch.uint8)


def draw_text(random: torch.Generator, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return bytes, and the next ones as labels."""
    starts = torch.randint(0, len(text()) - length - 1, (count,), generator=random)
    rows = text()[starts[:, None] + torch.arange(length + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def draw_masked(random: torch.Generator, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return bytes of which 15% are hidden, and the hidden ones as labels."""
    tokens, _ = draw_text(random, count, length)
    hidden = torch.rand(tokens.shape, generator=random) < 0.15
    return tokens.masked_fill(hidden, MASK), tokens.masked_fill(~hidden, -100)


@functools.cache
def pictures(channels: int, side: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    coarse = torch.randn(CLASSES, channels, 8, 8, generator=random)
    return nn.functional.interpolate(coarse, (side, side), mode="bilinear")


def draw_images(random: torch.Generator, count: int, channels: int, side: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures and their numbers."""
    names = torch.randint(0, CLASSES, (count,), generator=random)
    noise = torch.randn(count, channels, side, side, generator=random)
    return pictures(channels, side)[names] + 4.0 * noise, names


def draw_noise(random: torch.Generator, count: int, channels: int, side: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures and the noise."""
    names = torch.randint(0, CLASSES, (count,), generator=random)
    noise = torch.randn(count, channels, side, side, generator=random)
    return pictures(channels, side)[names] + noise, noise


class Model(NamedTuple):
    """A model, its batches, its loss and the learning rate."""

    title: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[..., Tensor]
    rate: float = 3e-4


MODELS = {
    "gpt": Model("GPT-2, 6 x 384", lambda: GPT2(6, 384, 257, 256), lambda r: draw_text(r, 16, 256), own_loss),
    "llama": Model(
        "Llama, 6 x 384",
        lambda: Decoder(6, 384, 1024, 6, 2, 64, 257, normed=False),
        lambda r: draw_text(r, 16, 256),
        own_loss,
    ),
    "bert": Model("BERT, 6 x 384", lambda: Bert(6, 384, 257, 256), lambda r: draw_masked(r, 16, 256), own_loss),
    "vit": Model("ViT, 6 x 384", lambda: ViT(6, 384, 64), lambda r: draw_images(r, 64, 3, 64), class_loss, 1e-4),
    "resnet": Model(
        "ResNet of basic blocks",
        lambda: resnet((2, 2, 2), 32, BasicBlock, False),
        lambda r: draw_images(r, 64, 3, 32),
        class_loss,
    ),
    "unet": Model("U-Net, 64 channels", lambda: UNet(64), lambda r: draw_noise(r, 8, 4, 32), image_loss),
}


def train(model: Model, way: str, seed: int, device: str, steps: int) -> list[float]:
    """Return the losses of a training."""
    torch.manual_seed(seed)
    network: Any = model.make().to(device).train()
    optimizer: Any = torch.optim.AdamW(network.parameters(), lr=model.rate)
    random, step = torch.Generator().manual_seed(1000 + seed), None
    if way == "boost":
        network, optimizer, step = apex.boost(network, optimizer, "bf16", device=device)

    def train_step(*batch: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=way == "autocast"):
            loss = model.loss(network, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = train_step if step is None else step(train_step)
    return torch.stack([run(*(t.to(device) for t in model.draw(random))).float() for _ in range(steps)]).tolist()


def verdict(curves: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Return the mean of the last losses of both ways, their difference, and whether the bar is met."""
    ends = {way: [statistics.fmean(losses[-LAST:]) for losses in curves[way].values()] for way in WAYS}
    plain, ours = (statistics.fmean(ends[way]) for way in WAYS)
    spread = max(ends["autocast"]) - min(ends["autocast"])
    difference = abs(ours - plain)
    is_met = difference <= max(0.003 * plain, 2 * spread)
    return {"autocast": plain, "boost": ours, "spread": spread, "relative": difference / plain, "met": is_met}


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw the losses of the first seed, smoothed over 10 steps, for each model."""
    import matplotlib

    matplotlib.use("svg")
    # Letters stay text, and no date or random identifier makes the file differ from run to run.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "apex", "font.size": 8}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(9, 4.6))
    for place, (name, found) in zip(axes.flat, record["models"].items(), strict=False):
        for way, colour in zip(WAYS, ("#8a939e", "#2f6fdb"), strict=True):
            for seed, losses in found["curves"][way].items():
                smooth = [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(0, len(losses), 5)]
                label = f"{'torch.autocast' if way == 'autocast' else 'apex.boost'}" if seed == "0" else None
                place.plot(range(0, len(losses), 5), smooth, color=colour, linewidth=0.8, label=label)
        place.set_title(MODELS[name].title)
        place.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")
    parser.add_argument("--plot", action="store_true", help="draw the picture from the record, and train nothing")
    parser.add_argument("--output", type=Path, help="the record; by default one in benchmarks/results")
    arguments = parser.parse_args()
    default = "nvidia_h200" if arguments.plot else device_stem(device_name(torch.device(arguments.device)))
    path = arguments.output or ROOT / "benchmarks" / "results" / f"{default}-boost-curves.json"
    if arguments.plot:
        plot(json.loads(path.read_text()), ROOT / "docs" / "boost_curves.svg")
        return
    record = json.loads(path.read_text()) if arguments.resume and path.exists() else {"models": {}}
    record |= describe(torch.device(arguments.device))
    for name in arguments.models:
        found = record["models"].setdefault(name, {"curves": {way: {} for way in WAYS}})
        for seed in map(str, range(arguments.seeds)):
            for way in WAYS:
                if seed not in found["curves"][way]:
                    losses = train(MODELS[name], way, int(seed), arguments.device, arguments.steps)
                    found["curves"][way][seed] = [float(f"{loss:.5g}") for loss in losses]
                    path.write_text(json.dumps(record) + "\n")
        found |= verdict(found["curves"])
        path.write_text(json.dumps(record) + "\n")
        outcome = "met" if found["met"] else "MISSED"
        numbers = f"autocast {found['autocast']:.4f} boost {found['boost']:.4f} ({100 * found['relative']:.2f}%"
        print(f"{name:8} {numbers}, spread of seeds {found['spread']:.4f}) {outcome}", flush=True)


if __name__ == "__main__":
    main()
