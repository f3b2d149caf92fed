"""Experts of a mixture on a GPU, beside the way of transformers (PyTorch's `grouped_mm`) and Liger-Kernel's.

    python benchmarks/moe.py [--out FOLDER] [--only NAME] [--liger]
    python benchmarks/moe.py --layer [--out FOLDER]    # MoELayer beside transformers' Qwen3MoeSparseMoeBlock

bfloat16, forward and forward + backward, at the sizes of published models and with four routings: every expert the same
number of rows, numbers of rows by Zipf's law, all rows at the first K experts, and only every other expert used.
Milliseconds between CUDA events, the median of passes in turns; each is launched while one of its kind runs. A step has
18 N H F operations for N rows.

Liger-Kernel tries up to 40 tiles for each of its seven kernels, which takes minutes for each shape. Here it chooses
between two of them for each product, with 4 and 8 warps, and has one for its sum (`TILES`).

A layer, with router and combination, has Qwen3-30B's sizes and 8192 tokens; it is called eagerly and as a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from apex._bench.environment import describe, device_name, device_stem
from apex.ops.moe import moe_experts
from apex.transformer.moe import MoELayer
from apex.transformer.testing.standalone_transformer_lm import TransformerConfig

RESULTS = Path(__file__).parent / "results"
ROUTINGS = ("balanced", "zipf", "one", "empty")
ROUNDS = 11


class Shape(NamedTuple):
    """Sizes of a layer: experts, experts per token, hidden size, width and tokens; `gpt_oss`: its layout and unit."""

    experts: int
    chosen: int
    hidden: int
    width: int
    tokens: int
    gpt_oss: bool = False


SHAPES = {
    "Qwen3-30B, 32k tokens": Shape(128, 8, 2048, 768, 32768),
    "Qwen3-30B, 8k tokens": Shape(128, 8, 2048, 768, 8192),
    "Mixtral": Shape(8, 2, 4096, 14336, 8192),
    "DeepSeek slice": Shape(8, 1, 7168, 2048, 32768),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, 8192, True),
}


# The tiles that Liger-Kernel tries: of products, of gradients of matrices, and of the sum over a token's experts.
TILES: list[dict[str, int]] = [
    {"BLOCK_N": 128, "BLOCK_K": 64, "num_stages": 3},
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32},
    {"BLOCK_H": 256, "BLOCK_K": 8, "num_warps": 4},
]


def route(shape: Shape, routing: str) -> Tensor:
    """Return the experts of each token, [tokens, chosen], different ones for each token."""
    make = torch.Generator("cuda").manual_seed(0)
    options: Any = {"dtype": torch.float32, "device": "cuda"}
    if routing == "balanced":  # consecutive experts, in turns
        first = torch.arange(shape.tokens, device="cuda", dtype=torch.int64) * shape.chosen
        return (first[:, None] + torch.arange(shape.chosen, device="cuda", dtype=torch.int64)) % shape.experts
    if routing == "one":
        return torch.arange(shape.chosen, device="cuda", dtype=torch.int64).expand(shape.tokens, -1).contiguous()
    rank = torch.arange(1, shape.experts + 1, **options)
    share = 1 / rank if routing == "zipf" else (rank % 2).clamp(min=1e-30)
    noise = torch.rand(shape.tokens, shape.experts, generator=make, **options)
    return (share.log() - (-noise.log()).log()).topk(shape.chosen).indices  # draws without replacement


def tensors(shape: Shape) -> dict[str, Any]:
    make = torch.Generator("cuda").manual_seed(1)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(sizes, generator=make, device="cuda", dtype=torch.bfloat16) * scale
        return values.requires_grad_()

    first, second = (2 * shape.width, shape.hidden), (shape.hidden, shape.width)
    if shape.gpt_oss:
        first, second = first[::-1], second[::-1]
    found: dict[str, Any] = {
        "x": normal(shape.tokens, shape.hidden),
        "gate_up": normal(shape.experts, *first, scale=shape.hidden**-0.5),
        "down": normal(shape.experts, *second, scale=shape.width**-0.5),
        "weight": normal(shape.tokens, shape.chosen),
    }
    if shape.gpt_oss:
        found["biases"] = (normal(shape.experts, 2 * shape.width), normal(shape.experts, shape.hidden))
    return found


def ours(shape: Shape, given: dict[str, Any], index: Tensor) -> Tensor:
    options: dict[str, Any] = {}
    if shape.gpt_oss:
        options = dict(bias=given["biases"], activation="clamped", interleaved=True, transposed=True)
    return moe_experts(given["x"], given["gate_up"], given["down"], index, given["weight"], **options)


def grouped(shape: Shape, given: dict[str, Any], index: Tensor) -> Tensor:
    """Compute the experts as transformers 5 does by default: sort, gather, `grouped_mm` twice, sum."""
    product: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    ordered, permutation = index.reshape(-1).sort()
    counts = torch.histc(ordered.int(), bins=shape.experts, min=0, max=shape.experts - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = given["x"][permutation // shape.chosen]
    first, second = (t if shape.gpt_oss else t.transpose(1, 2) for t in (given["gate_up"], given["down"]))
    pre = product(rows, first, offs=ends)
    if shape.gpt_oss:
        pre = pre + given["biases"][0][ordered]
        gate, value = pre[..., ::2].clamp(max=7.0), pre[..., 1::2].clamp(-7.0, 7.0)
        active = (value + 1) * (gate * torch.sigmoid(1.702 * gate))
    else:
        gate, value = pre.chunk(2, -1)
        active = functional.silu(gate) * value
    results = product(active, second, offs=ends)
    if shape.gpt_oss:
        results = results + given["biases"][1][ordered]
    results = results * given["weight"].reshape(-1)[permutation, None]
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.shape[0], device=index.device, dtype=permutation.dtype)
    return results[inverse].view(shape.tokens, shape.chosen, shape.hidden).sum(1)


def liger(shape: Shape) -> Callable[..., Tensor] | None:
    """Return Liger-Kernel's function of the same arguments, None if it is not installed or has no such unit."""
    try:
        from liger_kernel.ops import fused_moe_kernels
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
    except ImportError:
        return None
    if shape.gpt_oss:
        return None
    for kernel in vars(fused_moe_kernels).values():
        if hasattr(kernel, "configs"):
            kernel.configs = [config for config in kernel.configs if is_tried(config)]
            if not kernel.configs:
                raise ValueError(f"TILES name none of the tiles of {kernel}")

    def run(shape: Shape, given: dict[str, Any], index: Tensor) -> Tensor:
        weights = (given["x"], given["gate_up"], given["down"], index.int(), given["weight"])
        return LigerFusedMoEFunction.apply(*weights)

    return run


