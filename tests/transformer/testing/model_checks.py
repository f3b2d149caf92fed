"""Checks of GPT and BERT that run in four processes, and of GPT in some layouts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex._distributed import collectives
from apex.optimizers import FusedAdam
from apex.transformer import finalize_model_grads, parallel_state, tensor_parallel
from apex.transformer._groups.device import parameter_device
from apex.transformer.context_parallel import get_batch_on_this_cp_rank, get_thd_batch_on_this_cp_rank
from apex.transformer.enums import ModelType
from apex.transformer.packed_seq_params import PackedSeqParams
from apex.transformer.pipeline_parallel import build_model, utils
from apex.transformer.pipeline_parallel._steps import forward_step
from apex.transformer.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from apex.transformer.pipeline_parallel.schedules.common import _get_params_for_weight_decay_optimization
from apex.transformer.testing import global_vars
from apex.transformer.testing.standalone_bert import BertModel, bert_model_provider
from apex.transformer.testing.standalone_gpt import GPTModel, gpt_model_provider
from apex.transformer.testing.standalone_transformer_lm import (
    ParallelTransformerLayer,
    TransformerConfig,
    stage_layers,
)
from tests.support.grids import pairs

from .gpt import LENGTH, WORDS, Layout, config_of, groups, part_of, reference, train
from .grid_checks import SOME, checks

KINDS: tuple[dict[str, Any], ...] = ({}, {"position_embedding": "rope", "activation": "swiglu"})
# Tensor-parallel ranks, options, and whether they change no bit.
OPTIONS: tuple[tuple[int, dict[str, Any], bool], ...] = (
    (1, {"recompute": "selective"}, True),
    (1, {"recompute": "full"}, True),
    (1, {"recompute": "full", "recompute_method": "block"}, True),
    (1, {"attention": "sdpa"}, False),
    (4, {}, False),
    (4, {"recompute": "full", "distribute_saved_activations": True}, False),
    (4, {"recompute": "full", "sequence_parallel": True, "recompute_num_layers": 2}, False),
)


def words_of(batch: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (batch, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    words = words.to(parameter_device())
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def gpt(**options: Any) -> GPTModel:
    return GPTModel(**options).to(parameter_device())


def gradients_of(model: nn.Module, *, data_parallel: bool | None = None) -> dict[str, Tensor]:
    finalize_model_grads(model, data_parallel=data_parallel)
    return {name: p.grad for name, p in model.named_parameters()}


def every_option_of_one_stage(rank: int) -> None:
    """Recomputation and offloading change no bit; other ways to compute the same stay close."""
    inputs, labels = words_of(2)

    @functools.cache
    def of_one_process(kind: int) -> tuple[TransformerConfig, dict[str, Tensor | None], Tensor]:
        base = config_of(2, params_dtype=torch.float64, **KINDS[kind])
        with groups(Layout()):
            whole = gpt(config=base)
            whole(inputs, labels=labels).mean().backward()
            return base, {name: p.grad for name, p in whole.named_parameters()}, whole(inputs)

    for (tensor, changes, exact), kind in pairs(OPTIONS, range(len(KINDS)), each=1):
        base, expected, logits = of_one_process(kind)
        with groups(Layout(tensor)):
            model = gpt(config=replace(base, **changes), cpu_offload=exact)
            model(inputs, labels=labels, reduction="none" if exact else "mean").mean().backward()
            for name, found in gradients_of(model, data_parallel=False).items():
                wanted = part_of(expected[name], model.get_parameter(name))
                tolerance = 0.0 if exact else 1e-12
                torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance, msg=f"{changes}, {name}")
            gathered = gpt(config=replace(base, **changes), parallel_output=False)(inputs)
            torch.testing.assert_close(gathered, logits, rtol=0, atol=1e-12)


def masks_and_dropout(rank: int) -> None:
    """A mask of later keys equals causal attention without a mask; recomputed dropout repeats."""
    inputs, labels = words_of(2)
    mask, _, positions = utils.get_ltor_masks_and_position_ids(inputs, WORDS, False, False, False)
    for attention in ("softmax", "sdpa"):
        with groups(Layout()):
            model = gpt(config=config_of(2, attention=attention))
            torch.testing.assert_close(model(inputs, positions, mask, labels=labels), model(inputs, labels=labels))
    for sequence in (False, True):
        found = []
        for recompute in (None, "selective", "full"):
            with groups(Layout(2)):
                tensor_parallel.model_parallel_cuda_manual_seed(3)
                options = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "sequence_parallel": sequence}
                model = gpt(config=config_of(2, recompute=recompute, **options))
                model(inputs, labels=labels).mean().backward()
                found.append(gradients_of(model, data_parallel=False))
        for name, expected in found[0].items():
            assert torch.equal(found[1][name], expected), name
            assert torch.equal(found[2][name], expected), name


def gradients_in_main_grad(rank: int) -> None:
    """The shared embedding gets one part of its gradient in main_grad, from the logits, and the other in grad."""
    inputs, labels = words_of(2)
    found = []
    for fusion in (False, True):
        with groups(Layout(2)):
            model = gpt(config=config_of(2, gradient_accumulation_fusion=fusion, sequence_parallel=True))
            for parameter in model.parameters() if fusion else ():
                parameter.main_grad = torch.zeros_like(parameter)
            for _ in range(2):
                model(inputs, labels=labels, reduction="mean").backward()
            found.append(gradients_of(model, data_parallel=False))
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-5, atol=1e-6, msg=name)


def ignored_labels_do_not_count_in_the_mean(rank: int) -> None:
    inputs, labels = words_of(2)
    labels[0, 5:] = -100
    for layout, options in ((Layout(), {}), (Layout(), {"gradient_accumulation_fusion": True}), (Layout(2), {})):
        with groups(layout):
            model = gpt(config=config_of(2, params_dtype=torch.float64, **options))
            losses = model(inputs, labels=labels)
            expected = losses[labels != -100].mean()
            torch.testing.assert_close(model(inputs, labels=labels, reduction="mean"), expected)


def unusual_inputs(rank: int) -> None:
    """Empty batches work; a mask of kept words, which would be added to the scores, is refused."""
    inputs, _ = words_of(2)
    for options in ({}, {"attention": "sdpa"}):
        with groups(Layout()):
            model = gpt(config=config_of(2, **options))
            for mask in (torch.ones(1, LENGTH), torch.ones(1, LENGTH, dtype=torch.bool)):
                with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 16\], expected \[1 or batch, 1"):
                    model(inputs[:1], attention_mask=mask)
            with pytest.raises(ValueError, match=r"input_ids has shape \[16\], expected \[batch, words\]"):
                model(inputs[0])
            for empty in (inputs[:0], inputs[:, :0]):
                losses = model(empty, labels=empty)
                losses.sum().backward()
                assert losses.shape == empty.shape


def two_copies_of_the_embedding_are_one(rank: int) -> None:
    """Layouts are compared with two copies of the shared weight, as in pipelines; this compares two copies with one."""
    copies = reference(4, params_dtype=torch.float64)
    with groups(Layout()):
        model = gpt(config=config_of(4, params_dtype=torch.float64))
        one = train([model], forward_backward_no_pipelining, data_parallel=False)
    for step, (found, expected) in enumerate(zip(copies.gradients, one.gradients, strict=True)):
        for name, gradient in expected.items():
            difference = (found[name] - gradient).abs().max() / gradient.abs().max()
            assert difference < 1e-12, f"{name}, step {step}: off by {difference:.2g}"


def bert_equals_one_process(rank: int) -> None:
    inputs, labels = words_of(2)
    mask = torch.ones_like(inputs)
    mask[1, LENGTH // 2 :] = 0
    types = (torch.arange(LENGTH, device=inputs.device) > 5).long().expand(2, -1)

    def run(config: Any) -> tuple[Tensor, Tensor, BertModel]:
        model = BertModel(config=config).to(parameter_device())
        losses, binary = model(inputs, mask, types, labels)
        ((losses * mask).sum() / mask.sum() + binary.square().sum()).backward()
        return losses, binary, model

    base = config_of(2, params_dtype=torch.float64)
    with groups(Layout()):
        losses, binary, whole = run(base)
        changed = inputs.clone()
        changed[1, LENGTH // 2 :] += 1
        kept = mask.bool()
        other = whole(changed % WORDS, mask, types, labels)[0]
        assert torch.equal(other[kept], losses[kept])  # padding is not seen
        assert not torch.equal(other[~kept], losses[~kept])
    for sequence in (False, True):
        with groups(Layout(4)):
            found = run(replace(base, sequence_parallel=sequence))
            torch.testing.assert_close(found[:2], (losses, binary), rtol=0, atol=1e-12)
            for name, gradient in gradients_of(found[2], data_parallel=False).items():
                wanted = part_of(whole.get_parameter(name).grad, found[2].get_parameter(name))
                torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12, msg=name)


@contextmanager
def command_line(rank: int, **options: Any) -> Iterator[Any]:
    """Set the sizes of a model as upstream's tests do."""
    before, sys.argv = sys.argv, ["test"]
    sizes = {"micro_batch_size": 2, "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": LENGTH}
    sizes |= {"max_position_embeddings": LENGTH, "global_batch_size": 8, "world_size": 4, "rank": rank, **options}
    try:
        global_vars.set_global_variables(override_args=sizes, ignore_unknown_args=True)
        args = global_vars.get_args()
        args.padded_vocab_size = WORDS
        sizes = (args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
        utils._reconfigure_microbatch_calculator(1, None, *sizes)
        yield args
    finally:
        sys.argv = before
        global_vars.destroy_global_vars()


def gpt_of_the_command_line(rank: int) -> None:
    """Run three steps as upstream's test; of two microbatches in flight one is recomputed completely."""
    with (
        command_line(
            rank, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True
        ) as args,
        groups(Layout(2, 2)),
    ):
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        model = build_model(gpt_model_provider, False, None, cpu_offload=args.cpu_offload)
        optimizer = torch.optim.Adam(_get_params_for_weight_decay_optimization(model), lr=1e-2)

        recomputed = set()

        def step(batch: list[Tensor], model: nn.Module, recompute: bool) -> Any:
            recomputed.add(recompute)
            words = batch[0]
            mask, weights, positions = utils.get_ltor_masks_and_position_ids(words, WORDS, False, False, False)
            output = model(words, positions, mask, labels=batch[1], checkpoint_activations_micro_batch=recompute)

            def loss(output: Tensor) -> Any:
                value = (output.view(-1) * weights.view(-1)).sum() / weights.sum()
                return value, utils.average_losses_across_data_parallel_group([value])

            return output, loss

        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses += forward_backward_pipelining_without_interleaving(
                step,
                list(words_of(8)),
                model,
                forward_only=False,
                tensor_shape=(args.seq_length, args.micro_batch_size, args.hidden_size),
                async_comm=True,
                sequence_parallel_enabled=args.sequence_parallel,
                num_micro_batches_with_partial_activation_checkpoints=1,
            )
            finalize_model_grads(model)
            optimizer.step()
        assert recomputed == ({False} if parallel_state.is_pipeline_last_stage() else {False, True})
        if parallel_state.is_pipeline_last_stage():
            assert losses[-1] < losses[3] - 0.1
        else:
            assert not losses


def bert_of_the_command_line(rank: int) -> None:
    """Run the interleaved schedule without a binary head, as upstream's test."""
    options = {"pipeline_model_parallel_size": 2, "bert_binary_head": False}
    with command_line(rank, **options) as args, groups(Layout(1, 2, chunks=2)):
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        model = build_model(bert_model_provider, True, 2, cpu_offload=args.cpu_offload)
        optimizer = FusedAdam(_get_params_for_weight_decay_optimization(model), lr=1e-2)

        def step(batch: list[Tensor], model: nn.Module) -> Any:
            words, labels = batch
            output = model(words, torch.ones_like(words), lm_labels=labels)

            def loss(output: Any) -> Any:
                losses, binary = output
                assert binary is None
                return losses.mean(), losses.detach().mean()

            return output, loss

        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            run = get_forward_backward_func(2, 2)
            losses += run(step, list(words_of(4)), model, forward_only=False)
            finalize_model_grads(model)
            optimizer.step()
        assert not losses or losses[-1] < losses[1] - 0.1


def layers_of_a_stage(rank: int) -> None:
    config = config_of(8)
    found = []
    for chunks, folded in ((1, False), (2, False), (2, True)):
        with groups(Layout(1, 4, chunks=chunks)):
            for chunk in range(chunks):
                if chunks > 1:
                    parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
                found.append(list(stage_layers(config, folded)))
    assert found == [[2 * rank, 2 * rank + 1], [rank], [rank + 4], [rank], [7 - rank]]
    with groups(Layout(1, 4)), pytest.raises(ValueError, match="num_layers must be a multiple of 4 pipeline stages"):
        stage_layers(config_of(6))
    with groups(Layout(1, 4)), pytest.raises(ValueError, match="cannot have the layers"):
        GPTModel(pre_process=rank != 0, post_process=rank == 3, config=config)
    with pytest.raises(ValueError, match="attention must be one of"):
        config_of(2, attention="flash")
    with groups(Layout(1, 2, chunks=2)):
        kinds = {"virtual_pipeline_model_parallel_size": 2, "model_type": ModelType.encoder_or_decoder}
        if parallel_state.get_pipeline_model_parallel_rank() == 0:  # the last stage is here with a fold
            with pytest.raises(ValueError, match="is `folded` that of its placement"):
                build_model(gpt_model_provider, False, placement="v", config=config, **kinds)


def exchanges_of_a_layer(rank: int) -> None:
    """Count, as docs/scaling.py does, the elements of the hidden state in sums, gathers and scatters."""
    hidden = torch.ones(LENGTH, 2, 32, device=parameter_device(), requires_grad=True)
    for sequence, halves in ((False, 8), (True, 10)):
        counted: list[int] = []

        def counting(name: str, place: int, times: int, counted: list[int] = counted) -> Any:
            original = getattr(collectives, name)

            def run(*arguments: Any) -> Any:
                if arguments[place].dtype.is_floating_point:  # not a comparison of shapes
                    counted.append(times * arguments[place].numel())
                return original(*arguments)

            return run

        with groups(Layout(4)), pytest.MonkeyPatch.context() as patch:
            layer = ParallelTransformerLayer(config_of(1, sequence_parallel=sequence), 0).to(hidden.device)
            x = hidden.chunk(4)[rank] if sequence else hidden
            for name, place, times in (("all_reduce", 0, 2), ("all_gather", 0, 1), ("reduce_scatter", 1, 1)):
                patch.setattr(collectives, name, counting(name, place, times))
            layer(x).sum().backward()
        assert sum(counted) == halves * hidden.numel(), sequence


def mistakes_are_named(rank: int) -> None:
    """Errors name the argument, its value and the accepted values."""
    with pytest.raises(ValueError, match=r"hidden_size=32 is not divisible by num_attention_heads=5: .* kv_channels"):
        config_of(1, num_attention_heads=5)
    words = words_of(1)[0]
    longer = torch.cat([words, words], 1)
    with groups(Layout()):
        model = gpt(config=config_of(1))
        message = rf"a sequence of {2 * LENGTH} words is longer than max_position_embeddings={LENGTH}"
        with pytest.raises(ValueError, match=message):
            model(longer)
        positions = torch.arange(LENGTH, device=words.device)[None] + 1
        if not positions.is_cuda:
            message = rf"position_ids has positions from 1 to {LENGTH}; 0 to {LENGTH - 1} are accepted"
            with pytest.raises(ValueError, match=message):
                model(words, positions)
            with pytest.raises(ValueError, match='position_ids are for position_embedding="learned"'):
                gpt(config=config_of(1, position_embedding="rope"))(words, positions - positions % 4)
        assert model(words, positions - 1).shape == (1, LENGTH, WORDS)
        rotated = gpt(config=config_of(1, position_embedding="rope"))
        assert rotated(longer).shape[1] == 2 * LENGTH
        assert torch.equal(rotated(words, positions - 1), rotated(words))
        for mask in (torch.ones_like(words)[:, None, None], torch.ones_like(words)[:, 1:]):
            with pytest.raises(ValueError, match=r"attention_mask has shape \[.*expected the words' \[batch, words\]"):
                BertModel(0, False, config=config_of(1)).to(words.device)(words, mask)
        for types, given, message in (
            (2, None, r"tokentype_ids is None, and the model has num_tokentypes=2: .*torch\.zeros_like"),
            (0, torch.zeros_like(words), r"tokentype_ids is given, and the model has num_tokentypes=0"),
        ):
            bert = BertModel(types, False, config=config_of(1)).to(words.device)
            with pytest.raises(ValueError, match=message):
                bert(words, torch.ones_like(words), given)
    with groups(Layout(4)):
        for options, message in (
            ({"num_attention_heads": 2}, "num_attention_heads over the tensor-parallel ranks: 2 is not divisible by 4"),
            ({"vocab_size": 30}, "words of the vocabulary over the tensor-parallel ranks: 30 is not divisible by 4"),
            ({"ffn_hidden_size": 30}, "output_size over the tensor-parallel ranks: 30 is not divisible by 4"),
        ):
            with pytest.raises(AssertionError, match=message):
                gpt(config=config_of(1, **options))


def _gradients_split_over(context: int, tensor: int, config: Any, batch: dict[str, Tensor], packed: Any) -> None:
    """Compare a GPT whose sequences are split over ranks with one process; labels of -100 do not count."""
    with groups(Layout()):
        whole = gpt(config=config)
        losses = whole(batch["words"], labels=batch["labels"], packed_seq_params=packed)
        (losses.sum() / (batch["labels"] >= 0).sum()).backward()
        expected = {name: p.grad for name, p in whole.named_parameters()}
    with groups(Layout(tensor, context=context)):
        part, params = get_batch_on_this_cp_rank(batch), None
        if packed is not None:
            part, params = get_thd_batch_on_this_cp_rank(batch, packed.cu_seqlens_q, None, packed.max_seqlen_q)
        model = gpt(config=config)

        def step(part: dict[str, Tensor], model: nn.Module) -> Any:
            tokens = (part["labels"] >= 0).sum()
            return model(part["words"], labels=part["labels"], packed_seq_params=params), lambda x: (x.sum(), tokens, x)

        forward_step(step, part, model, None, [], None, num_microbatches=1).backward()
        for name, gradient in gradients_of(model).items():
            wanted = part_of(expected[name], model.get_parameter(name))
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12, msg=f"{config}, {name}")


