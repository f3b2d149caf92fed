"""Training steps of a GPT with 354 million parameters: apex.transformer's beside plain torch and torch.compile.

    python benchmarks/gpt_350m.py --at-once 7 --limit 120
    python benchmarks/gpt_350m.py --tiny --columns torch apex  # on a CPU, to try the script

24 layers of 1024, 16 heads, 50,304 words, tied embeddings, 8 sequences of 1024 tokens, one process. Ours is
`apex.transformer.testing.standalone_gpt` with amp's O5 and FusedAdam, the other one the GPT of step_models.py in
PyTorch's modules with autocast to bfloat16 and its fused AdamW. Both start with the same weights and see the same
batches. How columns take turns, and what is measured, is as in steps.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import steps
import torch
import torch.distributed as dist
from step_models import GPT, Batch
from steps import Kind, Step
from torch import Tensor, nn

from apex import graphs
from apex._bench.environment import describe, device_name, device_stem
from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.testing.standalone_gpt import GPTModel
from apex.transformer.testing.standalone_transformer_lm import TransformerConfig

COLUMNS = {
    "torch": Kind(ours=False),
    "torch.compile": Kind(ours=False, mode="default"),
    "torch.compile, reduce-overhead": Kind(ours=False, mode="reduce-overhead"),
    "apex": Kind(ours=True),
    "apex, graph": Kind(ours=True, graph=True),
    "apex, compiled": Kind(ours=True, mode="default"),
    "apex, compiled, graph": Kind(ours=True, mode="default", graph=True),
}
BASELINE = "torch.compile"
SIZES = {"layers": 24, "hidden": 1024, "words": 50304, "sequence": 1024, "batch": 8}
TINY = {"layers": 2, "hidden": 64, "words": 128, "sequence": 16, "batch": 2}


class Ours(nn.Module):
    """`network(words, targets)` is the loss, as for the other one."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.model = GPTModel(config=config)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return self.model(words, labels=targets, reduction="mean")


def ours(plain: GPT, sizes: dict[str, int]) -> Ours:
    """Our model with the weights of the other one."""
    heads = max(1, sizes["hidden"] // 64)
    config = TransformerConfig(
        num_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        num_attention_heads=heads,
        vocab_size=sizes["words"],
        max_position_embeddings=sizes["sequence"],
        attention="sdpa",
    )
    network, theirs = Ours(config), plain.state_dict()
    places = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention": "self_attention.query_key_value",
        "project": "self_attention.dense",
        "dense.0": "mlp.dense_h_to_4h",
        "dense.2": "mlp.dense_4h_to_h",
    }
    state = {
        "embedding.word_embeddings.weight": theirs["tokens.weight"],
        "embedding.position_embeddings.weight": theirs["positions.weight"],
        "encoder.final_layernorm.weight": theirs["norm.weight"],
        "encoder.final_layernorm.bias": theirs["norm.bias"],
    }
    for name, tensor in theirs.items():
        if name.startswith("blocks."):
            _, layer, *parts, kind = name.split(".")
            part = ".".join(parts)
            if part == "attention":  # queries, keys and values of all heads, to those of each head
                tensor = tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
            state[f"encoder.layers.{layer}.{places[part]}.{kind}"] = tensor
    network.model.language_model.load_state_dict(state)
    return network


def prepare(column: str, model: str, device: str, tiny: bool) -> tuple[Step, list[Batch]]:
    """A training step that takes a batch and returns the loss, and the batches."""
    kind, sizes = COLUMNS[column], TINY if tiny else SIZES
    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    network: nn.Module = GPT(sizes["layers"], sizes["hidden"], sizes["words"], sizes["sequence"], False, tied=True)
    if kind.ours:
        network = ours(network, sizes)
    network.to(device)
    torch.manual_seed(1)
    drawn = [torch.randint(sizes["words"], (sizes["batch"], sizes["sequence"] + 1)) for _ in range(4)]
    batches = [(words[:, :-1].contiguous().to(device), words[:, 1:].contiguous().to(device)) for words in drawn]
    options: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.01}
    if kind.ours:
        step = steps._apex_step(network, kind, options, tiny)
    else:
        step = steps._torch_step(network, kind, options, device, tiny)
    return (graphs.capture(step) if kind.graph else step), batches


def with_rates(columns: dict[str, dict[str, Any]], sizes: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The figures with tokens per second, and how many times those of torch.compile they are."""
    tokens = sizes["batch"] * sizes["sequence"]
    rates = {
        name: 1e3 * tokens / figures["milliseconds"] for name, figures in columns.items() if "milliseconds" in figures
    }
    found = {}
    for name, figures in columns.items():
        found[name] = dict(figures)
        if name in rates:
            found[name]["tokens_per_second"] = round(rates[name])
            if BASELINE in rates:
                found[name][f"times {BASELINE}"] = round(rates[name] / rates[BASELINE], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    parser.add_argument("--rounds", type=int, default=5, help="how often the columns take turns")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them, after which the loss is noted")
    parser.add_argument("--at-once", type=int, default=1, help="columns that warm up together")
    parser.add_argument(
        "--kernels", nargs="*", default=[], choices=COLUMNS, help="columns whose kernels are noted, as in steps.py"
    )
    parser.add_argument("--limit", type=float, default=86400.0, help="seconds after which nothing more is measured")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--output", type=Path, help="the result file; by default one in benchmarks/results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=["gpt-350m"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.script, arguments.warm_limit, arguments.without = __file__, arguments.limit, []
    if arguments.child:
        steps.compete(arguments.child, "gpt-350m", arguments, prepare)
        return
    deadline = time.monotonic() + arguments.limit
    device, sizes = torch.device(arguments.device), TINY if arguments.tiny else SIZES
    path = arguments.output or steps.RESULTS / f"{device_stem(device_name(device))}-gpt_350m.json"
    settings = {name: getattr(arguments, name) for name in ("steps", "rounds", "warmup", "at_once", "tiny")}
    results: dict[str, Any] = {"environment": describe(device), "sizes": sizes, "settings": settings, "columns": {}}

    def note(model: str, columns: dict[str, Any]) -> None:
        results["columns"] = with_rates(columns, sizes)
        path.write_text(json.dumps(results, indent=1) + "\n")

    steps.measure(arguments, deadline, note)
    print(json.dumps(results["columns"], indent=1))


if __name__ == "__main__":
    main()