def is_tried(config: Any) -> bool:
    """Return whether `TILES` has a tile of one of Liger-Kernel's kernels."""
    has = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    sizes = [name for name in has if name.startswith("BLOCK")]
    return any(
        [name for name in tile if name.startswith("BLOCK")] == sizes
        and all(has[name] == value for name, value in tile.items())
        for tile in TILES
    )


def milliseconds(run: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # the GPU is busy with it while the host launches the next one
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.float() - wanted.float()).norm() / wanted.float().norm())


def measure(name: str, routing: str, with_liger: bool) -> dict[str, Any]:
    shape = SHAPES[name]
    index, given = route(shape, routing), tensors(shape)
    leaves = [t for value in given.values() for t in (value if isinstance(value, tuple) else (value,))]
    gradient = torch.randn_like(given["x"])
    calls: dict[str, Any] = {"apex": ours, "grouped_mm": grouped, "liger": liger(shape) if with_liger else None}
    calls = {who: call for who, call in calls.items() if call is not None}

    def step(call: Callable[..., Tensor]) -> list[Tensor]:
        output = call(shape, given, index)
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]

    expected = step(grouped)
    if "liger" in calls and not relative_error(step(calls["liger"])[0], expected[0]) < 3e-2:
        raise AssertionError(f"{name}, {routing}: Liger-Kernel's output is wrong")
    for actual, wanted in zip(step(ours), expected, strict=True):  # rounded at other places
        error = relative_error(actual, wanted)
        # PyTorch adds up the gradient of an indexed bias in bfloat16, row by row: 0.1 off if one expert has all rows.
        if not error < (0.2 if wanted.dim() == 2 and len(wanted) == shape.experts else 3e-2):
            raise AssertionError(f"{name}, {routing}: {list(wanted.shape)} is off by {error:.3f}")
    del expected
    row: dict[str, Any] = {"shape": name, "routing": routing}
    with torch.no_grad():
        runs = {who: (lambda call=call: call(shape, given, index)) for who, call in calls.items()}
        row |= {f"fwd {who}": value for who, value in timed(runs).items()}
    row |= {f"step {who}": v for who, v in timed({w: (lambda c=c: step(c)) for w, c in calls.items()}).items()}
    rows = shape.tokens * shape.chosen
    row["step TFLOPS"] = round(18 * rows * shape.hidden * shape.width / row["step apex"] / 1e9, 1)
    row["step ratio"] = round(row["step apex"] / row["step grouped_mm"], 3)
    return row


