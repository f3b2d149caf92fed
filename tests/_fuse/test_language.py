"""Models of transformers, from small configurations: the same numbers with and without `apex.fuse`."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import apex

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

_LLAMA: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
)
_NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
_T5: dict[str, Any] = dict(
    vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0
)
# model class, configuration class, configuration, rules that are used, class of what stays as it is
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, 6, ""),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, 6, ""),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _LLAMA, 6, ""),
    "mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA, 6, ""),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _LLAMA, 6, ""),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _LLAMA, 5, "Gemma2Model"),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _LLAMA, 6, ""),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        dict(vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=64, **_NO_DROPOUT),
        5,
        "",
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", dict(**_T5, feed_forward_proj="gated-gelu"), 4, ""),
}


def make(name: str) -> Any:
    model_class, config_class, options, *_ = MODELS[name]
    if not hasattr(transformers, model_class):
        pytest.skip(f"this transformers has no {model_class}")
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(1, 97, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: Any, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    loss = model(**inputs).loss
    parameters = [p for p in model.parameters() if p.requires_grad]
    return loss.detach(), [g for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None]


def assert_alike(model: Any, plain: Any, rtol: float = 2e-6, **inputs: Any) -> None:
    """Compare loss and gradients; a whole model gets the tolerance of a few ops in a row."""
    loss, found = gradients(model, **inputs)
    wanted_loss, wanted = gradients(plain, **inputs)
    torch.testing.assert_close(loss, wanted_loss, rtol=rtol, atol=1e-6)
    assert len(found) == len(wanted) > 0
    for actual, expected in zip(found, wanted, strict=True):
        assert float((actual - expected).norm()) <= rtol * float(expected.norm()) + 1e-7


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_same_numbers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = make(name)
    plain = copy.deepcopy(model)
    *_, rules, kept = MODELS[name]
    report = apex.fuse(model, check=batch())
    if transformers.__version__ >= "5":
        assert len({row.rule for row in report if not row.reason}) == rules, str(report)
        assert {row.kind for row in report if row.reason} == ({kept} if kept else set()), str(report)
    assert capsys.readouterr().out == f"{report}\n"
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert_alike(model, plain, **batch())
    model.eval(), plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch()).logits, plain(**batch()).logits, rtol=1e-5, atol=5e-6)
    apex.unfuse(model)
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys()


def test_the_plus_one_of_gemma_is_found() -> None:
    rules = {row.rule for name in ("gemma", "llama") for row in apex.fuse(make(name), verbose=False)}
    assert {"RMS norm of weight", "RMS norm of 1 + weight"} <= rules


def test_a_head_in_training_holds_no_logits() -> None:
    model = make("llama")
    apex.fuse(model, verbose=False)
    inputs = batch()
    assert model(**inputs).logits is None
    loss, *others = model(**inputs, return_dict=False)
    assert loss.dim() == 0
    assert not any(isinstance(t, Tensor) and t.shape[-1] in (32, 97) for t in others)
    assert model(input_ids=inputs["input_ids"]).logits.shape == (2, 12, 97)
    assert model.eval()(**inputs).logits.shape == (2, 12, 97)


@pytest.mark.parametrize("shifted", [False, True])
def test_the_options_of_a_trainers_loss(shifted: bool) -> None:
    model = make("llama")
    plain = copy.deepcopy(model)
    apex.fuse(model, verbose=False)
    options: dict[str, Any] = {"num_items_in_batch": torch.tensor(7)}
    if shifted:
        options["shift_labels"] = batch()["labels"].roll(-1, 1)
    assert_alike(model, plain, **batch(), **options)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)


def test_another_loss_or_a_head_with_hooks_gets_its_logits() -> None:
    model = make("llama")
    apex.fuse(model, verbose=False)
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    assert model(**batch()).logits is not None
    handle.remove()
    if type(model).loss_function.fset is None:
        pytest.skip("this transformers has no other losses")
    model.loss_function = lambda logits, labels, **options: logits.sum()
    outputs = model(**batch())
    assert torch.equal(outputs.loss, outputs.logits.sum())


def test_copies_and_pickles_stay_fused_and_other_models_untouched() -> None:
    model = make("qwen3")
    plain = copy.deepcopy(model)
    apex.fuse(model, verbose=False)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(m) for m in copied.modules()] == [type(m) for m in model.modules()]
        assert_alike(copied, plain, **batch())
        apex.unfuse(copied)
        assert type(copied) is type(plain)
    assert type(make("qwen3").model.layers[0].self_attn) is type(plain.model.layers[0].self_attn)
    assert isinstance(model, type(plain))
    assert type(model).__name__ == type(plain).__name__
    assert repr(model).startswith("FusedQwen3ForCausalLM(")


def test_positions_that_differ_within_a_batch() -> None:
    model = make("llama")
    plain = copy.deepcopy(model)
    apex.fuse(model, verbose=False)
    positions = torch.stack([torch.arange(12), torch.arange(12) + 5])
    assert_alike(model, plain, **batch(), position_ids=positions)


def test_half_precision() -> None:
    model = make("gemma").bfloat16()
    exact = copy.deepcopy(model).float()
    plain = copy.deepcopy(model)
    report = apex.fuse(model, check=batch(), verbose=False)
    assert not [row for row in report if row.reason], str(report)
    wanted_loss, wanted = gradients(exact, **batch())
    errors = []
    for candidate in (model, plain):
        loss, found = gradients(candidate, **batch())
        assert float((loss - wanted_loss).abs()) < 1e-2
        pairs = zip(found, wanted, strict=True)
        errors.append(sum(float((a - b).norm() / b.norm()) for a, b in pairs) / len(wanted))
    assert errors[0] < 1.2 * errors[1]  # no further from float32 than the plain model is


def test_generation() -> None:
    model = make("llama").eval()
    ids = batch()["input_ids"]
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    apex.fuse(model, verbose=False)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)


def test_torch_compile() -> None:
    model = make("llama")
    plain = copy.deepcopy(model)
    apex.fuse(model, verbose=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_alike(compiled, plain, **batch())


@pytest.mark.parametrize("use_cache", [None, False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_positions_that_begin_anew_mean_the_same(name: str, use_cache: bool | None) -> None:
    """Without a cache, transformers takes them for packed sequences, so that fused models must not drop the cache."""
    plain = make(name)
    fused = copy.deepcopy(plain)
    apex.fuse(fused, verbose=False)
    inputs: dict[str, Any] = {**batch(), "position_ids": (torch.arange(12) % 6).expand(2, -1)}
    if use_cache is not None:
        inputs["use_cache"] = use_cache
    (wanted, wanted_gradients), (found, found_gradients) = (gradients(each, **inputs) for each in (plain, fused))
    torch.testing.assert_close(found, wanted)
    for actual, expected in zip(found_gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fuse_first", [True, False])
def test_adapters_of_peft(fuse_first: bool) -> None:
    """LoRA layers in fused modules are called, and merge into the weights as usual."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    options = {"r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": False, "modules_to_save": ["lm_head"]}
    config = peft.LoraConfig(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"], **options)
    model = make("llama")
    plain = copy.deepcopy(model)
    if fuse_first:
        apex.fuse(model, verbose=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, copy.deepcopy(config))
    torch.manual_seed(0)
    plain = peft.get_peft_model(plain, config)
    if not fuse_first:
        report = apex.fuse(model, verbose=False)
        assert not [row for row in report if row.kind.startswith("Peft")]
    assert_alike(model, plain, rtol=1e-5, **batch())
    merged, expected = (each.merge_and_unload().eval() for each in (model, plain))
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch()).logits, expected(**batch()).logits, rtol=1e-4, atol=1e-5)
