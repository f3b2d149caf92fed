"""Megatron's command line and the values that are derived from it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from apex.transformer.testing import global_vars
from apex.transformer.testing.arguments import _parser, parse_args

SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32"


def parse(monkeypatch: pytest.MonkeyPatch, words: str, world_size: int = 1, **options: Any) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL.split(), *words.split()])
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    return parse_args(**options)


def test_every_option_exists_once() -> None:
    options = [action for action in _parser()._actions if action.dest != "help"]
    assert len(options) == 173
    assert len({action.dest for action in options}) == 173


def test_values_derived_from_options(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--micro-batch-size 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16"
    args = parse(
        monkeypatch, f"{words} --sequence-parallel --num-layers-per-virtual-pipeline-stage 1 --no-bias-gelu-fusion", 8
    )
    assert (args.data_parallel_size, args.global_batch_size, args.virtual_pipeline_model_parallel_size) == (2, 4, 2)
    assert (args.ffn_hidden_size, args.kv_channels, args.encoder_seq_length) == (256, 16, 32)
    assert args.params_dtype == torch.bfloat16
    assert args.accumulate_allreduce_grads_in_fp32
    assert args.gradient_accumulation_fusion
    assert not args.async_tensor_model_parallel_allreduce
    assert not args.bias_gelu_fusion
    assert args.masked_softmax_fusion
    assert (args.optimizer, args.lr, args.seed, args.split) == ("adam", None, 1234, "969, 30, 1")
    with pytest.warns(
        UserWarning, match="--tensor-model-parallel-size 2 is more than fits into 1 processes: 1 is used"
    ):
        alone = parse(monkeypatch, "--micro-batch-size 2 --tensor-model-parallel-size 2 --checkpoint-activations")
    assert (alone.tensor_model_parallel_size, alone.recompute_granularity) == (1, "full")
    assert alone.async_tensor_model_parallel_allreduce


def test_defaults_fill_and_overrides_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    def extra(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--own", type=int, default=7)
        return parser

    args = parse(
        monkeypatch,
        "--lr 0.5 --unknown 3",
        extra_args_provider=extra,
        defaults={"micro_batch_size": 3, "lr": 0.1},
        override_args={"hidden_size": 128},
        ignore_unknown_args=True,
    )
    assert (args.micro_batch_size, args.lr, args.hidden_size, args.own) == (3, 0.5, 128, 7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--micro-batch-size is required"),
        ("--micro-batch-size 0", "--micro-batch-size must be positive, got 0"),
        ("--micro-batch-size 1 --batch-size 2", "use --micro-batch-size instead"),
        ("--micro-batch-size 1 --fp16 --bf16", "cannot be given together"),
        ("--micro-batch-size 1 --train-iters 5 --train-samples 9", "--train-samples cannot be used with --train-iters"),
        ("--micro-batch-size 1 --hidden-size 65", "not divisible by 4 attention heads"),
        ("--micro-batch-size 1 --max-position-embeddings 16", "below a sequence's length"),
        ("--micro-batch-size 1 --encoder-seq-length 16", "exactly one of"),
        ("--micro-batch-size 1 --distribute-saved-activations", "needs tensor parallelism"),
        ("--micro-batch-size 1 --num-layers-per-virtual-pipeline-stage 1", "interleaving needs at least 2"),
    ],
)
def test_contradictions_are_named(words: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=said):
        parse(monkeypatch, words)


@pytest.fixture
def forgotten_afterwards() -> Iterator[None]:
    yield
    global_vars.destroy_global_vars()


@pytest.mark.usefixtures("forgotten_afterwards")
def test_global_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="args is not initialized"):
        global_vars.get_args()
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL.split()])
    grows = {"micro_batch_size": 2, "global_batch_size": 8, "rampup_batch_size": [4, 2, 10], "train_samples": 99}
    global_vars.set_global_variables(override_args=grows)
    with pytest.raises(AssertionError, match="args is already initialized"):
        global_vars.set_global_variables()
    assert global_vars.get_args().hidden_size == 64
    assert (global_vars.get_num_microbatches(), global_vars.get_current_global_batch_size()) == (2, 4)
    global_vars.update_num_microbatches(100)
    assert (global_vars.get_num_microbatches(), global_vars.get_current_global_batch_size()) == (4, 8)
    assert (global_vars.get_tensorboard_writer(), global_vars.get_adlr_autoresume()) == (None, None)
    timers = global_vars.get_timers()
    timers("step").start()
    assert timers("step").elapsed(reset=False) > 0
    timers("step").stop()
    with pytest.raises(AssertionError, match="timer 'step' is not started"):
        timers("step").stop()
    timers.log(["step"])
    assert capsys.readouterr().out.startswith("time (ms) | step: ")
    assert timers("step").elapsed() == 0.0
