"""Packed causal attention with grouped queries on a GPU, beside PyTorch's `varlen_attn` and cuDNN's attention.

    python benchmarks/attention.py [--out FOLDER]

bfloat16, 32 heads of queries, 8 of keys, 128 wide. Documents: 16 of 512 to 8192 rows, 65,536 in all, with a window of
4096 keys and without. `varlen_attn` of PyTorch 2.11 has no grouped queries: its keys are repeated outside of its time.
Equal lengths are compared with `scaled_dot_product_attention` by cuDNN. Milliseconds between CUDA events, the median of
passes in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from apex._bench.environment import describe, device_name, device_stem
from apex.ops.attention import varlen_attention

RESULTS = Path(__file__).parent / "results"
HEADS, KEY_HEADS, SIZE = 32, 8, 128
DOCUMENTS = (8192, 512, 7681, 1023, 6655, 1537, 6144, 2560, 5121, 3071, 4096, 4608, 3583, 5633, 2047, 3073)
ROUNDS = 15


def milliseconds(run: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def tensors(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator("cuda").manual_seed(0)
    shapes = ((rows, HEADS, SIZE), (rows, KEY_HEADS, SIZE), (rows, KEY_HEADS, SIZE))
    query, key, value = (
        torch.randn(shape, generator=make, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes
    )
    return query, key, value


def repeated(tensor: Tensor) -> Tensor:
    return tensor.detach().repeat_interleave(HEADS // KEY_HEADS, 1).requires_grad_()


def compare(name: str, calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]]) -> dict[str, Any]:
    """Time forward and backward passes in turns; `calls` maps a name to a forward pass and its leaves."""
    row: dict[str, Any] = {"case": name}
    passes: dict[str, dict[str, Callable[[], Any]]] = {"fwd": {}, "bwd": {}}
    for who, (forward, leaves) in calls.items():
        output = forward()
        gradient = torch.randn_like(output)
        passes["fwd"][who] = forward
        passes["bwd"][who] = lambda o=output, x=leaves, g=gradient: torch.autograd.grad(o, x, g, retain_graph=True)
    for way, runs in passes.items():
        for run in [*runs.values()] * 3:
            run()
        times = {who: [] for who in runs}
        for _ in range(ROUNDS):
            for who, run in runs.items():
                times[who].append(milliseconds(run))
        for who in runs:
            row[f"{way} {who}"] = round(statistics.median(times[who]), 3)
        ours, *peers = runs
        row[f"{way} ratio"] = round(row[f"{way} {ours}"] / min(row[f"{way} {peer}"] for peer in peers), 3)
    return row


def documents(window: int) -> dict[str, Any]:
    from torch.nn.attention.varlen import varlen_attn

    edges = torch.tensor([0, *accumulate(DOCUMENTS)], dtype=torch.int32, device="cuda")
    longest, size = max(DOCUMENTS), (window or -1, 0)
    query, key, value = tensors(sum(DOCUMENTS))
    other = [query.detach().requires_grad_(), repeated(key), repeated(value)]
    ours = varlen_attention(query, key, value, edges, longest, causal=True, window_size=size)
    theirs = varlen_attn(*other, edges, edges, longest, longest, window_size=size)
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    return compare(
        f"documents, window {window or 'none'}",
        {
            "apex": (
                lambda: varlen_attention(query, key, value, edges, longest, causal=True, window_size=size),
                [query, key, value],
            ),
            "varlen_attn": (lambda: varlen_attn(*other, edges, edges, longest, longest, window_size=size), other),
        },
    )


def equal_lengths(sequences: int, length: int) -> dict[str, Any]:
    edges = torch.arange(0, (sequences + 1) * length, length, dtype=torch.int32, device="cuda")
    query, key, value = tensors(sequences * length)
    batch = [t.detach().unflatten(0, (sequences, length)).transpose(1, 2).requires_grad_() for t in (query, key, value)]

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True)

    return compare(
        f"{sequences} of {length}",
        {
            "apex": (lambda: varlen_attention(query, key, value, edges, length, causal=True), [query, key, value]),
            "cudnn": (cudnn, batch),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    folder, device = parser.parse_args().out, torch.device("cuda")
    rows = []
    for case in (
        lambda: documents(4096),
        lambda: documents(0),
        lambda: equal_lengths(8, 8192),
        lambda: equal_lengths(16, 2048),
    ):
        rows.append(case())
        print(rows[-1], flush=True)
    path = folder / f"{device_stem(device_name(device))}-attention.json"
    path.write_text(json.dumps({**describe(device), "milliseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
