"""The permutation search: seconds, and how much more 2:4 pruning keeps, for single matrices and for ResNet-50's layers.

    python benchmarks/sparsity.py --output benchmarks/results/cpu-sparsity.json
    python benchmarks/sparsity.py --device cuda --resnet --output benchmarks/results/nvidia_h200-sparsity.json

A figure is the least of `--repeats` runs after one that compiles kernels. The layers of ResNet-50 are searched one by
one as a pruning run does, in groups of layers that read the same channels. Weights are random: their values change the
number of rounds little.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch

from apex.contrib.sparsity.permutation_search_kernels import accelerated_search_for_good_permutation, sum_after_2_to_4

MATRICES = ((128, 64), (64, 128), (512, 256))
# Rows (filters times kernel places of all layers that read the channels), channels, and how many such groups there are.
RESNET_50 = (
    *(((64 * 9, 64), 3), ((256, 64), 3), ((128 * 9, 128), 4), ((512, 128), 4), ((256 * 9, 256), 6), ((1024, 256), 6)),
    *(((512 * 9, 512), 3), ((2048, 512), 3), ((64 * 2 + 128 + 512, 256), 1), ((128 * 3 + 256 + 1024, 512), 1)),
    *(((256 * 5 + 512 + 2048, 1024), 1), ((512 * 2 + 1000, 2048), 1)),
)


def measure(rows: int, columns: int, device: str, repeats: int) -> dict[str, float]:
    """Seconds of a search with the default options, and what is kept without and with it."""
    matrix = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)).to(device)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        order = accelerated_search_for_good_permutation(matrix)
        seconds.append(time.perf_counter() - begin)
    kept = {"kept": sum_after_2_to_4(matrix), "kept_permuted": sum_after_2_to_4(matrix[:, order])}
    return {"rows": rows, "columns": columns, "seconds": min(seconds), **kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--resnet", action="store_true", help="also the layers of ResNet-50, once each")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    measure(64, 32, args.device, 1)
    found = [measure(*shape, args.device, args.repeats) for shape in MATRICES]
    report = {"torch": torch.__version__, "device": args.device, "machine": platform.machine(), "matrices": found}
    if args.device == "cuda":
        report["machine"] = torch.cuda.get_device_name()
    if args.resnet:
        layers = [(measure(*shape, args.device, 1), count) for shape, count in RESNET_50]
        report["resnet50"] = [{**layer, "groups": count} for layer, count in layers]
        report["resnet50_seconds"] = sum(layer["seconds"] * count for layer, count in layers)
    for entry in report["matrices"] + report.get("resnet50", []):
        gain = entry["kept_permuted"] / entry["kept"] - 1
        print(f"{entry['rows']:6} x {entry['columns']:5}  {entry['seconds']:8.3f} s  keeps {gain:.2%} more")
    if args.resnet:
        print(f"all layers of ResNet-50: {report['resnet50_seconds']:.2f} s")
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
