"""Checks of pipelines with replicas, tensor parallelism and an encoder, in eight processes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.parallel import DistributedDataParallel
from apex.transformer import finalize_model_grads, parallel_state, tensor_parallel
from apex.transformer._groups.device import parameter_device
from apex.transformer.enums import ModelType
from apex.transformer.pipeline_parallel import build_model, utils
from apex.transformer.pipeline_parallel.schedules import forward_backward_no_pipelining
from apex.transformer.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.support.first_rank import from_first_rank
from tests.support.harness import sum_error

from .toy import (
    HIDDEN,
    LENGTH,
    SAMPLES,
    SHAPE,
    STEPS,
    Layer,
    Part,
    Whole,
    assert_same_gradients,
    batch_of,
    in_one_process,
    parts_of,
    pipeline,
    set_microbatches,
    step_function,
)

# The terms of all sums behind a gradient: two linear layers and a norm per layer of at most 8 layers, forward and
# backward, then all samples of four microbatches of two replicas.
TERMS = 2 * 8 * (HIDDEN + 8 + 8) + 4 * 2 * SAMPLES * LENGTH


@functools.cache
def of_all_replicas(layers: int, microbatches: int, replicas: int) -> Whole:
    """Return parameters, and means of gradients over replicas with different batches; the first process computes."""
    set_microbatches(microbatches)

    def run() -> Whole:
        model = Part(range(layers)).to(parameter_device())
        for replica in range(replicas):
            batch = batch_of(microbatches, seed=replica)
            forward_backward_no_pipelining(step_function, batch, model, forward_only=False)
        for param in model.parameters():
            param.grad /= replicas
        return Whole.of(model)

    return from_first_rank(run)


def assert_close_to(whole: Whole, parts: list[nn.Module]) -> None:
    for part in utils.unwrap_model(parts):
        for name, param in part.named_parameters():
            assert_same_sums(param.grad, whole.gradients[name], name)


def assert_same_sums(gradient: Tensor, wanted: Tensor, name: str) -> None:
    atol = sum_error(wanted.dtype, TERMS) * float(wanted.abs().max())
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=atol, msg=name)


def torch_replicas(rank: int) -> None:
    """Gradients are reduced once, with and without the modules' own no_sync as the caller's context."""
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb_v", 2)):
        for handler in (False, True):
            with pipeline(4, None if chunks == 1 else chunks):
                replica = parallel_state.get_data_parallel_rank()
                model = parts_of(name, chunks, 1, wrap=True)
                reductions = []
                for part in model:
                    part.register_comm_hook(reductions, counting)
                options = {"custom_sync_context_handler": model[0].no_sync} if handler else {}
                set_microbatches(4)
                batch = batch_of(4, seed=replica)
                STEPS[name](step_function, batch, model, forward_only=False, tensor_shape=SHAPE, **options)
                assert len(reductions) == chunks
                assert all(part.require_backward_grad_sync for part in model)
                finalize_model_grads(model)
                assert_close_to(of_all_replicas(4 * chunks, 4, 2), model)


def counting(reductions, bucket):  # without types: torch reads them, and not as strings
    reductions.append(1)
    group = parallel_state.get_data_parallel_group()
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / dist.get_world_size(group))


def apex_replicas(rank: int) -> None:
    ranks = dist.get_world_size()
    for step in (forward_backward_no_pipelining, STEPS["1f1b"]):
        for handler in (False, True):
            with pipeline(1, None):
                model = DistributedDataParallel(Part(range(2)).to(parameter_device()))
                options = {"custom_sync_context_handler": model.no_sync} if handler else {}
                set_microbatches(3)
                step(step_function, batch_of(3, seed=rank), model, forward_only=False, **options)
                assert_close_to(of_all_replicas(2, 3, ranks), [model])


def replicas_with_unused_parameters(rank: int) -> None:
    """Torch's search for unused parameters works with a backward pass in two parts."""
    with pipeline(4, None):
        group, replica = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_rank()
        (part,) = parts_of("zb_h1", 1, 1)
        part.extra = nn.Linear(1, 1).to(parameter_device())
        model = nn.parallel.DistributedDataParallel(part, process_group=group, find_unused_parameters=True)
        set_microbatches(4)
        STEPS["zb_h1"](step_function, batch_of(4, seed=replica), model, forward_only=False)
        assert part.extra.weight.grad is None
        del part.extra
        assert_close_to(of_all_replicas(4, 4, 2), [model])
        unchanging = nn.parallel.DistributedDataParallel(part, process_group=group, static_graph=True)
        with pytest.raises(ValueError, match="static_graph=False"):
            STEPS["zb_h1"](step_function, batch_of(4, seed=replica), unchanging, forward_only=False)


