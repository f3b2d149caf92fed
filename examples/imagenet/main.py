"""Train a ResNet on folders of pictures, or on made-up ones, at any opt level of amp."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from data import Folder, Prefetcher, Synthetic
from models import ARCHITECTURES, make_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from apex import amp, graphs
from apex.checkpoint import load, save
from apex.optimizers import FusedSGD


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("data", type=Path, nargs="?", help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
    source.add_argument("--synthetic", type=int, metavar="COUNT", help="make up this many pictures per epoch instead")
    parser.add_argument("--arch", default="resnet50", choices=ARCHITECTURES, help="model")
    parser.add_argument("--side", type=int, default=224, help="side of a picture")
    parser.add_argument("--epochs", type=int, default=90, help="rounds through the data")
    parser.add_argument("--batch", type=int, default=256, help="pictures per step")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate for a batch of 256; scaled for others")
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum")
    parser.add_argument("--weight-decay", type=float, default=1e-4, help="weight decay")
    parser.add_argument("--fused", action="store_true", help="apex.optimizers.FusedSGD instead of torch.optim.SGD")
    parser.add_argument("--graph", action="store_true", help="every step in one launch, a CUDA graph; with --fused")
    parser.add_argument("--opt-level", default="O1", choices=("O0", "O1", "O2", "O3", "O4", "O5"), help="of amp")
    parser.add_argument("--loss-scale", help="a number or 'dynamic', instead of the opt level's")
    parser.add_argument("--keep-batchnorm-fp32", choices=("True", "False"), help="instead of the opt level's")
    parser.add_argument("--channels-last", action="store_true", help="memory format that tensor cores prefer")
    parser.add_argument("--fused-norms", action="store_true", help="norm, addition and ReLU in one; channels last, too")
    parser.add_argument(
        "--checkpoint", default="checkpoint.pt", help="written after every epoch; {epoch} in it becomes the number"
    )
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--evaluate", action="store_true", help="validate and train nothing")
    parser.add_argument("--workers", type=int, default=4, help="processes that read pictures")
    parser.add_argument("--print-every", type=int, default=10, help="steps between lines of progress")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    args = parser.parse_args()
    args.channels_last |= args.fused_norms
    return args


def seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def make_datasets(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    if args.synthetic is not None:
        return Synthetic(args.synthetic, args.side), Synthetic(max(10, args.synthetic // 10), args.side)
    return Folder(args.data / "train", args.side, training=True), Folder(args.data / "val", args.side, training=False)


def make_prefetcher(args: argparse.Namespace, dataset: Dataset, training: bool) -> Prefetcher:
    device = torch.device(args.device)
    pinned = device.type == "cuda"
    loader = DataLoader(
        dataset, args.batch, shuffle=training, drop_last=training, num_workers=args.workers, pin_memory=pinned
    )
    return Prefetcher(loader, device, torch.channels_last if args.channels_last else torch.contiguous_format)


def learning_rate(args: argparse.Namespace, epochs: float) -> float:
    """After so many epochs: up in a straight line for the first twentieth of the run, then down along a cosine."""
    peak, progress = args.lr * args.batch / 256, epochs / args.epochs
    return peak * min((progress + 1e-3) / 0.05, 0.5 * (1 + math.cos(math.pi * progress)))


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """What happens to a batch: everything but the schedule, which is Python and stays outside of a graph."""

    def train_step(pictures: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()  # first, so that the old gradients need no memory during the forward pass
        loss = nn.functional.cross_entropy(model(pictures), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss

    return train_step


def train(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_step: Callable[[Tensor, Tensor], Tensor],
    data: Prefetcher,
    epoch: int,
) -> None:
    model.train()
    total_loss, start, counted = torch.zeros((), device=args.device), time.perf_counter(), 0
    for step, (pictures, labels) in enumerate(data, 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, epoch + (step - 1) / len(data))
        loss = train_step(pictures, labels)
        total_loss += loss.detach()  # stays on the device; reading it at every step would wait for the GPU
        counted += 1
        if step % args.print_every == 0 or step == len(data):
            mean_loss, seconds = total_loss.item() / counted, time.perf_counter() - start
            speed = counted * args.batch / seconds
            print(
                f"epoch {epoch + 1} step {step}/{len(data)}: loss {mean_loss:.4f}, {speed:.1f} pictures/s", flush=True
            )
            total_loss, start, counted = torch.zeros_like(total_loss), time.perf_counter(), 0


@torch.no_grad()
def validate(args: argparse.Namespace, model: nn.Module, data: Prefetcher) -> float:
    """The share of pictures whose class is right."""
    model.eval()
    right, count = torch.zeros((), device=args.device), 0
    for pictures, labels in data:
        right += (model(pictures).argmax(1) == labels).sum()
        count += len(labels)
    return right.item() / count


def load_checkpoint(path: Path, args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    checkpoint = load(path, map_location=args.device)
    for name in ("arch", "opt_level"):
        if checkpoint[name] != getattr(args, name):
            raise SystemExit(f"{path} was written with {name} {checkpoint[name]}, not {getattr(args, name)}")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    return checkpoint


def main() -> None:
    args = parse_arguments()
    seed_everything(args.seed)
    training_set, validation_set = make_datasets(args)
    training_data = make_prefetcher(args, training_set, training=True)
    validation_data = make_prefetcher(args, validation_set, training=False)
    if len(training_data) == 0:
        raise SystemExit(f"{len(training_set)} pictures do not fill a batch of {args.batch}; lower --batch")

    model = make_model(args.arch, len(training_set.classes), args.fused_norms).to(args.device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    make_optimizer = FusedSGD if args.fused else torch.optim.SGD
    optimizer = make_optimizer(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        loss_scale=args.loss_scale,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
    )

    first_epoch, best = 0, 0.0
    if args.resume is not None:  # after initialize, which makes what is loaded into
        checkpoint = load_checkpoint(args.resume, args, model, optimizer)
        first_epoch, best = checkpoint["epoch"], checkpoint["best"]
        print(f"resumed from {args.resume} after epoch {first_epoch}")
    if args.evaluate:
        print(f"accuracy {validate(args, model, validation_data):.2%}")
        return

    train_step = make_step(model, optimizer)
    if args.graph:
        train_step = graphs.capture(train_step)
    for epoch in range(first_epoch, args.epochs):
        # So that a run that resumes sees the same order as one that did not stop.
        seed_everything(args.seed + 1 + epoch)
        train(args, model, optimizer, train_step, training_data, epoch)
        accuracy = validate(args, model, validation_data)
        best = max(best, accuracy)
        print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}, best {best:.2%}", flush=True)
        checkpoint = {
            "arch": args.arch,
            "opt_level": args.opt_level,
            "epoch": epoch + 1,
            "best": best,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
        # Whole or not at all: a crash leaves the file of before.
        save(checkpoint, args.checkpoint.format(epoch=epoch + 1))


if __name__ == "__main__":
    main()