def split_sequences_of_gpt(rank: int) -> None:
    """Every exchange, with grouped queries, tensor parallelism, packed documents, recomputation and ignored labels."""
    inputs, labels = words_of(3)
    labels[0, :5], labels[2, 9:11] = -100, -100  # of other numbers of words on each rank
    dense = {"words": inputs, "labels": labels}
    inputs, labels = inputs[:2], labels[:2]
    row = {"words": inputs.reshape(1, -1), "labels": labels.reshape(1, -1)}
    bounds = torch.tensor([0, 8, 24, 32], dtype=torch.int32, device=inputs.device)
    packed = PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=16, max_seqlen_kv=16)
    kinds = (("p2p", "rope", "full"), ("a2a", "learned", None), ("all_gather", "rope", "selective"))
    for comm, position, recompute in kinds:
        options = {"num_query_groups": 4, "position_embedding": position, "cp_comm_type": comm, "recompute": recompute}
        config = config_of(2, params_dtype=torch.float64, **options)
        _gradients_split_over(2, 2, replace(config, sequence_parallel=comm == "p2p"), dense, None)
        _gradients_split_over(4, 1, config, row, packed)


def packed_documents_are_documents_by_themselves(rank: int) -> None:
    inputs, labels = (tensor[:1] for tensor in words_of(1))
    bounds = torch.tensor([0, 5, 6, LENGTH], dtype=torch.int32, device=inputs.device)
    packed = PackedSeqParams(cu_seqlens_q=bounds, max_seqlen_q=LENGTH - 6)
    for position in ("learned", "rope"):
        config = config_of(2, params_dtype=torch.float64, position_embedding=position, num_query_groups=2)
        with groups(Layout()):
            model = gpt(config=config)
            found = model(inputs, labels=labels, packed_seq_params=packed)
            edges = bounds.tolist()
            alone = [model(inputs[:, start:end], labels=labels[:, start:end]) for start, end in pairwise(edges)]
            torch.testing.assert_close(found, torch.cat(alone, 1), rtol=0, atol=1e-12)
            recomputed = gpt(config=replace(config, recompute="selective"))
            recomputed(inputs, labels=labels, packed_seq_params=packed).mean().backward()
            mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=inputs.device)
            with pytest.raises(ValueError, match="attention_mask must be None"):
                model(inputs, None, mask, packed_seq_params=packed)
            with pytest.raises(ValueError, match="the batch has 2"):
                model(inputs.repeat(2, 1), packed_seq_params=packed)