def kept_back_by_the_caller(rank: int) -> None:
    """Nothing is reduced if the caller entered `no_sync` before the step."""
    for wrap in (nn.parallel.DistributedDataParallel, DistributedDataParallel):
        with pipeline(1, None):
            model = wrap(Part(range(2)).to(parameter_device()))
            set_microbatches(2)
            with model.no_sync():
                forward_backward_no_pipelining(step_function, batch_of(2, seed=rank), model, forward_only=False)
            alone = Part(range(2)).to(parameter_device())
            forward_backward_no_pipelining(step_function, batch_of(2, seed=rank), alone, forward_only=False)
            assert_same_gradients([model], Whole.of(alone))


def sharded_optimizer(rank: int) -> None:
    """With ZeRO's no_sync as the caller's context, the optimizer's step sends the remaining gradients."""
    for handler in (False, True):
        with pipeline(4, None):
            group = parallel_state.get_data_parallel_group()
            replica = parallel_state.get_data_parallel_rank()
            model = parts_of("1f1b", 1, 1)
            optimizer = DistributedFusedAdam(model[0].parameters(), lr=0.1, process_group=group)
            options = {"custom_sync_context_handler": optimizer.no_sync} if handler else {}
            set_microbatches(4)
            STEPS["1f1b"](step_function, batch_of(4, seed=replica), model, forward_only=False, **options)
            optimizer.step()
            whole = of_all_replicas(4, 4, 2)
            expected = {name: nn.Parameter(param.clone()) for name, param in whole.parameters.items()}
            for name, param in expected.items():
                param.grad = whole.gradients[name]
            torch.optim.Adam(expected.values(), lr=0.1).step()
            for name, param in model[0].named_parameters():
                torch.testing.assert_close(param, expected[name], rtol=1e-4, atol=1e-5, msg=name)


