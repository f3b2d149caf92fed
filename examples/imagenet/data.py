"""Pictures from a folder or made up, and the way from the loader to the device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
# Mean and standard deviation of ImageNet's red, green and blue, for values from 0 to 255.
MEAN = (123.675, 116.28, 103.53)
DEVIATION = (58.395, 57.12, 57.375)


class Folder(Dataset):
    """Pictures in one folder per class, as bytes (3, side, side); cropped at random for training."""

    def __init__(self, root: Path, side: int, training: bool) -> None:
        self.side, self.training = side, training
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise FileNotFoundError(f"no pictures in {root}/CLASS/ (looked for {', '.join(sorted(SUFFIXES))})")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image  # only real pictures need it

        path, label = self.files[index]
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
        size = (self.side, self.side)
        picture = picture.resize(size, Image.Resampling.BILINEAR, box=self._box(*picture.size))
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(self.side, self.side, 3).permute(2, 0, 1)
        if self.training and random.random() < 0.5:
            pixels = pixels.flip(2)
        return pixels.contiguous(), label

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """What of a picture is used: a random rectangle of 8 to 100% of it, or the square in the middle."""
        if not self.training:
            edge = 0.875 * min(width, height)
            left, top = (width - edge) / 2, (height - edge) / 2
            return left, top, left + edge, top + edge
        area, ratio = random.uniform(0.08, 1) * width * height, random.uniform(3 / 4, 4 / 3)
        w, h = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
        left, top = random.uniform(0, width - w), random.uniform(0, height - h)
        return left, top, left + w, top + h


class Synthetic(Dataset):
    """Noise whose brightness depends on the class, so that there is something to learn."""

    def __init__(self, count: int, side: int, classes: int = 10) -> None:
        self.count, self.side, self.classes = count, side, [str(label) for label in range(classes)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = index % len(self.classes)
        noise = torch.randint(128, (3, self.side, self.side), generator=torch.Generator().manual_seed(index))
        return (noise + 127 * label // len(self.classes)).to(torch.uint8), label


class Prefetcher:
    """Batches of a loader on the device, as normalised floats.

    On a GPU a stream of its own copies the next batch while the present one is used.
    """

    def __init__(self, loader: DataLoader, device: torch.device, memory_format: torch.memory_format) -> None:
        self.loader, self.device, self.memory_format = loader, device, memory_format
        self.mean, self.deviation = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.device.type != "cuda":
            yield from map(self._prepare, self.loader)
            return
        stream, using = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        present = None
        for batch in self.loader:
            with torch.cuda.stream(stream):
                following = self._prepare(batch)
            if present is not None:
                yield present
            using.wait_stream(stream)
            for tensor in following:
                tensor.record_stream(using)  # its memory must not be taken again before `using` is done with it
            present = following
        if present is not None:
            yield present

    def _prepare(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        pictures, labels = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        pictures = pictures.float().sub_(self.mean).div_(self.deviation)
        return pictures.contiguous(memory_format=self.memory_format), labels
