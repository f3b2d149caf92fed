"""Seconds that a first training step takes with empty caches, beside PyTorch's and Liger-Kernel's.

    python benchmarks/cold_start.py
    python benchmarks/cold_start.py --tiny --rows "layer norms"  # on a CPU, to try the script

Every cell is a process of its own with an empty Triton cache. PyTorch, CUDA and cuBLAS are started before the clock.
"first" is the first forward, backward and optimizer step, "again" the first one of a second process that finds the
cache. Programs and seconds of Triton's compiler are counted by its own listener.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apex._bench.environment import describe, device_name, device_stem

RESULTS = Path(__file__).parent / "results"
# Thirty widths of hidden layers in published models, from BERT-tiny's to GPT-3's.
WIDTHS = (
    *(128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 1600, 1792, 2048, 2304),
    *(2560, 2688, 3072, 3584, 3840, 4096, 4608, 5120, 5632, 6144, 7168, 8192, 10240, 12288, 16384),
)
Step = Callable[[], Any]


def norms(side: str, device: str, tiny: bool) -> Step:
    """Layer norms of thirty widths in bfloat16, 2048 rows, forward and backward."""
    widths = WIDTHS[:2] if tiny else WIDTHS

    def function(width: int) -> Callable[[Tensor], Tensor]:
        if side == "Liger":
            from liger_kernel.transformers.layer_norm import LigerLayerNorm

            return LigerLayerNorm(width).to(device, torch.bfloat16)
        if side == "apex":
            from apex.normalization import FusedLayerNorm

            return FusedLayerNorm(width).to(device, torch.bfloat16)
        return nn.LayerNorm(width).to(device, torch.bfloat16)

    # More than 2**23 elements each, or PyTorch's operator would take them.
    rows = {width: 8 if tiny else max(2048, 2**23 // width // 16 * 16 + 16) for width in widths}
    cases = [(function(width), (rows[width], width)) for width in widths]

    def step() -> None:
        for layer, shape in cases:
            x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            layer(x).backward(torch.randn_like(x))

    return step


def model(name: str) -> Callable[[str, str, bool], Step]:
    def make(side: str, device: str, tiny: bool) -> Step:
        import steps

        column = "O5" if side == "apex" else "torch.amp"
        if side == "Liger":
            _use_liger()
        step, batches = steps.prepare(column, name, device, tiny)
        return lambda: step(*batches[0])

    return make


def _use_liger() -> None:
    """Replace the layer norms and the loss of the benchmark's plain models by Liger-Kernel's."""
    import step_models
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    from liger_kernel.transformers.layer_norm import LigerLayerNorm

    loss = LigerFusedLinearCrossEntropyLoss()

    def token_loss(x: Tensor, weight: Tensor, targets: Tensor, fused: bool) -> Tensor:
        return loss(weight.to(x.dtype), x.flatten(0, 1), targets.flatten())

    step_models.layer_norm = lambda width, fused: LigerLayerNorm(width)  # type: ignore[assignment]
    step_models.token_loss = token_loss  # type: ignore[assignment]


ROWS: dict[str, tuple[Callable[[str, str, bool], Step], tuple[str, ...]]] = {
    "layer norms": (norms, ("torch", "Liger", "apex")),
    "gpt-12x768": (model("gpt-12x768"), ("torch", "Liger", "apex")),
    "resnet50": (model("resnet50"), ("torch", "apex")),
}


def child(row: str, side: str, device: str, tiny: bool) -> None:
    programs: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    if device == "cuda":
        import triton

        def listen(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
            if not cache_hit:
                programs[src.name] += 1
                seconds[src.name] += times.total / 1e6

        triton.knobs.compilation.listener = listen
        half = torch.randn(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        (half @ half).sum().backward()
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    step = ROWS[row][0](side, device, tiny)
    times = []
    for _ in range(2):
        wait()
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    most = {name: [programs[name], round(total, 2)] for name, total in seconds.most_common(12)}
    answer = {"first": round(times[0], 2), "second step": round(times[1], 3), "programs": sum(programs.values())}
    print(json.dumps({**answer, "compiling": round(sum(seconds.values()), 2), "most": most}))


def measure(row: str, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a cell twice in processes of its own, first with an empty cache."""
    command = [sys.executable, __file__, "--child", row, side, "--device", arguments.device]
    command += ["--tiny"] * arguments.tiny
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        found: list[dict[str, Any]] = []
        for _ in range(2):
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                return {"error": done.stderr[-1500:]}
            found.append(json.loads(done.stdout.splitlines()[-1]))
    return {**found[0], "again": found[1]["first"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--sides", nargs="+", choices=("torch", "Liger", "apex"), default=("torch", "Liger", "apex"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child, arguments.device, arguments.tiny)
        return
    device = torch.device(arguments.device)
    path = arguments.output or RESULTS / f"{device_stem(device_name(device))}-cold-start.json"
    results: dict[str, dict[str, Any]] = {}
    for row in arguments.rows:
        for side in ROWS[row][1]:
            if side in arguments.sides:
                results.setdefault(row, {})[side] = measure(row, side, arguments)
                path.write_text(json.dumps({**describe(device), "rows": results}, indent=1) + "\n")
                shown = {name: value for name, value in results[row][side].items() if name != "most"}
                print(row, side, shown, flush=True)


if __name__ == "__main__":
    main()
