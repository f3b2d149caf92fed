"""Checks of `apex.integrations.transformers`; `make clients` runs them with the oldest and the newest transformers."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import apex
from apex.integrations.transformers import CapturedStepMixin, FuseCallback
from tests.graphs.recorder import CpuGraphs

VOCABULARY = 32


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes))


def counting() -> list[dict[str, torch.Tensor]]:
    rows = [(torch.arange(16) + start) % VOCABULARY for start in range(16)]
    return [{"input_ids": row, "labels": row} for row in rows]


class CapturedTrainer(CapturedStepMixin, Trainer):
    """A trainer whose graphs are recorded operators, which a CPU can replay."""

    graphs = CpuGraphs


def train(kind: type[Trainer] = Trainer, steps: int = 3, **options: Any) -> tuple[list[float], Trainer]:
    """Return the losses of some steps, with clipping and two accumulated batches a step, and the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=1e-2, logging_steps=1, max_grad_norm=0.5, save_strategy="no", report_to=[], disable_tqdm=True,
            seed=0,
        )  # fmt: skip
        options = {"train_dataset": counting(), **options}
        trainer = kind(llama(), arguments, **options)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def check_fuse_callback() -> str:
    """`Trainer` with `FuseCallback`: a tiny Llama with clipping and accumulation, three steps"""
    callback = FuseCallback()
    losses, trainer = train(callbacks=[callback])
    expected, _ = train()
    fused = [row.rule for row in callback.report or () if not row.reason]
    assert len(fused) >= 9, str(callback.report)
    assert isinstance(trainer.optimizer.optimizer, apex.optimizers.FusedAdam), str(callback.optimizer_report)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        outputs = trainer.model.eval()(**{name: value[None] for name, value in counting()[0].items()})
    assert outputs.logits.shape == (1, 16, VOCABULARY)
    return f"losses equal to those without it: {', '.join(f'{loss:.3f}' for loss in losses)}"


def check_optimizer_class() -> str:
    """`Trainer` with `optimizer_cls_and_kwargs=(FusedAdam, ...)`, three steps"""
    options = {"lr": 1e-2, "weight_decay": 0.0}
    losses, _ = train(optimizer_cls_and_kwargs=(apex.optimizers.FusedAdam, options))
    expected, _ = train(optimizer_cls_and_kwargs=(torch.optim.AdamW, options))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    return "losses equal to those with `torch.optim.AdamW`"


def check_captured_trainer() -> str:
    """`CapturedStepMixin`: 14 steps of two batches, the last of an epoch shorter; graphs are recorded operators"""
    data = counting()[:15]
    losses, trainer = train(CapturedTrainer, 14, train_dataset=data)
    expected, plain = train(Trainer, 14, train_dataset=data)
    assert trainer.captured_step.reason is None, trainer.captured_step.reason
    replays = int(trainer.captured_step.report().split(", ")[-1].split()[0])
    assert replays >= 8, trainer.captured_step.report()
    assert losses == expected, (losses, expected)
    for found, wanted in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(found, wanted)
    return f"losses and weights equal, bit for bit; {trainer.captured_step.report()}"
