"""A GPT-3 1.3B block with its loss, forward and backward: apex.transformer beside plain torch and torch.compile.

    python benchmarks/transformer_block.py --limit 500
    python benchmarks/transformer_block.py --tiny  # on a CPU, to try the script

World size 1: norm, queries, keys and values, rotary embedding, causal attention, projection, norm, SwiGLU, norm, logits
of 51,200 words, cross-entropy; hidden size 2048, 16 heads, 4 sequences of 2048 tokens, bfloat16. Attention comes in two
kinds: "sdpa" is PyTorch's own in all columns, "softmax" has the scores in memory. All columns have the same weights and
inputs; they take turns, one round each at a time, so that a drift of the machine hits all alike. A figure is the median
of the rounds.

Then the peak of memory in the backward pass over what was there before it, of the block's linear layers with float32
sums of their gradients: once with gradient_accumulation_fusion, once with gradients that are added and let go.

The result file is written after every column, every round and every figure of memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from apex._bench.environment import describe, device_name, device_stem
from apex.fused_bias_swiglu import fused_bias_swiglu
from apex.transformer import parallel_state
from apex.transformer.functional import fused_apply_rotary_pos_emb, scaled_upper_triang_masked_softmax
from apex.transformer.layers import FusedLayerNorm
from apex.transformer.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    model_parallel_cuda_manual_seed,
    vocab_parallel_cross_entropy,
)

COLUMNS = ("torch", "torch.compile", "apex", "apex + torch.compile")
RESULTS = Path(__file__).parent / "results"


class Sizes(NamedTuple):
    """Of the model and its batch."""

    hidden: int = 2048
    heads: int = 16
    sequence: int = 2048
    batch: int = 4
    words: int = 51200


TINY = Sizes(hidden=64, heads=4, sequence=32, batch=2, words=128)


def attend(queries: Tensor, keys: Tensor, values: Tensor, softmax: Callable[[Tensor, float], Tensor] | None) -> Tensor:
    """Causal attention of [sequence, batch, heads, size]: PyTorch's, or with `softmax` of scores in memory."""
    queries, keys, values = (each.permute(1, 2, 0, 3) for each in (queries, keys, values))
    if softmax is None:
        output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    else:
        scores = queries.flatten(0, 1) @ keys.flatten(0, 1).transpose(1, 2)
        output = (softmax(scores, queries.shape[-1] ** -0.5) @ values.flatten(0, 1)).view_as(queries)
    return output.permute(2, 0, 1, 3).flatten(2)


class Ours(nn.Module):
    """Of apex.transformer's layers and fused functions."""

    def __init__(self, sizes: Sizes, softmax: bool, fusion: bool = False) -> None:
        super().__init__()
        self.sizes, self.softmax = sizes, softmax
        options: dict[str, Any] = {"params_dtype": torch.bfloat16, "gradient_accumulation_fusion": fusion}
        hidden = sizes.hidden
        column = {**options, "gather_output": False}
        self.norms = nn.ModuleList(FusedLayerNorm(hidden) for _ in range(3)).to(torch.bfloat16)
        self.attention_in = ColumnParallelLinear(hidden, 3 * hidden, **column)
        self.attention_out = RowParallelLinear(hidden, hidden, input_is_parallel=True, **options)
        self.up = ColumnParallelLinear(hidden, 8 * hidden, stride=2, skip_bias_add=True, **column)
        self.down = RowParallelLinear(4 * hidden, hidden, input_is_parallel=True, **options)
        self.head = ColumnParallelLinear(hidden, sizes.words, bias=False, **column)

    def forward(self, x: Tensor, angles: Tensor, targets: Tensor) -> Tensor:
        mixed = self.attention_in(self.norms[0](x))[0]
        queries, keys, values = mixed.view(*mixed.shape[:2], self.sizes.heads, -1).chunk(3, -1)
        queries, keys = fused_apply_rotary_pos_emb(queries, angles), fused_apply_rotary_pos_emb(keys, angles)
        softmax = (
            (lambda scores, scale: scaled_upper_triang_masked_softmax(scores, None, scale)) if self.softmax else None
        )
        x = x + self.attention_out(attend(queries, keys, values, softmax))[0]
        hidden, bias = self.up(self.norms[1](x))
        x = x + self.down(fused_bias_swiglu(hidden, bias))[0]
        return vocab_parallel_cross_entropy(self.head(self.norms[2](x))[0], targets).mean()


class Plain(nn.Module):
    """The same in PyTorch's own layers and functions."""

    def __init__(self, sizes: Sizes, softmax: bool) -> None:
        super().__init__()
        self.sizes, self.softmax = sizes, softmax
        hidden = sizes.hidden
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(3))
        self.attention_in = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 8 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.head = nn.Linear(hidden, sizes.words, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor, angles: Tensor, targets: Tensor) -> Tensor:
        mixed = self.attention_in(self.norms[0](x))
        queries, keys, values = mixed.view(*mixed.shape[:2], self.sizes.heads, -1).chunk(3, -1)
        queries, keys = rotated(queries, angles), rotated(keys, angles)
        softmax = causal_softmax if self.softmax else None
        x = x + self.attention_out(attend(queries, keys, values, softmax))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * value)
        return F.cross_entropy(self.head(self.norms[2](x)).flatten(0, 1).float(), targets.flatten())


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()).to(x.dtype)