def layers(shape: Shape) -> dict[str, nn.Module]:
    """Return a layer with experts and, if transformers is installed, its block with the same weights."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=32,
        vocab_size=32,
        max_position_embeddings=32,
        activation="swiglu",
        params_dtype=torch.bfloat16,
        num_moe_experts=shape.experts,
        moe_ffn_hidden_size=shape.width,
        moe_router_topk=shape.chosen,
    )
    layer = MoELayer(config).cuda()
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    except ImportError:
        return {"apex": layer}
    theirs = Qwen3MoeConfig(
        hidden_size=shape.hidden,
        num_experts=shape.experts,
        num_experts_per_tok=shape.chosen,
        moe_intermediate_size=shape.width,
        norm_topk_prob=True,
    )
    theirs._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        block = Qwen3MoeSparseMoeBlock(theirs).to(torch.bfloat16)
    with torch.no_grad():
        block.gate.weight.copy_(layer.router.weight)
        block.experts.gate_up_proj.copy_(layer.experts.weight1)
        block.experts.down_proj.copy_(layer.experts.weight2)
    return {"apex": layer, "transformers": block}


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of a function."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measure_layer(name: str) -> dict[str, Any]:
    """Return the milliseconds of a layer's forward pass and step, eager and captured."""
    shape = SHAPES[name]
    make = torch.Generator("cuda").manual_seed(1)
    x, gradient = (
        torch.randn(shape.tokens, 1, shape.hidden, generator=make, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    x.requires_grad_()
    found = layers(shape)

    def forward(layer: nn.Module) -> Tensor:
        output = layer(x)
        return output[0] if isinstance(output, tuple) else output

    def step(layer: nn.Module) -> list[Tensor]:
        output = forward(layer)
        return [output.detach(), *torch.autograd.grad(output, [x, *layer.parameters()], gradient)]

    def passed(layer: nn.Module) -> Tensor:
        with torch.no_grad():
            return forward(layer)

    if "transformers" in found:  # equal logits may choose other experts for a few tokens
        results = (step(layer)[:2] for layer in found.values())
        for actual, wanted in zip(*results, strict=True):
            if not (error := relative_error(actual, wanted)) < 5e-2:
                raise AssertionError(f"the layer of {name} is off by {error:.3f}")
    row: dict[str, Any] = {"shape": name}
    kinds: dict[str, Callable[[nn.Module], Any]] = {"fwd": passed, "step": step}
    for kind, function in kinds.items():
        runs: dict[str, Callable[[], Any]] = {who: partial(function, layer) for who, layer in found.items()}
        row |= {f"{kind} {who}": value for who, value in timed(runs).items()}
        graphs = {who: captured(run) for who, run in runs.items()}
        row |= {f"{kind} {who}, captured": value for who, value in timed(graphs).items()}
    return row


def timed(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median milliseconds of each function, called in turns."""
    for run in [*runs.values()] * 2:
        run()
    times: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(ROUNDS):
        for who, run in runs.items():
            times[who].append(milliseconds(run))
    return {who: round(statistics.median(found), 3) for who, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="shapes whose names begin so")
    parser.add_argument("--liger", action="store_true", help="also Liger-Kernel, with a few of its tiles")
    parser.add_argument("--layer", action="store_true", help="a whole layer instead, beside transformers' block")
    options, device = parser.parse_args(), torch.device("cuda")
    stem = options.out / device_stem(device_name(device))
    if options.layer:
        rows = [measure_layer("Qwen3-30B, 8k tokens")]
        print(rows[-1])
        save(Path(f"{stem}-moe-layer.json"), rows)
        return
    rows = []
    for name in (name for name in SHAPES if name.startswith(options.only)):
        for routing in ROUTINGS:
            rows.append(measure(name, routing, options.liger))
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
            save(Path(f"{stem}-moe.json"), rows)  # after every row: a run may be stopped


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({**describe(torch.device("cuda")), "milliseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