def random_numbers_of_split_sequences(rank: int) -> None:
    """Hidden dropout drops other elements on each context-parallel rank, and the same on tensor-parallel ranks."""
    with groups(Layout(2, context=2)):
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        torch.manual_seed(7)
        layer = ParallelTransformerLayer(config_of(1, hidden_dropout=0.5), 0)
        dropped = layer._dropout(torch.ones(64, device=parameter_device())) == 0
        everyone = torch.stack(collectives.gather_objects(dropped.cpu(), "masks"))
        assert torch.equal(everyone[0], everyone[1])
        assert torch.equal(everyone[2], everyone[3])
        assert not torch.equal(everyone[0], everyone[2])
        with pytest.raises(ValueError, match=r"attention_dropout=0\.1 must be 0"):
            ParallelTransformerLayer(config_of(1, attention_dropout=0.1), 0)
        mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool, device=parameter_device())
        with pytest.raises(ValueError, match="attention_mask must be None with packed_seq_params or context"):
            gpt(config=config_of(1))(words_of(1)[0][:, :4], None, mask)
    with pytest.raises(ValueError, match="num_query_groups=3 must divide"):
        config_of(1, num_query_groups=3)
    with pytest.raises(ValueError, match="cp_comm_type must be one of"):
        config_of(1, cp_comm_type="a2a+p2p")


CHECKS = {
    check.__name__: check
    for check in (
        every_option_of_one_stage,
        masks_and_dropout,
        gradients_in_main_grad,
        ignored_labels_do_not_count_in_the_mean,
        unusual_inputs,
        two_copies_of_the_embedding_are_one,
        bert_equals_one_process,
        gpt_of_the_command_line,
        bert_of_the_command_line,
        layers_of_a_stage,
        mistakes_are_named,
        exchanges_of_a_layer,
        split_sequences_of_gpt,
        packed_documents_are_documents_by_themselves,
        random_numbers_of_split_sequences,
    )
}
CHECKS |= checks(SOME[4])
