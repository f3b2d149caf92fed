"""Decoders of transformers after `apex.fuse`: causal attention without a mask wherever a plain call needs none.

A capture is simulated: transformers asks PyTorch whether a stream is being captured, and is told that one is.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import apex

try:
    import transformers

    from .families import FAMILIES as CONFIGURATIONS
    from .test_language import MODELS, batch, make
except (ImportError, pytest.skip.Exception):
    transformers, MODELS = None, {}

needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed")
FAMILIES = [name for name in MODELS if name not in ("gemma2", "t5")]  # these refuse SDPA, or add a bias to the logits


@contextmanager
def recorded_masks(capturing: bool = False) -> Iterator[list[tuple[bool, bool]]]:
    """Record for each call of PyTorch's attention whether it has a mask, and whether it is causal."""
    calls: list[tuple[bool, bool]] = []
    attend = functional.scaled_dot_product_attention

    def spy(*args: Any, attn_mask: Any = None, is_causal: bool = False, **options: Any) -> Tensor:
        calls.append((attn_mask is not None, is_causal))
        return attend(*args, attn_mask=attn_mask, is_causal=is_causal, **options)

    with (
        mock.patch("torch.nn.functional.scaled_dot_product_attention", spy),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=capturing),
    ):
        yield calls


def fused(name: str, changes: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """Return a model with only the rule of this file, and a copy without it."""
    model = make(name)
    for key, value in (changes or {}).items():
        setattr(model.config, key, value)
    plain = copy.deepcopy(model)
    apex.fuse(model, choose=lambda name, _: name in ("model", "transformer"), verbose=False, **options)
    decoders = [m for m in model.modules() if hasattr(m, "fused_rule") and m.fused_rule.name.startswith("causal")]
    assert len(decoders) == 1
    return model, plain


def results(model: Any, **inputs: Any) -> list[Tensor]:
    loss = model(**inputs).loss
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return [loss.detach(), *(g for g in gradients if g is not None)]


def assert_same_bits(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) > 1
    assert all(map(torch.equal, one, other))


@needs_transformers
@pytest.mark.parametrize("use_cache", [None, False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_captured_step_needs_no_mask_and_has_the_bits_of_eager(name: str, use_cache: bool | None) -> None:
    if not hasattr(transformers, MODELS[name][0]):
        pytest.skip(f"this transformers has no {name}")
    model, plain = fused(name)
    inputs = batch() if use_cache is None else {**batch(), "use_cache": use_cache}
    wanted = results(plain, **batch(), use_cache=True)  # with a cache, old releases look at no positions
    with recorded_masks(capturing=True) as calls:
        found = results(model, **inputs)
    assert set(calls) == {(False, True)}
    assert_same_bits(found, wanted)


@needs_transformers
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_compiled_step_needs_no_mask_and_has_the_bits_of_eager(name: str) -> None:
    model, plain = fused(name)
    masks: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        attend = torch._C._nn.scaled_dot_product_attention
        nodes = [n for n in graph.graph.nodes if n.target in (attend, functional.scaled_dot_product_attention)]
        masks.extend(node.kwargs.get("attn_mask") is not None or len(node.args) > 3 for node in nodes)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=name != "gpt2")  # whose loss logs a warning
    found = results(compiled, **batch(), use_cache=False)
    assert masks == [False]
    assert_same_bits(found, results(plain, **batch(), use_cache=True))


def _left_padding() -> Tensor:
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    return mask


def _packed() -> Tensor:
    return torch.cat((torch.arange(5), torch.arange(7))).expand(2, 12)


@needs_transformers
@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize(
    ("name", "changes", "inputs"),
    [
        ("mistral", {"sliding_window": 4}, {}),
        ("llama", {"is_causal": False}, {}),
        ("llama", {"_attn_implementation": "eager"}, {}),
        ("llama", {}, {"attention_mask": _left_padding()}),
        ("llama", {}, {"position_ids": _packed()}),
        ("llama", {}, {"attention_mask": torch.zeros(2, 1, 12, 12).masked_fill_(torch.eye(12) == 0, -1e4)}),
    ],
    ids=["sliding window", "not causal", "another implementation", "padding", "packed", "a mask of its own"],
)
def test_other_masks_stay(name: str, changes: dict[str, Any], inputs: dict[str, Tensor], capturing: bool) -> None:
    model, plain = fused(name)
    for each in (model, plain):
        for key, value in changes.items():
            setattr(each.config, key, value)
    with recorded_masks(capturing):
        assert_same_bits(results(model, **batch(), **inputs), results(plain, **batch(), **inputs))
    if inputs or "sliding_window" in changes:  # old releases do not know is_causal
        assert not torch.allclose(results(model, **batch(), **inputs)[0], results(make(name), **batch())[0])


_LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)


@needs_transformers
@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize(
    ("name", "changes", "has_mask"),
    [
        ("llama4_text", {"attention_chunk_size": 4, "no_rope_layers": [1, 0]}, {True, False}),
        ("llama4_text", {"attention_chunk_size": 64, "no_rope_layers": [1, 0]}, {False}),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"], **_LINEAR}, {False}),
    ],
    ids=["short chunks", "long chunks", "linear attention"],
)
def test_layers_of_other_kinds(name: str, changes: dict[str, Any], has_mask: set[bool], capturing: bool) -> None:
    family = CONFIGURATIONS[name]
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("the configurations are of transformers 5")
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**{**family.options, **changes})
    model: Any = getattr(transformers, family.model)(config).train()
    plain = copy.deepcopy(model)
    report = apex.fuse(model, choose=lambda name, _: name == "model", verbose=False)
    assert [row.rule for row in report if not row.reason] == ["causal attention without a mask"]
    wanted = results(plain, **batch(), use_cache=True)
    with recorded_masks(capturing) as calls:
        found = results(model, **batch(), use_cache=False)
    assert {is_masked for is_masked, _ in calls} == has_mask
    assert_same_bits(found, wanted)


