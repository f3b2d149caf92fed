"""A model of the package transformers, made on the spot: boosts, trains, is saved, and read by `from_pretrained`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from apex.booster.plugin._fusion_arguments import FusionArguments
from apex.booster.plugin._gradient_checkpoints import GradientCheckpointConfig, checkpoint_layers, chosen_layers

from .problem import booster as make

transformers = pytest.importorskip("transformers", reason="transformers is not a part of the test extra: it is large")


@pytest.mark.parametrize("use_safetensors", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16_naive"])
def test_from_pretrained_reads_a_saved_folder(precision: str, use_safetensors: bool, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)  # the embedding and the head share a weight
    booster = make(precision)
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    words = torch.randint(0, 64, (4, 16))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = boosted(input_ids=words, labels=words).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert boosted.config is config
    booster.save_model(boosted, tmp_path, shard=True, size_per_shard=0, use_safetensors=use_safetensors)
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    masters = getattr(boosted, "masters", None)
    exact = {} if masters is None else masters.read()
    for (name, param), value in zip(model.named_parameters(), read.parameters(), strict=True):
        torch.testing.assert_close(value.detach().float(), exact.get(param, param).detach().float(), msg=name)
    booster.load_model(boosted, tmp_path)


def test_layers_are_checkpointed_and_fused_as_plugins_ask() -> None:
    """Check that gradients do not change, that a layer's cache is filled once, and that logits are returned."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, attn_implementation="eager"
    )
    words = torch.randint(0, 64, (4, 16))
    found = []
    for changes in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(copy.deepcopy(config)).train()
        if changes:
            FusionArguments(True, False, False, False).apply(model)
            checkpoint_layers(chosen_layers(model, GradientCheckpointConfig(0.5), 0))
            assert model.config._attn_implementation == "sdpa"
        calls = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *given, calls=calls: calls.append(1))
        outputs = model(input_ids=words, labels=words)
        outputs.loss.backward()
        assert outputs.logits is not None
        assert len(calls) == 1 + changes
        found.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*found)
