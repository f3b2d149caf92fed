"""Hugging Face transformers: the Trainer with apex's AdamW and with apex's amp, and T5 on FusedRMSNorm."""

import tempfile

import torch
from checks import falls, run
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from transformers.models.t5 import modeling_t5

import apex

VOCABULARY = 32


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2))


def counting(seq2seq: bool = False) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up: what comes next can be learned."""
    rows = [(torch.arange(16) + start) % (VOCABULARY - 2) + 2 for start in range(64)]
    return [{"input_ids": row[:8] if seq2seq else row, "labels": row[8:] if seq2seq else row} for row in rows]


def train(model: torch.nn.Module, data: list[dict[str, torch.Tensor]], **arguments: object) -> tuple[Trainer, str]:
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, use_cpu=True, max_steps=40, per_device_train_batch_size=16, learning_rate=1e-2, logging_steps=1,
            save_steps=20, report_to=[], disable_tqdm=True, **arguments,
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=data)
        trainer.train()
    return trainer, falls([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def check_adamw_apex_fused() -> str:
    """`Trainer` with `optim="adamw_apex_fused"` on a GPT-2"""
    trainer, outcome = train(gpt2(), counting(), optim="adamw_apex_fused")
    assert isinstance(trainer.optimizer.optimizer, apex.optimizers.FusedAdam)
    return outcome


def check_resume() -> str:
    """the same from a checkpoint of the `Trainer`"""
    settings = {"use_cpu": True, "per_device_train_batch_size": 16, "report_to": [], "disable_tqdm": True}
    settings |= {"max_steps": 20, "save_steps": 10, "optim": "adamw_apex_fused", "logging_steps": 1}
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for checkpoint in (None, f"{folder}/checkpoint-10"):
            torch.manual_seed(0)
            trainer = Trainer(gpt2(), TrainingArguments(folder, **settings), train_dataset=counting())
            trainer.train(resume_from_checkpoint=checkpoint)
            runs.append([parameter.detach().clone() for parameter in trainer.model.parameters()])
    assert all(map(torch.equal, *runs))
    return "weights equal bit for bit those of a run without a break"


def check_apex_amp() -> str:
    """`Trainer` with `half_precision_backend="apex"`, O1"""
    from apex import amp

    _, outcome = train(
        gpt2(), counting(), optim="adamw_apex_fused", fp16=True, half_precision_backend="apex", fp16_opt_level="O1"
    )
    assert amp.state_dict()["loss_scaler0"]["unskipped"] > 0
    amp.shutdown()
    return outcome


def check_t5_norm() -> str:
    """T5, whose norms are `apex.normalization.FusedRMSNorm`"""
    assert modeling_t5.T5LayerNorm is apex.normalization.FusedRMSNorm
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    norms = [module for module in model.modules() if isinstance(module, apex.normalization.FusedRMSNorm)]
    trainer, outcome = train(model, counting(seq2seq=True), optim="adamw_apex_fused")
    generated = trainer.model.generate(counting(seq2seq=True)[0]["input_ids"][None], max_new_tokens=8)
    assert generated.shape[0] == 1
    return f"{outcome}, {len(norms)} norms"


run(__name__, "transformers", "accelerate")
