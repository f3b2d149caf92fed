"""Packed causal attention with grouped queries on a GPU, beside PyTorch's `varlen_attn` and cuDNN's attention.

    python benchmarks/attention.py [--out FOLDER]
    python benchmarks/attention.py --device cpu --small    # tries the script: no peers, nothing is written

bfloat16, 32 heads of queries, 8 of keys, 128 wide. Documents: 16 of 512 to 8192 rows, 65,536 in all, with a window of
4096 keys and without. `varlen_attn` of PyTorch 2.11 has no grouped queries: its keys are repeated outside of its time.
Equal lengths, whose bounds are on the host, are compared with `scaled_dot_product_attention` by cuDNN. Ring attention
of 32,768 rows is computed for all of 4 ranks one after the other, without exchanges, beside whole attention by cuDNN
and by our kernels.
Milliseconds between CUDA events, the median of passes in turns; each is launched while one of its kind runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
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
from apex.transformer.context_parallel._blocks import Merged
from apex.transformer.context_parallel._ring import Plan, add_rows

RESULTS = Path(__file__).parent / "results"
HEADS, KEY_HEADS, SIZE = 32, 8, 128
DOCUMENTS = (8192, 512, 7681, 1023, 6655, 1537, 6144, 2560, 5121, 3071, 4096, 4608, 3583, 5633, 2047, 3073)
ROUNDS = 15
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=RESULTS)
parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
parser.add_argument("--small", action="store_true", help="few heads, a 64th of the rows, one round")
args = parser.parse_args()
SHARE = 64 if args.small else 1
if args.small:
    HEADS, KEY_HEADS, SIZE = 4, 2, 16
PEERS = args.device == "cuda"


def milliseconds(run: Callable[[], Any]) -> float:
    if args.device == "cpu":
        begun = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begun)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # the GPU is busy with it while the host launches the next one
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def tensors(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator(args.device).manual_seed(0)
    shapes = ((rows, HEADS, SIZE), (rows, KEY_HEADS, SIZE), (rows, KEY_HEADS, SIZE))
    query, key, value = (
        torch.randn(shape, generator=make, device=args.device, dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
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
        for _ in range(max(1, ROUNDS // SHARE)):
            for who, run in runs.items():
                times[who].append(milliseconds(run))
        for who in runs:
            row[f"{way} {who}"] = round(statistics.median(times[who]), 3)
        ours, *others = runs
        peers = [peer for peer in others if not peer.startswith("apex")]
        if peers:
            row[f"{way} ratio"] = round(row[f"{way} {ours}"] / min(row[f"{way} {peer}"] for peer in peers), 3)
    return row


def documents(window: int) -> dict[str, Any]:
    lengths, window = [max(1, length // SHARE) for length in DOCUMENTS], window // SHARE
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=args.device)
    longest, size = max(lengths), (window or -1, 0)
    query, key, value = tensors(sum(lengths))

    def ours() -> Tensor:
        return varlen_attention(query, key, value, edges, longest, causal=True, window_size=size)  # type: ignore[return-value]

    calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {"apex": (ours, [query, key, value])}
    if PEERS:
        from torch.nn.attention.varlen import varlen_attn

        other = [query.detach().requires_grad_(), repeated(key), repeated(value)]
        calls["varlen_attn"] = (
            lambda: varlen_attn(*other, edges, edges, longest, longest, window_size=size),
            other,
        )
        torch.testing.assert_close(ours(), calls["varlen_attn"][0](), atol=2e-2, rtol=2e-2)
    return compare(f"documents, window {window or 'none'}", calls)


def equal_lengths(sequences: int, length: int) -> dict[str, Any]:
    length //= SHARE
    edges = torch.arange(0, (sequences + 1) * length, length, dtype=torch.int32)
    query, key, value = tensors(sequences * length)
    batch = [t.detach().unflatten(0, (sequences, length)).transpose(1, 2).requires_grad_() for t in (query, key, value)]

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True)

    def ours() -> Tensor:
        return varlen_attention(query, key, value, edges, length, causal=True)  # type: ignore[return-value]

    calls = {"apex": (ours, [query, key, value])}
    return compare(f"{sequences} of {length}", {**calls, "cudnn": (cudnn, batch)} if PEERS else calls)


class Ring(torch.autograd.Function):
    """The blocks of all ranks of a ring, one after the other: the work of one rank times their number."""

    @staticmethod
    def forward(ctx, query, key, value, plans):  # type: ignore[no-untyped-def, override]
        queries, *parts = (tensor.chunk(len(plans)) for tensor in (query, key, value))
        results = []
        for plan in plans:
            merged = Merged(plan.places)
            for number in range(plan.ranks):
                keys = [part[(plan.rank - number) % plan.ranks] for part in parts]
                plan.attend(number, queries[plan.rank], keys, merged)
            results.append(merged.results(query.dtype))
        ctx.save_for_backward(query, key, value, *(tensor for result in results for tensor in result))
        ctx.plans = plans
        return torch.cat([output for output, _ in results])

    @staticmethod
    def backward(ctx, dout):  # type: ignore[no-untyped-def, override]
        plans, (query, key, value, *others) = ctx.plans, ctx.saved_tensors
        queries, *parts = (tensor.chunk(len(plans)) for tensor in (query, key, value))
        dkeys, dqueries = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value)], []
        totals = [tensor.chunk(len(plans)) for tensor in dkeys]
        for plan, own in zip(plans, dout.contiguous().chunk(len(plans)), strict=True):
            dquery = Merged(plan.places)
            for number in range(plan.ranks):
                source = (plan.rank - number) % plan.ranks
                keys, whole = [part[source] for part in parts], tuple(others[2 * plan.rank : 2 * plan.rank + 2])
                found, rows = plan.differentiate(number, own, queries[plan.rank], keys, whole, dquery)
                for total, part in zip(totals, found, strict=True):
                    add_rows(total[source], rows, part)
            dqueries.append(dquery.results(query.dtype)[0])
        return torch.cat(dqueries), *(tensor.to(query.dtype) for tensor in dkeys), None


def ring(ranks: int, length: int) -> dict[str, Any]:
    """Time the products of ring attention, which a ring of GPUs computes at the same time, beside whole attention.

    With bounds on the device both use our kernels, otherwise both use cuDNN's.
    """
    length //= SHARE
    query, key, value = tensors(length)
    edges = torch.tensor([0, length], dtype=torch.int64, device=args.device)
    edges_on_host = edges.cpu()
    calls: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {}
    for name, sequences in (("apex", 1), ("apex, bounds on the device", 0)):
        plans = [Plan(edges, length, length, SIZE**-0.5, True, ranks, rank, sequences) for rank in range(ranks)]
        calls[name] = (lambda plans=plans: Ring.apply(query, key, value, plans), [query, key, value])

    def whole(bounds: Tensor) -> Tensor:
        return varlen_attention(query, key, value, bounds, length, causal=True)  # type: ignore[return-value]

    calls["whole, bounds on the device"] = (lambda: whole(edges), [query, key, value])
    # Half precision with bounds on the CPU goes through PyTorch's attention, that is cuDNN's on this GPU.
    calls["whole"] = (lambda: whole(edges_on_host), [query, key, value])
    return compare(f"ring of {ranks}, {length} rows", calls)


def main() -> None:
    rows = []
    for case in (
        lambda: documents(4096),
        lambda: documents(0),
        lambda: equal_lengths(8, 8192),
        lambda: equal_lengths(16, 2048),
        lambda: ring(4, 32768),
    ):
        rows.append(case())
        print(rows[-1], flush=True)
    if args.small:
        return
    device = torch.device(args.device)
    path = args.out / f"{device_stem(device_name(device))}-attention.json"
    path.write_text(json.dumps({**describe(device), "milliseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
