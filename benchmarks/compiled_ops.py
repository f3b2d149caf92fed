"""Time and memory of ops in compiled code, with our kernels as an opaque operator or as PyTorch's operators to fuse.

    python benchmarks/compiled_ops.py --cases "layer norm" rope --at-once 6

Every case is an op between its usual neighbours, forward and backward, compiled three ways: with PyTorch's module, with
ours as it is by default, and with ours decomposed into PyTorch's operators, which Inductor can fuse. On a GPU one pass
of all is captured in a graph, so that a figure, the median of replays in microseconds, is the GPU's time; behind it is
the peak of allocated memory in MiB beyond inputs and parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from amp_models import NormReLU, fused_norm
from step_models import LlamaBlock, gelu_layers, group_norm_silu, layer_norm, rms_norm, token_loss
from torch import Tensor, nn

import apex
from apex import ops
from apex.contrib.focal_loss import focal_loss
from apex.contrib.index_mul_2d import index_mul_2d
from apex.ops import _library

Case = tuple[nn.Module, tuple[Tensor, ...]]
Task = tuple[str, str, tuple[int, ...]]  # a case, a way and sizes


class Called(nn.Module):
    """A function of modules and inputs, which are its parameters' and tensors' owners."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(modules)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.parts, *inputs)


def norm(make: Callable[[int, bool], nn.Module]) -> Callable[..., Case]:
    def case(fused: bool, tokens: int, width: int) -> Case:
        """A residual addition before it, a dense layer behind it."""
        parts = {"before": nn.Linear(width, width), "norm": make(width, fused), "after": nn.Linear(width, width)}

        def run(parts: Any, x: Tensor, y: Tensor) -> Tensor:
            x = x + parts["before"](y)
            return x + parts["after"](parts["norm"](x))

        return Called(run, **parts), (torch.randn(tokens, width), torch.randn(tokens, width))

    return case


def plain_norm(fused: bool, tokens: int, width: int) -> Case:
    """PyTorch's layer norm behind dropout and a residual addition, as in BERT; ours by `apex.fuse`."""
    parts = nn.ModuleDict({"before": nn.Linear(width, width), "norm": nn.LayerNorm(width)})
    parts["after"] = nn.Linear(width, width)
    if fused:
        apex.fuse(parts, verbose=False)

    def run(parts: Any, x: Tensor, y: Tensor) -> Tensor:
        x = parts["norm"](x + F.dropout(parts["before"](y), 0.1))
        return x + parts["after"](x)

    return Called(run, **parts), (torch.randn(tokens, width), torch.randn(tokens, width))


def permuted_norm(fused: bool, images: int, channels: int, size: int) -> Case:
    """A block of ConvNeXt: the norm's input is an image of which channels are moved to the end."""
    parts = nn.ModuleDict({"before": nn.Conv2d(channels, channels, 7, padding=3, groups=channels)})
    parts["norm"], parts["up"] = nn.LayerNorm(channels), nn.Linear(channels, 4 * channels)
    parts["down"] = nn.Linear(4 * channels, channels)
    if fused:
        apex.fuse(parts, verbose=False)

    def run(parts: Any, image: Tensor) -> Tensor:
        x = parts["norm"](parts["before"](image).permute(0, 2, 3, 1))
        return image + parts["down"](F.gelu(parts["up"](x))).permute(0, 3, 1, 2)

    return Called(run, **parts), (torch.randn(images, channels, size, size),)


def plain_loss(cast: bool) -> Callable[..., Case]:
    def case(fused: bool, tokens: int, classes: int) -> Case:
        """PyTorch's cross-entropy behind a head, whose logits a `cast` makes float32; ours by `apex.fuse`."""
        parts = nn.ModuleDict({"head": nn.Linear(768, classes), "loss": nn.CrossEntropyLoss()})
        if fused:
            apex.fuse(parts, verbose=False)

        def run(parts: Any, x: Tensor, labels: Tensor) -> Tensor:
            logits = parts["head"](x)
            return parts["loss"](logits.float() if cast else logits, labels)

        return Called(run, **parts), (torch.randn(tokens, 768), torch.randint(classes, (tokens,)))

    return case


