"""A Llama of transformers, plain, compiled, with Liger-Kernel's patches and with `apex.fuse`: time and memory.

    python benchmarks/fuse.py
    python benchmarks/fuse.py --tiny --columns plain apex  # on a CPU, to try the script

About 1.2 billion random weights in bfloat16, sequences of 4096 tokens, forward, backward and an AdamW step. One process
per column; all are warm before the first is timed, and they are timed in turns, one at a time. Every column but the
last steps with PyTorch's own fused AdamW. Needs transformers; a column without its package says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from apex._bench.environment import describe, device_name, device_stem

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("plain", "compile", "liger", "apex", "apex compile", "apex optimizer")


def sizes(arguments: argparse.Namespace) -> dict[str, int]:
    if arguments.tiny:
        return {"layers": 2, "width": 64, "inner": 96, "heads": 4, "groups": 2, "vocabulary": 128, "length": 16}
    heads = {"heads": 32, "groups": 8}
    return {"layers": 16, "width": 2048, "inner": 8192, **heads, "vocabulary": 128256, "length": 4096}


def make_step(column: str, arguments: argparse.Namespace) -> Any:
    """A function that trains one step and returns the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if column == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    size, device = sizes(arguments), torch.device(arguments.device)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["width"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["groups"],
        max_position_embeddings=size["length"],
        tie_word_embeddings=True,
        use_cache=False,
    )
    with device:
        model: Any = LlamaForCausalLM(config).bfloat16().train()
        tokens = torch.randint(0, size["vocabulary"], (arguments.batch, size["length"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if column.startswith("apex"):
        import apex

        apex.fuse(model, verbose=False)
        if column == "apex optimizer":
            apex.fuse(optimizer, verbose=False)
    if column.endswith("compile"):
        model = torch.compile(model, **({"backend": "aot_eager"} if arguments.tiny else {}))

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def child(column: str, arguments: argparse.Namespace) -> None:
    """One column: a line of JSON when it is warm, then one with the time of a step for every line that comes in."""
    is_gpu = arguments.device == "cuda"
    wait = torch.cuda.synchronize if is_gpu else (lambda: None)
    try:
        step = make_step(column, arguments)
    except ModuleNotFoundError as error:
        print(json.dumps({"error": f"{error.name} is not installed"}), flush=True)
        return
    losses = [float(step()) for _ in range(4)]
    mebibytes = round(torch.cuda.max_memory_allocated() / 2**20) if is_gpu else None
    print(json.dumps({"losses": losses, "mebibytes": mebibytes}), flush=True)
    while sys.stdin.readline():
        wait()
        start = time.perf_counter()
        for _ in range(arguments.steps):
            step()
        wait()
        print(json.dumps({"milliseconds": 1e3 * (time.perf_counter() - start) / arguments.steps}), flush=True)


def start(column: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    command = [sys.executable, __file__, "--child", column, "--device", arguments.device]
    command += ["--steps", str(arguments.steps), "--batch", str(arguments.batch)]
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the process runs
    flags = ["--tiny"] if arguments.tiny else []
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    return subprocess.Popen([*command, *flags], text=True, **pipes), errors


def listen(process: Any, errors: Any) -> dict[str, Any]:
    line = next((line for line in process.stdout if line.startswith("{")), None)
    if line is not None:
        return json.loads(line)
    errors.seek(0)
    return {"error": errors.read()[-1500:] or "killed"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--batch", type=int, default=2, help="sequences per step")
    parser.add_argument("--steps", type=int, default=3, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments)
        return
    running, results = {}, {}
    for name in arguments.columns:  # warm one after the other: compiling side by side would disturb nobody but itself
        running[name] = start(name, arguments)
        results[name] = listen(*running[name])
    rounds: dict[str, list[float]] = {name: [] for name in running if "error" not in results[name]}
    for _ in range(arguments.rounds):
        for name, times in rounds.items():
            process, errors = running[name]
            process.stdin.write("\n")
            process.stdin.flush()
            answer = listen(process, errors)
            if "milliseconds" in answer:
                times.append(round(answer["milliseconds"], 3))
    for name, (process, _) in running.items():
        process.kill()
        if rounds.get(name):
            results[name] |= {"milliseconds": statistics.median(rounds[name]), "rounds": rounds[name]}
        print(name, {key: value for key, value in results[name].items() if key != "rounds"}, flush=True)
    device = torch.device(arguments.device)
    path = arguments.output or RESULTS / f"{device_stem(device_name(device))}-fuse.json"
    size = {**sizes(arguments), "batch": arguments.batch}
    path.write_text(json.dumps({**describe(device), "size": size, "columns": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