class Both(nn.Module):
    """A stage of an encoder or of the decoder behind it."""

    def __init__(self, index: int, add_encoder: bool, add_decoder: bool, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        self.layer = Layer(index)
        self.decodes, self.first = add_decoder, pre_process
        self.received: list[Tensor] = []

    def set_input_tensor(self, tensors: list[Any]) -> None:
        self.received = tensors

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        if not self.decodes:
            return self.layer(source if self.first else self.received[0])
        hidden = target if self.first else self.received[0]
        return self.layer(hidden + self.received[-1].mean(0, keepdim=True))


def encoder_and_decoder(rank: int) -> None:
    """All decoder stages use the encoder's output and contribute to its gradient; sequence lengths differ."""
    ranks, split = dist.get_world_size(), 3
    source, target = batch_of(4)
    target = torch.cat([target, target], 1)

    def step(batch: list[Tensor], model: nn.Module) -> Any:
        output = model(batch[0].transpose(0, 1), batch[1].transpose(0, 1))
        return output, lambda output: (output.square().mean(), output.detach())

    whole = [
        Both(index, index < split, index >= split, index in (0, split), index in (split - 1, ranks - 1)).to(
            source.device
        )
        for index in range(ranks)
    ]
    for microbatch in range(4):
        pair = [
            tensor[microbatch * SAMPLES : (microbatch + 1) * SAMPLES].transpose(0, 1) for tensor in (source, target)
        ]
        hidden = None
        for part in whole[:split]:
            part.set_input_tensor([hidden])
            hidden = part(*pair)
        encoded = hidden
        for part in whole[split:]:
            part.set_input_tensor([hidden, encoded])
            hidden = part(*pair)
        (hidden.square().mean() / 4).backward()
    with pipeline(ranks, None, pipeline_model_parallel_split_rank_=split):
        model = build_model(Both, False, None, ModelType.encoder_and_decoder, rank)
        set_microbatches(4)
        STEPS["1f1b"](
            step,
            (source, target),
            model,
            forward_only=False,
            tensor_shape=SHAPE,
            decoder_sequence_length=2 * LENGTH,
            deallocate_pipeline_outputs=True,
        )
        for (name, param), other in zip(model[0].named_parameters(), whole[rank].parameters(), strict=True):
            assert_same_sums(param.grad, other.grad, name)


class SplitLayers(nn.Module):
    """Two layers split over tensor-parallel ranks, with the sequence split outside of them."""

    def __init__(self, index: int, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        torch.manual_seed(index)
        options = {"use_cpu_initialization": True, "sequence_parallel_enabled": True}
        options["gradient_accumulation_fusion"] = True
        self.wide = ColumnParallelLinear(
            HIDDEN, 8, gather_output=False, no_async_tensor_model_parallel_allreduce=True, **options
        )
        self.narrow = RowParallelLinear(8, HIDDEN, input_is_parallel=True, **options)
        self.received: Tensor | None = None

    def set_input_tensor(self, tensors: list[Any]) -> None:
        self.received = tensors[0]

    def forward(self, x: Tensor) -> Tensor:
        if self.received is None:
            x = tensor_parallel.scatter_to_sequence_parallel_region(x)
        else:
            x = self.received
        return x + self.narrow(torch.tanh(self.wide(x)[0]))[0]


def tensor_and_sequence_parallel(rank: int) -> None:
    """Weight gradients are added to main_grad once, also if backward passes are split."""
    length = 4
    found = []
    for name in ("1f1b", "zb_h1"):
        with pipeline(4, None, tensor=2):
            model = build_model(SplitLayers, False, None, ModelType.encoder_or_decoder, rank // 2)
            for layer in (model[0].wide, model[0].narrow):
                layer.weight.main_grad = torch.zeros_like(layer.weight)
            set_microbatches(5)
            generator = torch.Generator().manual_seed(3)
            samples = torch.randn(5 * SAMPLES, length, HIDDEN, generator=generator)
            batch = [samples.to(parameter_device())]

            def step(batch: list[Tensor], model: nn.Module) -> Any:
                output = model(batch[0].transpose(0, 1).contiguous())
                return output, lambda output: (output.square().sum(), output.detach())

            shape = (length, SAMPLES, HIDDEN)
            STEPS[name](step, batch, model, forward_only=False, tensor_shape=shape, sequence_parallel_enabled=True)
            found.append([getattr(param, "main_grad", param.grad) for param in model[0].parameters()])
    for one, other in zip(*found, strict=True):
        assert one.abs().sum() > 0
        assert torch.equal(one, other)


def deep_pipelines(rank: int) -> None:
    for name, chunks, microbatches in (("1f1b", 1, 9), ("zb_v", 2, 15), ("interleaved", 2, 8)):
        _, whole = in_one_process(8 * chunks, microbatches)
        with pipeline(8, None if chunks == 1 else chunks):
            model = parts_of(name, chunks, 1)
            STEPS[name](step_function, batch_of(microbatches), model, forward_only=False)
            assert_same_gradients(model, whole)


CHECKS = {
    check.__name__: check
    for check in (
        torch_replicas,
        apex_replicas,
        replicas_with_unused_parameters,
        kept_back_by_the_caller,
        sharded_optimizer,
        encoder_and_decoder,
        tensor_and_sequence_parallel,
        deep_pipelines,
    )
}