def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores * scale).masked_fill(hidden, float("-inf")).softmax(-1)


def inputs_of(sizes: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    shape = (sizes.sequence, sizes.batch)
    x = torch.randn(*shape, sizes.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    half = sizes.hidden // sizes.heads // 2
    angles = torch.arange(sizes.sequence, device=device)[:, None] * 10000.0 ** -(
        torch.arange(half, device=device) / half
    )
    angles = torch.cat([angles, angles], -1).view(sizes.sequence, 1, 1, -1)
    return x, angles, torch.randint(0, sizes.words, shape, device=device)


def contenders(sizes: Sizes, softmax: bool, arguments: argparse.Namespace) -> dict[str, Callable[[], nn.Module]]:
    """Ways to make each column's model; all get the weights of the first."""
    plain = Plain(sizes, softmax)

    def with_weights(model: nn.Module) -> nn.Module:
        model.load_state_dict(plain.state_dict())
        return model.to(arguments.device)

    # Generated C++ takes longer to build than a trial may.
    compiled = {"backend": "aot_eager"} if arguments.tiny else {}
    return {
        "torch": lambda: with_weights(Plain(sizes, softmax)),
        "torch.compile": lambda: torch.compile(with_weights(Plain(sizes, softmax)), fullgraph=True, **compiled),
        "apex": lambda: with_weights(Ours(sizes, softmax)),
        "apex + torch.compile": lambda: torch.compile(with_weights(Ours(sizes, softmax)), **compiled),
    }


def measure(softmax: bool, arguments: argparse.Namespace, deadline: float, note: Callable[[Any], None]) -> None:
    """All columns of one kind of attention, in milliseconds."""
    sizes = TINY if arguments.tiny else Sizes()
    batch = inputs_of(sizes, arguments.device)
    models, columns = {}, {}
    for name, make in contenders(sizes, softmax, arguments).items():
        if name not in arguments.columns or time.monotonic() > deadline:
            continue
        start = time.monotonic()
        try:
            models[name] = make()
            for _ in range(arguments.warmup):
                loss = models[name](*batch)
                loss.backward()
            columns[name] = {"loss": float(loss.detach()), "warm_up_seconds": round(time.monotonic() - start, 1)}
        except Exception as error:
            models.pop(name, None)
            columns[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        note(columns)
    rounds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(arguments.rounds):
        if time.monotonic() > deadline:
            break
        for name, model in models.items():
            rounds[name].append(milliseconds(model, batch, arguments))
        for name, figures in rounds.items():
            columns[name].update(milliseconds=round(statistics.median(figures), 4), rounds=figures)
        for name in rounds:
            if "torch" in models:
                ratio = columns[name]["milliseconds"] / columns["torch"]["milliseconds"]
                columns[name]["times_torch"] = round(ratio, 4)
        note(columns)


def milliseconds(model: nn.Module, batch: tuple[Tensor, ...], arguments: argparse.Namespace) -> float:
    """The mean of `--steps` passes forward and backward."""
    wait = torch.cuda.synchronize if arguments.device == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    for _ in range(arguments.steps):
        model.zero_grad()
        model(*batch).backward()
    wait()
    return round(1000 * (time.perf_counter() - start) / arguments.steps, 4)


def memory_of_gradients(fusion: bool, sizes: Sizes) -> dict[str, float]:
    """Mebibytes on the device that a backward pass adds at its peak, with float32 sums of the gradients."""
    model = Ours(sizes, softmax=False, fusion=fusion).to("cuda")
    batch = inputs_of(sizes, "cuda")
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        if not fusion:
            weight.register_post_accumulate_grad_hook(add_and_let_go)
    peaks = []
    for _ in range(2):  # the first one allocates workspaces
        loss = model(*batch)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
    return {
        "peak_mebibytes": round(peaks[-1], 1),
        "largest_weight_gradient_mebibytes": round(max(w.numel() * w.element_size() for w in weights) / 2**20, 1),
        "sum_of_main_grads": float(sum(weight.main_grad.abs().sum() for weight in weights)),
    }


def add_and_let_go(weight: Any) -> None:
    weight.main_grad.add_(weight.grad)
    weight.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", choices=["sdpa", "softmax"], default=["sdpa", "softmax"])
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--steps", type=int, default=10, help="passes per round")
    parser.add_argument("--rounds", type=int, default=7, help="how often the columns take turns")
    parser.add_argument("--warmup", type=int, default=3, help="passes before them")
    parser.add_argument("--limit", type=float, default=86400.0, help="seconds after which nothing more is measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit
    device = torch.device(arguments.device)
    path = arguments.output or RESULTS / f"{device_stem(device_name(device))}-transformer_block.json"
    sizes = TINY if arguments.tiny else Sizes()
    results: dict[str, Any] = {"environment": describe(device), "sizes": sizes._asdict(), "attention": {}, "memory": {}}

    def write() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if arguments.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0)
        if arguments.device == "cuda":
            for name, fusion in (("added", False), ("gradient_accumulation_fusion", True)):
                results["memory"][name] = memory_of_gradients(fusion, sizes)
                write()
        for kind in arguments.attention:

            def note(columns: Any, kind: str = kind) -> None:
                results["attention"][kind] = columns
                write()

            measure(kind == "softmax", arguments, deadline, note)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    print(json.dumps({name: results[name] for name in ("attention", "memory")}, indent=1))


if __name__ == "__main__":
    main()
