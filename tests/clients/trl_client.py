"""TRL: its SFT, DPO, KTO and GRPO trainers, with and without the losses of `apex.integrations.trl`."""

import contextlib
import functools
import importlib.metadata
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from checks import run
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl_calls import PLACES

from apex.integrations import trl as ours

RELEASE = tuple(map(int, importlib.metadata.version("trl").split(".")[:2]))
WORDS = ["<pad>", "<s>", "</s>", *(f"w{index}" for index in range(29))]
STEPS = 4
# Before 1.14 a trainer makes a fused loss if it is asked to. Liger's other kernels need a GPU.
KERNELS = ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
ASKS: dict[str, Any] = {}
if RELEASE < (1, 0):
    ASKS = {"use_liger_loss": True}
elif RELEASE < (1, 14):
    ASKS = {"use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(KERNELS, False)}


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def counting(start: int, length: int, step: int = 1) -> str:
    return " ".join(f"w{(start + step * index) % 29}" for index in range(length))


def train(make: Callable[[str], Any], fused: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Return the logged losses and the weights after a few steps of the trainer that `make` makes."""
    with tempfile.TemporaryDirectory() as folder, ours.enabled() if fused else contextlib.nullcontext():
        trainer = make(folder)
        torch.manual_seed(1)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == STEPS, losses
        return losses, [parameter.detach().clone() for parameter in trainer.model.parameters()]


def compare(make: Callable[[str, dict[str, Any]], Any], **asks: Any) -> str:
    """Train with TRL's losses and with ours; both give the same losses and weights."""
    expected, weights = train(lambda folder: make(folder, {}), False)
    calls = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for place, name in PLACES:
            stack.enter_context(ours._swapped(place, name, counted(getattr(place, name))))
        losses, found = train(lambda folder: make(folder, asks), True)
    assert calls >= STEPS, f"our functions were called {calls} times"
    # Losses are logged with four to six digits.
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=2e-6)
    for after, other, before in zip(found, weights, model().parameters(), strict=True):
        change = (other - before.detach()).abs().max()
        torch.testing.assert_close(after, other, rtol=0.0, atol=max(2e-2 * float(change), 1e-6))
    return f"losses {', '.join(f'{loss:.4f}' for loss in losses)}, equal with and without"


def with_settings(make: Callable[..., Any], folder: str, asks: dict[str, Any], **more: Any) -> Any:
    return make(folder, {**asks, **more})


def settings(kind: type, folder: str, **more: Any) -> Any:
    return kind(
        folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=4, learning_rate=0.1, logging_steps=1,
        optim="sgd", report_to=[], disable_tqdm=True, save_strategy="no", bf16=False, gradient_checkpointing=False,
        **more,
    )  # fmt: skip


def check_sft() -> str:
    """`SFTTrainer` on a Llama, 4 steps"""
    data = Dataset.from_list([{"text": counting(start, 8 + start % 5)} for start in range(16)])

    def make(folder: str, asks: dict[str, Any]) -> SFTTrainer:
        arguments = settings(SFTConfig, folder, max_length=32, **asks)
        return SFTTrainer(model(), arguments, train_dataset=data, processing_class=tokenizer())

    return compare(make)


def dpo_trainer(folder: str, asks: dict[str, Any]) -> DPOTrainer:
    rows = [
        {
            "prompt": counting(start, 3),
            "chosen": " " + counting(start + 3, 4 + start % 3),
            "rejected": " " + counting(start, 5, 7),
        }
        for start in range(16)
    ]
    arguments = settings(DPOConfig, folder, max_length=32, **asks)
    return DPOTrainer(
        model(), model(), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )


def check_dpo() -> str:
    """`DPOTrainer` on a Llama, 4 steps"""
    return compare(dpo_trainer, **ASKS)


def check_dpo_losses() -> str:
    """`DPOTrainer` with its other losses"""
    if not (1, 4) <= RELEASE < (1, 14):
        return "not run: this release makes no fused loss of them"
    types = ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down")
    types += ("discopop", "sft", "sigmoid_norm")
    for name in types:
        compare(functools.partial(with_settings, dpo_trainer, loss_type=[name]), **ASKS)
    return f"{', '.join(types)}: losses equal with and without"


def check_kto() -> str:
    """`KTOTrainer` on a Llama, 4 steps"""
    rows = [
        {
            "prompt": counting(start, 3),
            "completion": " " + counting(start, 4 + start % 3, 1 + start % 2),
            "label": start % 2 == 0,
        }
        for start in range(16)
    ]

    def make(folder: str, asks: dict[str, Any]) -> KTOTrainer:
        arguments = settings(KTOConfig, folder, max_length=32, **asks)
        return KTOTrainer(
            model(), model(), args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
        )

    return compare(make, **ASKS)


def grpo_trainer(folder: str, asks: dict[str, Any]) -> GRPOTrainer:
    data = Dataset.from_list([{"prompt": counting(start, 3)} for start in range(16)])

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    arguments = settings(
        GRPOConfig, folder, num_generations=4, max_completion_length=8, beta=0.05, num_iterations=2, **asks
    )
    model().save_pretrained(f"{folder}/start")  # the reference model is read from there
    return GRPOTrainer(f"{folder}/start", reward, args=arguments, train_dataset=data, processing_class=tokenizer())


def check_grpo() -> str:
    """`GRPOTrainer` on a Llama with two updates per batch and a KL penalty, 4 steps"""
    return compare(grpo_trainer, **ASKS)


def check_grpo_losses() -> str:
    """`GRPOTrainer` with its other losses"""
    if RELEASE >= (1, 14):
        return "not run: this release makes no fused loss of them"
    variants = [{"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo")]
    if RELEASE >= (1, 4):
        variants += [{"loss_type": name} for name in ("cispo", "sapo", "vespo")]
        variants += [{"loss_type": name, "importance_sampling_level": "sequence"} for name in ("grpo", "luspo")]
    for variant in variants:
        compare(functools.partial(with_settings, grpo_trainer, **variant), **ASKS)
    return f"{', '.join(' '.join(variant.values()) for variant in variants)}: losses equal with and without"


run(__name__, "trl", "transformers")