def llama(fused: bool, tokens: int, width: int) -> Case:
    """Rotary embeddings before an attention, a gated unit between dense layers; PyTorch's norms."""
    block = LlamaBlock(width, max(1, width // 64), 2 * width, fused)
    block.norm1, block.norm2 = rms_norm(width, False), rms_norm(width, False)
    angles = torch.rand(tokens // 2, 1, 1, min(width, 64))
    block.register_buffer("cos", angles.cos())
    block.register_buffer("sin", angles.sin())

    def run(parts: Any, x: Tensor) -> Tensor:
        return parts["block"](x, parts["block"].cos, parts["block"].sin)

    return Called(run, block=block), (torch.randn(2, tokens // 2, width),)


def softmax(fused: bool, batch: int, length: int) -> Case:
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def run(parts: Any, query: Tensor, key: Tensor, hidden: Tensor) -> Tensor:
        scores = query @ key.transpose(1, 2)
        if fused:
            return ops.masked_softmax(scores, scale=0.125, causal=True) @ key
        return torch.softmax((scores * 0.125).masked_fill(hidden, -torch.inf).float(), -1).to(query.dtype) @ key

    return Called(run), (torch.randn(batch, length, 64), torch.randn(batch, length, 64), hidden)


def loss(fused: bool, tokens: int, classes: int) -> Case:
    head = nn.Linear(768, classes, bias=False)
    run = lambda parts, x, labels: token_loss(x, parts["head"].weight, labels, fused)  # noqa: E731
    return Called(run, head=head), (torch.randn(1, tokens, 768), torch.randint(classes, (1, tokens)))


def group_norm(fused: bool, images: int, channels: int, size: int) -> Case:
    parts = {"norm": group_norm_silu(channels, fused), "after": nn.Conv2d(channels, channels, 3, padding=1)}
    image = torch.randn(images, channels, size, size).to(memory_format=torch.channels_last)
    return Called(lambda parts, x: x + parts["after"](parts["norm"](x)), **parts), (image,)


def batch_norm(fused: bool, images: int, channels: int, size: int) -> Case:
    parts = {
        "before": nn.Conv2d(channels, channels, 1, bias=False),
        "norm": (fused_norm if fused else NormReLU)(channels, True),
    }
    image = torch.randn(images, channels, size, size).to(memory_format=torch.channels_last)
    return Called(lambda parts, x: parts["norm"](parts["before"](x), x), **parts), (image,)


def dense(fused: bool, tokens: int, width: int) -> Case:
    run = lambda parts, x: x + parts["layers"](x)  # noqa: E731
    return Called(run, layers=gelu_layers(width, fused)), (torch.randn(tokens, width),)


def focal(fused: bool, anchors: int, classes: int) -> Case:
    def run(parts: Any, logits: Tensor, targets: Tensor, positives: Tensor) -> Tensor:
        if fused:
            return focal_loss(logits, targets, positives, classes, 0.25, 2.0)
        wide = logits.float()
        right = F.one_hot(targets.clamp(min=0), classes) * (targets >= 0)[:, None]
        cross = F.binary_cross_entropy_with_logits(wide, right.float(), reduction="none")
        chance = wide.sigmoid()
        missing = torch.where(right == 1, 1 - chance, chance)
        share = torch.where(right == 1, 0.25, 0.75)
        return (share * missing.square() * cross).sum() / positives.sum()

    return Called(run), (torch.randn(anchors, classes), torch.randint(-1, classes, (anchors,)), torch.tensor([9.0]))


def index_mul(fused: bool, count: int, width: int) -> Case:
    run = lambda parts, a, b, index: index_mul_2d(a, b, index) if fused else a[index] * b  # noqa: E731
    return Called(run), (torch.randn(count // 8, width), torch.randn(count, width), torch.randint(count // 8, (count,)))


# Per case the family whose way is changed, what makes it, and sizes: two that are usual, and a tiny one.
CASES: dict[str, tuple[str, Callable[..., Case], tuple[tuple[int, ...], ...]]] = {
    "layer norm": ("norm", norm(layer_norm), ((8192, 768), (8192, 4096), (8, 16))),
    "rms norm": ("norm", norm(rms_norm), ((8192, 1024), (8192, 4096), (8, 16))),
    "layer norm, autocast": ("norm", norm(layer_norm), ((8192, 768), (8192, 4096), (8, 16))),
    "rms norm, autocast": ("norm", norm(rms_norm), ((8192, 1024), (8192, 4096), (8, 16))),
    "dropout + layer norm": ("norm", plain_norm, ((16384, 768), (8192, 4096), (8, 16))),
    "dropout + layer norm, autocast": ("norm", plain_norm, ((16384, 768), (8192, 4096), (8, 16))),
    "permuted layer norm": ("norm", permuted_norm, ((96, 96, 56), (96, 384, 14), (2, 8, 4))),
    "float32 loss": ("xentropy", plain_loss(True), ((16384, 30522), (8192, 50304), (8, 16))),
    "loss": ("xentropy", plain_loss(False), ((16384, 30522), (8192, 50304), (8, 16))),
    "loss, autocast": ("xentropy", plain_loss(False), ((16384, 30522), (8192, 50304), (8, 16))),
    "rope": ("rope", llama, ((8192, 1024), (8192, 4096), (8, 16))),
    "glu": ("glu", llama, ((8192, 1024), (8192, 4096), (8, 16))),
    "softmax": ("softmax", softmax, ((96, 1024), (32, 2048), (2, 8))),
    "xentropy": ("xentropy", loss, ((8192, 50257), (8192, 32000), (8, 16))),
    "group norm": ("group_norm", group_norm, ((8, 320, 64), (8, 1280, 16), (2, 8, 4))),
    "batch norm": ("batch_norm", batch_norm, ((64, 256, 56), (64, 1024, 14), (2, 8, 4))),
    "dense": ("dense", dense, ((8192, 768), (8192, 4096), (8, 16))),
    "focal loss": ("focal_loss", focal, ((76725, 80), (613800, 80), (8, 4))),
    "index_mul": ("index_mul", index_mul, ((100000, 128), (800000, 256), (16, 4))),
}
WAYS = ("torch", "operator", "decomposed")


def prepared(case: str, way: str, sizes: tuple[int, ...], device: str) -> Callable[[], tuple[float, float]]:
    """Compile a forward and a backward pass, capture them on a GPU, and return what measures microseconds and MiB."""
    _, make, _ = CASES[case]
    torch._dynamo.config.recompile_limit = 64  # functions of earlier cases are still there, and still compiled
    torch.manual_seed(0)
    network, given = make(way != "torch", *sizes)
    layout = torch.channels_last if given[0].dim() == 4 and "norm" in case else torch.preserve_format
    autocast = case.endswith("autocast")
    dtype = torch.float32 if autocast else torch.bfloat16
    network = network.to(device, dtype, memory_format=layout)
    inputs = [each.to(device, dtype) if each.is_floating_point() else each.to(device) for each in given]
    inputs = [each.requires_grad_() if each.dim() > 1 and each.is_floating_point() else each for each in inputs]
    wanted = [each for each in (*inputs, *network.parameters()) if each.requires_grad]
    compiled = torch.compile(network, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")

    def forward() -> Tensor:
        with (
            _library.implementation("torch" if way == "decomposed" else "auto"),
            torch.autocast(device, torch.bfloat16, enabled=autocast),
        ):
            return compiled(*inputs)

    gradient = torch.randn_like(forward())

    def once() -> None:
        torch.autograd.grad(forward(), wanted, gradient, allow_unused=True)

    if device == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                once()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            once()
            memory = (torch.cuda.max_memory_allocated() - before) / 2**20
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            once()
        return lambda: (_median_of_replays(graph, once), memory)

    def measure() -> tuple[float, float]:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            once()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times), 0.0

    return measure


def _median_of_replays(graph: torch.cuda.CUDAGraph, _owner: Any) -> float:
    """Return microseconds of one replay; `_owner` holds the tensors that the graph has the addresses of."""
    times = []
    for _ in range(3 + 20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[3:])


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns, or its error in words: one way that fails leaves the others."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def work(rows: list[list[Task]], device: str, limit: float, barrier: Any, lock: Any, results: Any) -> None:
    """Prepare the tasks, wait until all processes have done so or the limit is over, and measure alone.

    The tasks of a row are measured in turns, so that a drift of the GPU's clock hits all of them alike.
    """
    start = time.monotonic()
    ready = [[(task, attempt(lambda task=task: prepared(*task, device))) for task in row] for row in rows]
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(max(0.0, limit - (time.monotonic() - start)))
    for row in ready:
        with lock:
            rounds = [[attempt(measure) if callable(measure) else measure for _, measure in row] for _ in range(5)]
        for (task, _), cells in zip(row, zip(*rounds, strict=True), strict=True):
            wrong = next((cell for cell in cells if isinstance(cell, str)), None)
            results.put((task, wrong or (statistics.median(cell[0] for cell in cells), cells[0][1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--at-once", type=int, default=1, help="processes that compile; they measure in turns")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which nothing more is waited for")
    parser.add_argument("--one-size", action="store_true", help="the first size of each case alone")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script on a CPU")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {case: CASES[case][2][-1:] if arguments.tiny else CASES[case][2][:-1] for case in arguments.cases}
    rows = [(case, size) for case in arguments.cases for size in sizes[case][: 1 if arguments.one_size else None]]
    tasks: list[list[Task]] = [[(case, way, size) for way in arguments.ways] for case, size in rows]
    count = min(arguments.at_once, len(tasks))
    spawn = multiprocessing.get_context("spawn")
    barrier, lock, results = spawn.Barrier(count), spawn.Lock(), spawn.Queue()
    for index in range(count):
        given = (tasks[index::count], device, 0.8 * arguments.limit, barrier, lock, results)
        spawn.Process(target=work, args=given, daemon=True).start()
    found: dict[Task, tuple[float, float] | str] = dict.fromkeys((task for row in tasks for task in row), "out of time")
    deadline = time.monotonic() + arguments.limit
    with contextlib.suppress(queue.Empty):
        for _ in range(len(found)):
            found.update([results.get(timeout=max(0.0, deadline - time.monotonic()))])
    print(f"{'us and MiB, ' + device:40}", *(f"{way:>18}" for way in arguments.ways))
    for case, size in rows:
        cells = [found[case, way, size] for way in arguments.ways]
        shown = [f"{'failed':>18}" if isinstance(cell, str) else f"{cell[0]:11.1f} {cell[1]:6.0f}" for cell in cells]
        print(f"{case + ' ' + 'x'.join(map(str, size)):40}", *shown)
    for task, cell in found.items():
        if isinstance(cell, str):
            print(*task, cell)


if __name__ == "__main__":
    main()
