"""Losses of linear heads, forward and backward, beside torch.compile and Liger-Kernel.

    python benchmarks/llm_losses.py
    python benchmarks/llm_losses.py --tiny --device cpu  # to try the script

Times are medians of CUDA events over whole steps. The columns of a row take turns, in another order each round, since a
step that reaches the GPU's limit of power is quicker behind one that does not. "MiB" is a step's peak of memory beyond
what was there before it and beyond the gradients of input and weight.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from apex._bench.environment import describe, device_name, device_stem
from apex.contrib import llm_losses
from apex.contrib.xentropy import linear_cross_entropy, linear_log_probs

RESULTS = Path(__file__).parent / "results"
SOFTCAP = 30.0
# Rows, features and classes of each case of cross-entropy; sequences, tokens, features, classes of the others.
CROSS_ENTROPY = [(4096, 4096, 128256), (16384, 2048, 131072), (8192, 4096, 50257), (8192, 2304, 256000)]
PER_TOKEN = (4096, 4096, 131072)
SEQUENCES = (8, 2048, 2048, 151936)

Losses = dict[str, Callable[..., Tensor]]


def entropy_loss(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    rows: Any = linear_log_probs(input, weight, target, outputs=("log_probs", "entropy"))
    return (rows.log_probs + 0.1 * rows.entropy).mean()


def logits_loss(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(input, weight), target)


def cross_entropy_losses(device: torch.device) -> Losses:
    losses: Losses = {
        "apex": linear_cross_entropy,
        f"apex, softcap {SOFTCAP:g}": lambda *tensors: linear_cross_entropy(*tensors, softcap=SOFTCAP),
    }
    if device.type == "cuda":
        losses["torch.compile"] = torch.compile(logits_loss, dynamic=False)  # else it pads no odd number of classes
    if has_liger(device):
        from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
            LigerFusedLinearCrossEntropyFunction,
        )

        losses["liger"] = lambda *tensors: LigerFusedLinearCrossEntropyFunction.apply(*tensors)[0]
    return losses


def sequence_losses(device: torch.device, old: Tensor, advantages: Tensor, reference: Tensor) -> Losses:
    """Return losses of policies and preferences: apex's classes and Liger's, which take the same arguments."""
    mask = torch.ones_like(old)

    def policy(loss: Any) -> Callable[..., Tensor]:
        return lambda x, w, ids: loss(x, w, ids, mask, advantages, old_per_token_logps=old)[0]

    def preference(loss: Any) -> Callable[..., Tensor]:
        return lambda x, w, ids: loss(w, x, ids, None, reference, w.detach())[0]

    options = {"beta": 0.0, "use_ref_model": False}
    losses: Losses = {"GRPO, apex": policy(llm_losses.FusedLinearGRPOLoss(**options))}
    gspo = llm_losses.FusedLinearGRPOLoss(**options, importance_sampling_level="sequence", keep_logits=False)
    losses["GSPO, apex"] = policy(gspo)
    losses["DPO, apex"] = preference(llm_losses.FusedLinearDPOLoss())
    if has_liger(device):
        from liger_kernel import chunked_loss  # type: ignore[import-not-found]

        losses["GRPO, liger"] = policy(chunked_loss.LigerFusedLinearGRPOLoss(**options))
        losses["DPO, liger"] = preference(chunked_loss.LigerFusedLinearDPOLoss())
    return losses


def has_liger(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def measure(losses: Losses, tensors: tuple[Tensor, ...], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds and the peak of memory of a step with each loss."""
    input, weight, _ = tensors
    on_gpu = input.is_cuda

    def step(loss: Callable[..., Tensor]) -> None:
        torch.autograd.grad(loss(*tensors), (input, weight))

    times: dict[str, list[float]] = {name: [] for name in losses}
    for index in range(rounds + 2):  # the first two compile
        for name in random.Random(index).sample(list(losses), len(losses)):
            loss = losses[name]
            if on_gpu:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                step(loss)
                end.record()
                torch.cuda.synchronize()
                elapsed = start.elapsed_time(end)
            else:
                begin = time.perf_counter()
                step(loss)
                elapsed = 1e3 * (time.perf_counter() - begin)
            if index > 1:
                times[name].append(elapsed)
    found = {name: {"ms": round(statistics.median(values), 3)} for name, values in times.items()}
    gradients = sum(tensor.numel() * tensor.element_size() for tensor in (input, weight))
    for name, loss in losses.items() if on_gpu else ():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(loss)
        found[name]["MiB"] = round((torch.cuda.max_memory_allocated() - before - gradients) / 2**20)
    return found


def make_head(shape: tuple[int, ...], classes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return input, weight and targets whose logits are of order one."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    features = shape[-1]
    input = torch.randn(shape, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features, device=device) * features**-0.5).to(dtype).requires_grad_()
    return input, weight, torch.randint(0, classes, shape[:-1], device=device)


def commit() -> str:
    """Return the commit of the source tree, or "" outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--commit", default=commit(), help="the commit that is measured, where git cannot tell it")
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    shapes = [(64, 16, 100)] if arguments.tiny else CROSS_ENTROPY
    per_token, sequences = ((64, 16, 100), (2, 8, 16, 100)) if arguments.tiny else (PER_TOKEN, SEQUENCES)
    rows: dict[str, Any] = {}
    for *shape, classes in shapes:
        name = f"cross-entropy {'x'.join(map(str, [*shape, classes]))}"
        rows[name] = measure(cross_entropy_losses(device), make_head(tuple(shape), classes, device), arguments.rounds)
        print(name, rows[name], flush=True)
    *shape, classes = per_token
    name = f"log-probabilities and entropies {'x'.join(map(str, per_token))}"
    rows[name] = measure({"apex": entropy_loss}, make_head(tuple(shape), classes, device), arguments.rounds)
    print(name, rows[name], flush=True)
    count, tokens, features, classes = sequences
    tensors = make_head((count, tokens, features), classes, device)
    old = torch.full((count, tokens), -10.0, device=device)
    reference = torch.randn(count, tokens, features, device=device).to(tensors[0].dtype)
    losses = sequence_losses(device, old, torch.randn(count, device=device), reference)
    name = f"sequences {'x'.join(map(str, sequences))}"
    rows[name] = measure(losses, tensors, min(arguments.rounds, 5))
    print(name, rows[name], flush=True)
    record = {**describe(device), "commit": arguments.commit, "unit": "ms of forward and backward pass", "rows": rows}
    path = arguments.output or RESULTS / f"{device_stem(device_name(device))}-llm-losses.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
