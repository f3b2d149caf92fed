"""Packed sequences after `apex.fuse`: the loss and gradients of sequences that are computed one by one."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import apex
from apex._fuse import packed

try:
    from .test_language import make, transformers
except (ImportError, pytest.skip.Exception):
    transformers = None

needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed")
LENGTHS = (5, 1, 6)


def packed_batch(device: str = "cpu") -> dict[str, Any]:
    ids = torch.randint(1, 97, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    edges = torch.tensor([0, 5, 6, 12], dtype=torch.int32, device=device)
    labels = ids.clone()
    labels[0, [0, 5, 6]] = -100  # nothing predicts the first token of a sequence
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    tensors = {"input_ids": ids, "labels": labels, "position_ids": positions}
    lengths = {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    return {**{n: t.to(device) for n, t in tensors.items()}, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges, **lengths}


def loss_and_gradients(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    loss = model(**inputs).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def alone(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Return loss and gradients of the sequences one by one: the mean over all predicted tokens."""
    losses, count = [], 0
    for ids in inputs["input_ids"].split(LENGTHS, 1):
        if ids.shape[1] > 1:
            losses.append(model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1))
            count += ids.shape[1] - 1
    loss = sum(losses) / count
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@needs_transformers
@pytest.mark.parametrize("capturing", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_packed_sequences_do_not_see_each_other(name: str, capturing: bool) -> None:
    model = make(name)
    plain, inputs = copy.deepcopy(model), packed_batch()
    apex.fuse(model, verbose=False)
    if not model.model.fused_settings.takes_packed:
        pytest.skip("this transformers has no table of attention functions")
    with (
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=capturing),
        mock.patch.object(packed, "_mask_of", wraps=packed._mask_of) as masks,
    ):
        results = loss_and_gradients(model, inputs)
    assert masks.call_count == model.config.num_hidden_layers
    for found, wanted in zip(results, alone(plain, inputs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@needs_transformers
def test_a_decoder_with_attention_that_is_not_fused_gets_a_mask() -> None:
    model = make("llama")
    apex.fuse(model, choose=lambda name, _: not name.endswith("self_attn"), verbose=False)
    assert not model.model.fused_settings.takes_packed
    with mock.patch.object(packed, "packed_mask", side_effect=AssertionError):
        model(**packed_batch())


@needs_transformers
def test_attention_that_does_not_know_packed_batches_raises() -> None:
    """Attention that was unfused behind the decoder's back must not mix sequences."""
    model = make("llama")
    apex.fuse(model, verbose=False)
    if not model.model.fused_settings.takes_packed:
        pytest.skip("this transformers has no table of attention functions")
    apex.unfuse(model.model.layers[0].self_attn)
    with pytest.raises(RuntimeError, match="size"):
        model(**packed_batch())


def test_attention_functions_are_called_with_a_mask_by_position_or_by_name() -> None:
    """Decoders of transformers pass the mask by position, vision models by name."""

    def add(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float) -> Any:
        return query + key + value, attention_mask, scaling

    interface, x, mask = packed.PackedInterface({"sdpa": add}), torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 3)
    for given in (None, mask):
        for output, found, scaling in (
            interface["sdpa"](None, x, x, x, given, scaling=2.0),
            interface["sdpa"](None, x, x, x, attention_mask=given, scaling=2.0),
        ):
            assert torch.equal(output, 3 * x)
            assert found is given
            assert scaling == 2.0


def test_the_mask_of_edges() -> None:
    mask = packed._mask_of(torch.tensor([0, 2, 3]), 4)[0, 0]  # the last token is in no sequence
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).bool()
    assert torch.equal(mask, expected)


def test_only_whole_edges_of_one_row_count() -> None:
    inputs = packed_batch()
    assert packed.has_edges(inputs)
    for name in packed.EDGES:
        assert not packed.has_edges({**inputs, name: None})
    assert not packed.has_edges({**inputs, "input_ids": inputs["input_ids"].view(2, 6)})
    assert not packed.has_edges({**inputs, "max_length_q": torch.tensor(6)})  # reading it would wait for a device


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 2])
def test_flash_attention_has_the_numbers_of_a_mask(heads: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((1, 4, 12, 64), (1, heads, 12, 64), (1, heads, 12, 64))
    tensors = [torch.randn(s, generator=generator, device="cuda").bfloat16().requires_grad_() for s in shapes]
    edges = {name: value for name, value in packed_batch("cuda").items() if name in packed.EDGES}

    def masked(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any) -> Any:
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2), None

    results = []
    for mask in (packed.packed_mask(torch.device("cuda")), packed._mask_of(edges["cu_seq_lens_q"], 12)):
        output, _ = packed.attend(masked, None, *tensors, mask, scaling=0.1, **edges)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), tensors)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
