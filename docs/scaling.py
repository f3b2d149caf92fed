"""What a rank sends, and keeps in memory, when there are many: the formulas and tables of scaling.md.

    python docs/scaling.py

Legend: P parameters, N ranks, b bytes of a gradient on its way. Sent is what one rank sends in one step, with the ring
algorithms that move the least: an all-reduce of n bytes among N sends 2 n (N - 1) / N, a reduce-scatter or an
all-gather half of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from apex.transformer.pipeline_parallel._schedule import schedule
from apex.transformer.pipeline_parallel._simulate import report

RANKS = (1, 2, 8, 64, 256, 1024)
# A step of a model of 7 billion parameters in bfloat16, with Adam's state and master weights in float32.
PARAMETERS = 7_000_000_000
# ResNet-50 has 53 batch norms with 26,560 channels.
LAYERS, CHANNELS = 53, 26_560
# A GPT of 175 billion parameters: 96 layers of 12,288, 1,536 sequences of 2,048 tokens in a step, one at a time.
GPT_LAYERS, HIDDEN, SEQUENCE, VOCABULARY, SEQUENCES = 96, 12_288, 2_048, 51_200, 1_536
SCHEDULES = {"1F1B": ("1f1b", 1), "interleaved": ("interleaved", 2), "ZB-H1": ("zb_h1", 1), "ZB-V": ("zb_v", 2)}
# Per rank: 50 GB/s is one 400 Gb/s network card for each GPU; 10 microseconds from one machine to another.
BANDWIDTH, LATENCY = 50e9, 10e-6


@dataclass(frozen=True)
class Cost:
    """Of one rank and one step: bytes sent, messages (collective calls), and bytes in memory between steps."""

    sent: float
    messages: int
    memory: float

    def seconds(self, ranks: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> float:
        """At least: bytes at full speed, and for each message a way up and down a tree of the ranks."""
        return self.sent / bandwidth + self.messages * 2 * math.ceil(math.log2(ranks)) * latency


def all_reduce(count: float, ranks: int) -> float:
    return 2 * count * (ranks - 1) / ranks


def half_of_it(count: float, ranks: int) -> float:
    """A reduce-scatter, or an all-gather, of `count` bytes in all."""
    return count * (ranks - 1) / ranks


def ddp(parameters: int, ranks: int, *, gradient: int = 2, weight: int = 2, state: int = 12) -> Cost:
    """`DistributedDataParallel(message_size=10_000_000)`: gradients stay in their buckets, the state is whole.

    The last bucket is sent in three parts.
    """
    sent = all_reduce(parameters * gradient, ranks)
    return Cost(sent, math.ceil(parameters / 10_000_000) + 2, parameters * (weight + gradient + state))


def zero(
    parameters: int,
    ranks: int,
    *,
    redundant: int = 1,
    gradient: int = 2,
    sent_weight: int = 2,
    weight: int = 2,
    state: int = 12,
    bucket: int = 100 * 2**20,
    in_flight: int = 2,
) -> Cost:
    """`DistributedFusedAdam(bucket_cap_mb=100, pipeline_size=2)`: state divided by ranks / redundant.

    Gradients are scattered among the ranks that divide the state, then summed among those that repeat it; parameters
    are gathered among the first. Buckets on their way are whole.
    """
    divided = ranks // redundant
    sent = half_of_it(parameters * (gradient + sent_weight), divided)
    sent += all_reduce(parameters * gradient / divided, redundant)
    buckets = math.ceil(parameters * gradient / bucket)
    calls = (2 if divided > 1 else 0) + (1 if redundant > 1 else 0)
    on_the_way = min(in_flight, buckets) * bucket if ranks > 1 else 0
    return Cost(sent, buckets * calls, parameters * (weight + (gradient + state) / divided) + on_the_way)


def sync_batchnorm(layers: int, channels: int, ranks: int) -> Cost:
    """Forward an all-gather of 2 C + 1 float32 values per layer, backward an all-reduce of as many."""
    values = 4 * (2 * channels + layers)
    sent = half_of_it(values * ranks, ranks) + all_reduce(values, ranks)
    return Cost(sent, 2 * layers, values * ranks)


@dataclass(frozen=True)
class Split:
    """How a model is divided: tensor-parallel ranks, pipeline ranks, replicas."""

    tensor: int
    pipeline: int
    replicas: int

    @staticmethod
    def of(ranks: int) -> Split:
        """Up to 8 ranks of a machine divide the layers, up to 16 machines are stages, the rest are replicas."""
        tensor = min(8, ranks)
        pipeline = min(16, ranks // tensor)
        return Split(tensor, pipeline, ranks // tensor // pipeline)

    def __str__(self) -> str:
        return f"{self.tensor} x {self.pipeline} x {self.replicas}"

    @property
    def microbatches(self) -> int:
        return SEQUENCES // self.replicas


def gpt_parameters() -> int:
    """Of all layers and the embedding: 12 h^2 + 13 h each, and a row for each word and position."""
    return GPT_LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN) + (VOCABULARY + SEQUENCE) * HIDDEN


def idle_share(name: str, ranks: int, microbatches: int) -> float:
    """The part of a step in which the worst rank waits, if forward and both parts of backward take the same time."""
    if ranks == 1:
        return 0.0
    kind, chunks = SCHEDULES[name]
    # From 2 ranks - 1 microbatches on the idle time no longer depends on their number.
    found = schedule(kind, ranks, chunks, 4 * ranks)
    idle = max(report(found.placement, found.actions).bubbles)
    return idle / (idle + 3 * chunks * microbatches)


def activations_held(name: str, ranks: int) -> float:
    """The most that a rank holds at once, in activations of all its layers for one microbatch."""
    if ranks == 1:
        return 1.0
    kind, chunks = SCHEDULES[name]
    found = schedule(kind, ranks, chunks, 4 * ranks)
    return max(report(found.placement, found.actions).peaks) / chunks


def tensor_parallel_bytes(split: Split, *, sequence_parallel: bool = True) -> float:
    """Sent by a rank in a step: per layer and microbatch two sums forward and two backward.

    With sequence parallelism each sum is a reduce-scatter beside an all-gather of the same size, and the input of the
    two layers that split their outputs is gathered again for their weights' gradients.
    """
    sizes = 2 * SEQUENCE * HIDDEN
    halves = 10 if sequence_parallel else 8
    layers = GPT_LAYERS // split.pipeline
    return layers * split.microbatches * halves * half_of_it(sizes, split.tensor)


def pipeline_bytes(split: Split, chunks: int = 1) -> float:
    """Sent by a rank in the middle: each microbatch forward and backward from each chunk, its part of the sequence."""
    if split.pipeline == 1:
        return 0.0
    return 2 * chunks * split.microbatches * 2 * SEQUENCE * HIDDEN / split.tensor


def activation_bytes(name: str, split: Split) -> float:
    """34 bytes per element of the hidden state and layer, with attention computed anew; split with the sequence."""
    layers = GPT_LAYERS // split.pipeline
    return activations_held(name, split.pipeline) * layers * 34 * SEQUENCE * HIDDEN / split.tensor


def table(rows: list[tuple[str, list[str]]], first: str = "ranks", heads: tuple[int, ...] = RANKS) -> str:
    head = [first, *(f"{each}" for each in heads)]
    lines = [head, ["---"] * len(head), *([name, *cells] for name, cells in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def tables() -> dict[str, str]:
    """By name, as they are in scaling.md."""

    def rows(costs: list[Cost]) -> list[tuple[str, list[str]]]:
        times = [cost.seconds(ranks) for cost, ranks in zip(costs, RANKS, strict=True)]
        return [
            ("sent, GB", [f"{cost.sent / 1e9:.2f}" for cost in costs]),
            ("messages", [f"{cost.messages}" if ranks > 1 else "0" for cost, ranks in zip(costs, RANKS, strict=True)]),
            ("memory, GB", [f"{cost.memory / 1e9:.1f}" for cost in costs]),
            ("time, ms", [f"{1e3 * seconds:.0f}" for seconds in times]),
        ]

    stages = (2, 4, 8, 16)
    splits = [Split.of(ranks) for ranks in RANKS]
    shards = [zero(gpt_parameters() // (each.tensor * each.pipeline), each.replicas) for each in splits]
    batch_norm = [sync_batchnorm(LAYERS, CHANNELS, ranks) for ranks in RANKS]
    grouped = [sync_batchnorm(LAYERS, CHANNELS, min(8, ranks)) for ranks in RANKS]
    return {
        "ddp": table(rows([ddp(PARAMETERS, ranks) for ranks in RANKS])),
        "zero": table(rows([zero(PARAMETERS, ranks) for ranks in RANKS])),
        "zero, redundant": table(
            rows([zero(PARAMETERS, ranks, redundant=max(1, ranks // 8)) for ranks in RANKS]),
        ),
        "schedules": table(
            [
                *(
                    (f"{name}, idle", [f"{100 * idle_share(name, each, 4 * each):.1f}%" for each in stages])
                    for name in SCHEDULES
                ),
                *(
                    (f"{name}, activations", [f"{activations_held(name, each):.1f}" for each in stages])
                    for name in SCHEDULES
                ),
            ],
            "pipeline ranks",
            stages,
        ),
        "split gpt": table(
            [
                ("tensor x pipeline x replicas", [str(each) for each in splits]),
                ("sent by layers, GB", [f"{tensor_parallel_bytes(each) / 1e9:.0f}" for each in splits]),
                ("sent by stages, GB", [f"{pipeline_bytes(each) / 1e9:.1f}" for each in splits]),
                ("the same with 2 chunks", [f"{pipeline_bytes(each, 2) / 1e9:.1f}" for each in splits]),
                ("sent by replicas, GB", [f"{cost.sent / 1e9:.1f}" for cost in shards]),
                ("weights and state, GB", [f"{cost.memory / 1e9:.1f}" for cost in shards]),
                *(
                    (f"activations, {name}, GB", [f"{activation_bytes(name, each) / 1e9:.1f}" for each in splits])
                    for name in SCHEDULES
                ),
                *(
                    (
                        f"idle, {name}",
                        [f"{100 * idle_share(name, each.pipeline, each.microbatches):.2f}%" for each in splits],
                    )
                    for name in SCHEDULES
                ),
            ]
        ),
        "batch norm": table(
            [
                ("sent, MB", [f"{cost.sent / 1e6:.2f}" for cost in batch_norm]),
                ("gathered at once by the widest layer, MB", [f"{4 * 4097 * n / 1e6:.2f}" for n in RANKS]),
                ("sent in groups of 8, MB", [f"{cost.sent / 1e6:.2f}" for cost in grouped]),
                ("messages", ["0", *(f"{cost.messages}" for cost in batch_norm[1:])]),
            ]
        ),
    }


if __name__ == "__main__":
    for name, text in tables().items():
        print(f"{name}\n\n{text}\n")
