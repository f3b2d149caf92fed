"""`nn.MultiheadAttention(need_weights=False)` as it is and with `apex.fuse`: a forward and a backward pass on a GPU.

    python benchmarks/fuse_attention.py

1024 features in 16 heads, bfloat16; microseconds between CUDA events, the median of 30 passes in turns. Both are also
replayed from CUDA graphs, without the host.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import apex
from apex._bench.environment import describe, device_name, device_stem

RESULTS = Path(__file__).parent / "results"
SHAPES = ((64, 80), (512, 16), (2048, 8))
OPTIONS = ("none", "causal", "padding", "dropout 0.1")


def make_pass(module: nn.MultiheadAttention, length: int, batch: int, option: str) -> Callable[[], Any]:
    like: dict[str, Any] = {"device": module.in_proj_weight.device, "dtype": module.in_proj_weight.dtype}
    x = torch.randn(batch, length, module.embed_dim, requires_grad=True, **like)
    gradient, leaves = torch.randn_like(x), [x, *module.parameters()]
    options: dict[str, Any] = {}
    if option == "causal":
        options = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(length, **like), "is_causal": True}
    elif option == "padding":
        options = {"key_padding_mask": (torch.arange(length, device=like["device"]) > length - 9).repeat(batch, 1)}
    return lambda: torch.autograd.grad(module(x, x, x, need_weights=False, **options)[0], leaves, gradient)


def microseconds(run: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def main() -> None:
    device, rows = torch.device("cuda"), []
    for length, batch in SHAPES:
        for option in OPTIONS:
            dropout = 0.1 if option.startswith("dropout") else 0.0
            plain = nn.MultiheadAttention(1024, 16, dropout, batch_first=True, device=device, dtype=torch.bfloat16)
            fused = copy.deepcopy(plain)
            apex.fuse(fused, verbose=False)
            row: dict[str, Any] = {"length": length, "batch": batch, "option": option}
            passes = [make_pass(module, length, batch, option) for module in (plain, fused)]
            for suffix in ("", " in a graph"):
                for run in passes * 3:
                    run()
                times = [[microseconds(run) for run in passes] for _ in range(30)]
                for i, name in enumerate(("torch", "apex")):
                    row[name + suffix] = round(statistics.median(each[i] for each in times))
                passes = [captured(run) for run in passes] if not suffix else []
            rows.append(row)
            print(row, flush=True)
    path = RESULTS / f"{device_stem(device_name(device))}-fuse-attention.json"
    path.write_text(json.dumps({**describe(device), "microseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