@needs_transformers
def test_generation_and_a_given_cache() -> None:
    model, plain = fused("llama")
    model.eval(), plain.eval()
    ids = batch()["input_ids"]
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=False, attention_mask=_left_padding())
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    outputs = []
    for each in (model, plain):
        start = each(input_ids=ids[:, :7], use_cache=True)
        outputs.append(each(input_ids=ids[:, 7:], past_key_values=start.past_key_values).logits)
    assert torch.equal(*outputs)


@needs_transformers
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_right_padding_is_dropped_on_request(name: str) -> None:
    model, plain = fused(name, padding="right")
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, 8:] = 0
    inputs = batch()
    inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    wanted = results(plain, **inputs, attention_mask=mask)
    with recorded_masks(capturing=True) as calls:
        found = results(model, **inputs, attention_mask=mask)
    assert set(calls) == {(False, True)}
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad():  # evaluation, as generation, may have its padding in front
        kinds = [each.eval()(input_ids=inputs["input_ids"], attention_mask=_left_padding()) for each in (model, plain)]
    assert torch.equal(kinds[0].logits, kinds[1].logits)


@needs_transformers
def test_gradient_checkpointing() -> None:
    model, plain = fused("llama")
    for each in (model, plain):
        each.gradient_checkpointing_enable(dict(use_reentrant=False))
    wanted = results(plain, **batch())
    with recorded_masks(capturing=True) as calls, torch.random.fork_rng(enabled=False):
        loss = model(**batch()).loss
    assert set(calls) == {(False, True)}
    assert_same_bits([loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])], wanted)


@needs_transformers
def test_the_implementations_name_is_not_changed(tmp_path: Any) -> None:
    model, plain = fused("llama")
    assert model.config._attn_implementation == "sdpa"
    assert model.config.to_dict() == plain.config.to_dict()
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).train()
    assert_same_bits(results(again, **batch()), results(plain, **batch()))
    apex.unfuse(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@needs_transformers
def test_an_exported_program_keeps_its_mask() -> None:
    model, _ = fused("llama")
    program = torch.export.export(model.eval().model, (batch()["input_ids"],), {"use_cache": False}, strict=False)
    wanted = model.model(batch()["input_ids"]).last_hidden_state
    torch.testing.assert_close(program.module()(batch()["input_ids"], use_cache=False).last_hidden_state, wanted)
    assert "is_causal=True" not in str(program.graph).replace(" ", "")


# A stand-in with the structure of a decoder of transformers, for machines without it.


def create_causal_mask(
    config: Any, inputs_embeds: Tensor, attention_mask: Any, position_ids: Tensor, or_mask_function: Any = None
) -> Tensor:
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    return mask if attention_mask is None else mask & (attention_mask[:, None, None] > 0)


create_causal_mask.__module__ = "transformers.masking_utils"


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(_attn_implementation="sdpa")

    def forward(self, inputs_embeds: Tensor, attention_mask: Any = None, position_ids: Any = None) -> Tensor:
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=torch.arange(12) if position_ids is None else position_ids,
        )
        x = inputs_embeds
        return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None)


def test_a_decoder_needs_a_mask_only_if_its_caller_gave_something() -> None:
    model = Decoder()
    assert [row.reason for row in apex.fuse(model, verbose=False)] == [""]
    x = torch.randn(2, 1, 12, 8, generator=torch.Generator().manual_seed(0))
    wanted = Decoder()(x)
    for options, has_mask in [
        ({}, False),
        ({"attention_mask": torch.ones(2, 12)}, True),
        ({"position_ids": torch.arange(12)}, True),
    ]:
        with recorded_masks() as calls:
            torch.testing.assert_close(model(x, **options), wanted)
        assert calls == [(has_mask, not has_mask)]
    for change in ({"_attn_implementation": "eager"}, {"is_causal": False}):
        model.config = types.SimpleNamespace(**{"_attn_implementation": "sdpa", **change})
        with recorded_masks() as calls:
            model(x)
        assert calls == [(True, False)]


def test_the_promise_of_right_padding() -> None:
    model, x, mask = Decoder(), torch.randn(2, 1, 12, 8), torch.ones(2, 12)
    apex.fuse(model, padding="right", verbose=False)
    with recorded_masks() as calls:
        model(x, mask), model.eval()(x, mask)
    assert calls == [(False, True), (True, False)]
    with pytest.raises(ValueError, match="padding='left' is not known"):
        apex.fuse(Decoder(), padding="left", verbose=False)


def test_a_decoder_with_another_attention_is_reported() -> None:
    model = Decoder()
    model.config._attn_implementation = "eager"
    (row,) = apex.fuse(model, verbose=False)
    assert row.reason == "its attention is 'eager', not PyTorch's"
