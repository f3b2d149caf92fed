"""DistributedDataParallel and Reducer, in two processes."""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from apex.parallel import DistributedDataParallel, Reducer, distributed
from tests.parallel.processes import Check, assert_same_everywhere, everywhere

STEPS, ROWS = 4, 6
LR = 0.1


class Net(nn.Module):
    """Three layers and a buffer; the last layer shares its weight with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 5, bias=False)
        self.register_buffer("shift", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x + self.shift).tanh()).tanh()
        return functional.linear(self.third(hidden), self.first.weight)


def data(step: int, part: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(100 * step + part))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).square().mean()


def joined(parts: int = 1) -> nn.Module:
    """Return a model trained in one process on the data of all processes."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = torch.cat([data(step, 10 * rank + part) for rank in range(2) for part in range(parts)])
        (loss_of(model, batch) * parts).backward()
        optimizer.step()
    return model


def assert_as_joined(model: nn.Module, parts: int = 1) -> None:
    parameters = list(model.parameters())
    assert_same_everywhere(parameters)
    for found, expected in zip(parameters, joined(parts).parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def equality(**options: Any) -> Check:
    """Training with these options equals training on the joined batch."""

    def check(rank: int) -> None:
        torch.manual_seed(rank)  # rank 0's parameters are used, which have the seed of `joined`
        net = Net()
        arguments = dict(options)
        if arguments.pop("trigger", False):
            arguments["allreduce_trigger_params"] = [net.second.weight, net.first.bias]
        if arguments.pop("communicators", False):
            groups = [dist.new_group() for _ in range(2)]
            arguments.update(num_allreduce_streams=2, allreduce_communicators=(groups, [None, None]))
        factor = arguments.pop("factor", 1.0)
        model = DistributedDataParallel(net, **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            (loss_of(model, data(step, 10 * rank)) * factor).backward()
            optimizer.step()
        assert_as_joined(net)

    return check


def accumulation(**options: Any) -> Check:
    def check(rank: int) -> None:
        model = DistributedDataParallel(Net(), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, data(step, 10 * rank)).backward()
                local = everywhere(model.module.second.weight.grad)
                assert not torch.equal(*local)
            loss_of(model, data(step, 10 * rank + 1)).backward()
            optimizer.step()
        assert_as_joined(model.module, parts=2)

    return check


def accumulates_with_every_pass_reduced(rank: int) -> None:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, data(step, 10 * rank + part)).backward()
        optimizer.step()
    assert_as_joined(model.module, parts=2)


def switches(rank: int) -> None:
    model = DistributedDataParallel(Net())
    weight = model.module.second.weight
    for allreduce in (True, False, True):
        (model.enable_allreduce if allreduce else model.disable_allreduce)()
        model.zero_grad()
        loss_of(model, data(0, rank)).backward()
        assert torch.equal(*everywhere(weight.grad)) == allreduce
    model.disable_allreduce()
    with model.no_sync():
        pass
    model.zero_grad()
    loss_of(model, data(0, rank)).backward()
    assert not torch.equal(*everywhere(weight.grad))
    expected = sum(everywhere(weight.grad)) / 2
    model.allreduce_fallback()
    torch.testing.assert_close(weight.grad, expected)
    assert_same_everywhere([param.grad for param in model.parameters()])


def state_comes_from_the_first_rank(rank: int) -> None:
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 4).half(), nn.Linear(2, 2).bfloat16())
    net.register_buffer("flags", torch.tensor([True, False, rank == 1]))
    net.register_buffer("nothing", torch.empty(0))
    net[0].requires_grad_(False)
    net[1].num_batches_tracked += rank
    assert not torch.equal(*everywhere(net[0].weight))
    DistributedDataParallel(net)
    assert_same_everywhere(list(net.state_dict().values()))
    assert not net.flags[2]
    net[1].num_batches_tracked += rank
    Reducer(net)
    assert_same_everywhere(list(net.state_dict().values()))


def different_models_are_an_error(rank: int) -> None:
    for other, named in (
        (nn.Linear(3, 3), r"parameter weight of shape \(2, 3\), .*rank 1 has parameter weight of shape \(3, 3\)"),
        (nn.Linear(2, 3), r"parameter weight of shape \(2, 3\), .*rank 1 has parameter weight of shape \(3, 2\)"),
        (nn.Linear(3, 2, bias=False), r"parameter bias of shape \(2,\), .*rank 1 has no more"),
        (nn.Linear(3, 2).half(), r"torch.float32, rank 1 has parameter weight of shape \(2, 3\), torch.float16"),
        (nn.ReLU(), r"and 0 with 0\. .*parameter weight of shape \(2, 3\), .*rank 1 has no more"),
    ):
        message = rf"models of rank 0 and rank 1 differ: 2 parameters with 8 elements.*{named}"
        with pytest.raises(RuntimeError, match=message):
            DistributedDataParallel(other if rank else nn.Linear(3, 2))


def users_collectives_are_not_mixed_up(rank: int) -> None:
    """A metric is summed during a backward pass while one rank lacks the gradients of a bucket."""
    model = DistributedDataParallel(Parts(), message_size=16)
    metrics = []

    def add_up(gradient: Tensor) -> None:
        metrics.append(torch.full((20,), rank + 1.0))
        dist.all_reduce(metrics[-1])

    for uses in ([0, 1, 2], [0, 1] if rank else [0, 1, 2]):
        model.zero_grad()
        x = model.module.layers[1](model.module.layers[0](torch.ones(3, 4)))
        x.register_hook(add_up)
        output = model.module.layers[2](x) if 2 in uses else x
        output.sum().backward()
    assert [metric.unique().tolist() for metric in metrics] == [[3.0], [3.0]]
    assert_same_everywhere([param.grad for param in model.parameters()])


class Parts(nn.Module):
    """A model that uses its layers in the order and number that a call asks for."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: Tensor, use: list[int]) -> Tensor:
        for index in use:
            x = self.layers[index](x).tanh()
        return x


def gradients_without(model: nn.Module, *arguments: Any) -> list[Tensor | None]:
    """Return the gradients of a copy of the model in this process alone."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    alone(*arguments).square().mean().backward()
    return [param.grad for param in alone.parameters()]


def unused(**options: Any) -> Check:
    """Some processes lack gradients of parameters, in the first pass and in later ones."""

    def check(rank: int) -> None:
        model = DistributedDataParallel(Parts(), **options)
        x = torch.randn(3, 4)
        for uses in ([[0], [0, 2]], [[0, 1], [1, 0]], [[2, 1, 0], [0]], [[1], [2]], [[0, 1, 2], [2, 0, 1]]):
            model.zero_grad()
            alone = [gradients_without(model.module, x, use) for use in uses]
            model(x, uses[rank]).square().mean().backward()
            for found, *each in zip((param.grad for param in model.parameters()), *alone, strict=True):
                there = [gradient for gradient in each if gradient is not None]
                assert (found is None) == (not there)
                if there:
                    torch.testing.assert_close(found, sum(there) / 2)
                    assert_same_everywhere([found])

    return check


def all_ranks_use_the_first_ranks_buckets(rank: int) -> None:
    """Gradients arrive in another order in rank 1, and the last layer has none in the first pass."""
    model = DistributedDataParallel(Parts(), message_size=1)
    assert model.needs_refresh
    assert model.num_buckets == 0
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(3, 4), [0, 1] if rank == 0 else [1, 0]).sum().backward()
        # The bias of a layer may come before its weight or after it.
        layers = [next(iter({index // 2 for index in bucket})) for bucket in model.active_i_buckets]
        assert layers == [1, 1, 0, 0, 2, 2]
        assert not model.needs_refresh
    assert torch.tensor(model.active_i_buckets).equal(everywhere(torch.tensor(model.active_i_buckets))[0])


def sizes_of_buckets(rank: int) -> None:
    def buckets(**options: Any) -> list[int]:
        net = Parts()
        triggers = [net.layers[1].weight, net.layers[1].bias] if options.pop("trigger", False) else None
        model = DistributedDataParallel(net, allreduce_trigger_params=triggers, **options)
        model(torch.randn(2, 4), [0, 1, 2]).sum().backward()
        return [sum(list(model.parameters())[index].numel() for index in bucket) for bucket in model.active_i_buckets]

    assert buckets() == [60]
    assert buckets(message_size=21) == [36, 24] or buckets(message_size=21) == [24, 36]
    assert buckets(message_size=20) == [20, 20, 20]
    assert sorted(buckets(trigger=True)) == [4, 20, 36] or sorted(buckets(trigger=True)) == [16, 20, 24]
    assert buckets(delay_allreduce=True, message_size=1) == [60]


def types_do_not_mix(rank: int) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).half())

    def run(x: Tensor) -> Tensor:
        for layer in net:
            x = layer(x.to(layer.weight.dtype))
        return x.float().square().mean()

    net.forward = run
    model = DistributedDataParallel(net)
    for step in range(2):
        model.zero_grad()
        model(data(step, rank)[:, :4]).backward()
        dtypes = [{list(model.parameters())[index].dtype for index in bucket} for bucket in model.active_i_buckets]
        assert len(dtypes) == 4
        assert all(len(kinds) == 1 for kinds in dtypes)
        assert_same_everywhere([param.grad for param in model.parameters()])


def half(dtype: torch.dtype) -> Check:
    """Half-precision gradients are summed in half precision, in float32, and predivided."""

    def check(rank: int) -> None:
        large = 40000.0 if dtype == torch.float16 else 3e38
        options: list[dict[str, Any]] = [
            {"allreduce_always_fp32": dtype == torch.float16, "gradient_predivide_factor": 2.0},
            {"gradient_predivide_factor": 2.0},
            {"gradient_average_split_factor": 2.0, "delay_allreduce": True},
        ]
        if dtype == torch.float16:
            options.append({"allreduce_always_fp32": True})
        for each in options:
            model = DistributedDataParallel(nn.Linear(2, 1, bias=False).to(dtype), **each)
            for _ in range(2):
                model.zero_grad()
                model(torch.full((1, 2), large, dtype=dtype)).sum().backward()
                assert model.module.weight.grad.dtype == dtype
                assert model.module.weight.grad.tolist() == torch.full((1, 2), large, dtype=dtype).tolist()
        model = DistributedDataParallel(nn.Linear(2, 1, bias=False).to(dtype))
        model(torch.full((1, 2), large, dtype=dtype)).sum().backward()
        assert model.module.weight.grad.isinf().all()
        # Two numbers whose sum needs more digits than the type has.
        digits = 1 + torch.finfo(dtype).eps
        model = DistributedDataParallel(nn.Linear(1, 1).to(dtype), allreduce_always_fp32=True, gradient_average=False)
        model(torch.full((1, 1), (1.0, digits)[rank], dtype=dtype)).sum().backward()
        assert model.module.weight.grad.item() == torch.tensor(1 + digits, dtype=dtype).item()

    return check


def retained_buffers(rank: int) -> None:
    for options in ({}, {"message_size": 1}, {"delay_allreduce": True}, {"allreduce_always_fp32": True}):
        net = Parts()
        net.layers[1].bfloat16()
        net.forward = lambda x, net=net: net.layers[0](net.layers[1](x.bfloat16()).float()).sum()
        model = DistributedDataParallel(net, retain_allreduce_buffers=True, **options)
        before = None
        for step in range(3):
            model.zero_grad()
            model(data(step, rank)[:, :4]).backward()
            buffers = model.allreduce_buffers
            assert len(buffers) == model.num_buckets
            assert before is None or not {buffer.data_ptr() for buffer in buffers} & before
            before = {buffer.data_ptr() for buffer in buffers}
            for buffer, bucket in zip(buffers, model.active_i_buckets, strict=True):
                params = [list(model.parameters())[index] for index in bucket]
                assert buffer.dtype == params[0].dtype
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
                assert torch.equal(buffer, torch.cat([gradient.reshape(-1) for gradient in gradients]))
                there = [param.grad for param in params if param.grad is not None]
                assert all(grad.untyped_storage().data_ptr() == buffer.data_ptr() for grad in there)
            assert_same_everywhere(list(buffers))


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """Record the collective calls inside the context."""
    events: list[str] = []
    real = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        events.append("sent")
        return real(*args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield events


def sends_during_the_backward_pass(rank: int) -> None:
    for options, expected in (
        ({"message_size": 20}, ["sent", "2", "sent", "1", "sent", "0"]),
        ({"delay_allreduce": True}, ["2", "1", "0", "sent"]),
    ):
        model = DistributedDataParallel(Parts(), **options)
        x = torch.randn(2, 4)
        model(x, [0, 1, 2]).sum().backward()
        with recorded() as events:
            # The gradient of a layer's input comes after the gradients of its parameters.
            hidden = x.requires_grad_()
            for index, layer in enumerate(model.module.layers):
                hidden = hidden * 1.0
                hidden.register_hook(lambda _, index=index, events=events: events.append(str(index)))
                hidden = layer(hidden)
            model(x * 0, [0]).sum().add(hidden.sum()).backward()
        layers = [event for event in events if event != "sent"]
        assert layers == ["2", "1", "0"]
        if "message_size" in options:
            assert events.count("sent") == 3
            assert events.index("sent") < events.index("0")
        else:
            assert events == expected


def several_backward_passes_of_one_forward_pass(rank: int) -> None:
    model = DistributedDataParallel(Net())
    for step in range(3):
        model.zero_grad()
        loss = loss_of(model, data(step, rank))
        loss.backward(retain_graph=True)
        once = [param.grad.clone() for param in model.parameters()]
        loss.backward()
        for param, gradient in zip(model.parameters(), once, strict=True):
            torch.testing.assert_close(param.grad, 2 * gradient)
        assert_same_everywhere([param.grad for param in model.parameters()])


def gradients_of_inputs_send_nothing(rank: int) -> None:
    """A gradient penalty calls `autograd.grad` inside the loss, before and after buckets are known."""
    model = DistributedDataParallel(Net())
    for step in range(3):
        model.zero_grad()
        x = data(step, rank).requires_grad_()
        with recorded() as events:
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert events == []
        (loss_of(model, x) + slope.square().sum()).backward()
        assert_same_everywhere([param.grad for param in model.parameters()])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = [self.first, self.second, *([self.first] if shared else [])]
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.reentrant is not None else layer(x)
        return x


def checkpoints(rank: int) -> None:
    for reentrant, shared, options in (
        (True, False, {"message_size": 1}),
        (True, True, {"delay_allreduce": True}),
        (False, True, {"message_size": 1}),
    ):
        net = Checkpointed(reentrant, shared)
        model = DistributedDataParallel(net, **options)
        for step in range(3):
            x = data(step, rank)[:, :4].requires_grad_()
            plain = copy.deepcopy(net)
            plain.reentrant = None
            plain.layers = [plain.first, plain.second, *([plain.first] if shared else [])]
            plain.zero_grad()
            plain(x).square().sum().backward()
            model.zero_grad()
            model(x).square().sum().backward()
            for found, local in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found.grad, sum(everywhere(local.grad)) / 2)
    model = DistributedDataParallel(Checkpointed(True, True), message_size=1)
    x = torch.randn(2, 4, requires_grad=True)
    model(x).sum().backward()  # finds the buckets, and sends nothing before the end
    with pytest.raises(RuntimeError, match=r"gradient of first\.\w+ changed after .* delay_allreduce=True"):
        model(x).sum().backward()


def a_failed_pass_is_forgotten(rank: int) -> None:
    model = DistributedDataParallel(Parts(), message_size=1)
    x = torch.randn(2, 4)
    for broken in (False, True, False, True, True, False):
        model.zero_grad()
        handle = None
        hidden = model(x, [0])

        def fail(_: Tensor) -> None:
            raise ArithmeticError("on purpose")

        loss = model.module(hidden, [1, 2]).sum() + rank
        if broken:
            handle = hidden.register_hook(fail)
            with pytest.raises(ArithmeticError, match="on purpose"):
                loss.backward()
            handle.remove()
            continue
        loss.backward()
        assert_same_everywhere([param.grad for param in model.parameters()])


def parameters_come_and_go(rank: int) -> None:
    """Parameters are frozen, unfrozen and cast after wrapping; a wrapper is deleted.

    Two wrappers hold parts of a model.
    """
    net = Parts()
    net.layers[2].requires_grad_(False)
    model = DistributedDataParallel(net, message_size=1)
    x = data(0, rank)[:, :4]
    for change in (
        lambda: None,
        lambda: net.layers[2].requires_grad_(True),
        lambda: net.layers[0].requires_grad_(False),
        net.double,
    ):
        change()
        for _ in range(2):
            model.zero_grad()
            model(x.to(net.layers[0].weight.dtype), [0, 1, 2]).square().sum().backward()
            trained = [param for param in net.parameters() if param.requires_grad]
            assert sum(model.bucket_sizes) == len(trained)
            assert_same_everywhere([param.grad for param in trained])
    model = DistributedDataParallel(net)
    for _ in range(2):
        model.zero_grad()
        with recorded() as events:
            model(x.double(), [0, 1, 2]).sum().backward()
        assert events == ["sent"]
    first, second = DistributedDataParallel(nn.Linear(4, 4)), DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(2):
        first.zero_grad()
        second.zero_grad()
        second(first(x)).square().sum().backward()
        assert_same_everywhere([param.grad for part in (first, second) for param in part.parameters()])


def copies_and_files(rank: int) -> None:
    model = DistributedDataParallel(Net(), num_allreduce_streams=2)
    loss_of(model, data(0, rank)).backward()
    assert next(iter(model.state_dict())) == "module.shift"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for step in range(2):
            other.zero_grad()
            model.zero_grad()
            loss_of(other, data(step, rank)).backward()
            loss_of(model, data(step, rank)).backward()
            for found, expected in zip(other.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(found.grad, expected.grad)
                assert found is not expected


def outputs_of_any_kind(rank: int) -> None:
    net = Parts()
    net.forward = lambda x: {"both": (net.layers[0](x), [net.layers[1](x)]), "none": None, "third": net.layers[2](x)}
    model = DistributedDataParallel(net)
    for step in range(2):
        model.zero_grad()
        outputs = model(data(step, rank)[:, :4])
        (outputs["both"][0] + outputs["both"][1][0] + outputs["third"]).sum().backward()
        assert_same_everywhere([param.grad for param in model.parameters()])
    with torch.no_grad():
        model(data(0, rank)[:, :4])
    net.forward = lambda x: (net.layers[0](x), net.layers[1].weight)
    for step in range(3):
        model.zero_grad()
        output, weight = model(data(step, rank)[:, :4])
        (output.sum() * weight.sum()).backward()
        assert_same_everywhere([param.grad for param in model.parameters() if param.grad is not None])
    assert not net.layers[1].weight._backward_hooks
    convolution = DistributedDataParallel(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), message_size=1)
    for _ in range(2):
        convolution.zero_grad()
        image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last) * (1 + rank)
        local = gradients_without(convolution.module, image)
        convolution(image).square().mean().backward()
        torch.testing.assert_close(convolution.module.weight.grad, sum(everywhere(local[0])) / 2)


def sparse_gradients_are_an_error(rank: int) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(4, 3, sparse=True)))
    with pytest.raises(RuntimeError, match=r"gradient of 0\.weight is sparse"):
        model(torch.tensor([1])).sum().backward()
    net = nn.Embedding(4, 3, sparse=True)
    reduce = Reducer(net)
    net(torch.tensor([1])).sum().backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"gradient of weight is sparse"):
            reduce.reduce()


def a_late_rank_is_waited_for(rank: int) -> None:
    model = DistributedDataParallel(Net(), message_size=1)
    for step in range(4):
        model.zero_grad()
        time.sleep(0.3 * (rank == step % 2))
        loss_of(model, data(step, rank)).backward()
        assert_same_everywhere([param.grad for param in model.parameters()])


def reducer(rank: int) -> None:
    net = Parts()
    reduce = Reducer(net)
    x = data(0, rank)[:, :4]
    for uses in ([[0, 1], [0, 1]], [[0], [0, 2]], [[1], [2]]):
        net.zero_grad()
        alone = [
            gradients_without(net, part[:, :4], use) for part, use in zip((data(0, 0), data(0, 1)), uses, strict=True)
        ]
        net(x, uses[rank]).square().mean().backward()
        reduce.reduce()
        for found, *each in zip((param.grad for param in net.parameters()), *alone, strict=True):
            there = [gradient for gradient in each if gradient is not None]
            assert (found is None) == (not there)
            if there:
                torch.testing.assert_close(found, sum(there) / 2)
    gradients = [torch.full((2, 2), 1.0 + rank), (torch.arange(3).double() * rank, [torch.ones(1).half() * rank])]
    Reducer(gradients).reduce()
    assert gradients[0].tolist() == [[1.5, 1.5], [1.5, 1.5]]
    assert gradients[1][0].tolist() == [0.0, 0.5, 1.0]
    assert gradients[1][1][0].tolist() == [0.5]
    for nothing in ([param.grad for param in nn.Linear(2, 2).parameters()], 5, []):
        with pytest.raises(ValueError, match="module_or_grads_list has no tensors"):
            Reducer(nothing)
    with pytest.raises(TypeError, match=r"a tensor of torch\.int64"):
        Reducer([torch.ones(2), torch.ones(2, dtype=torch.int64)])


def flat_calls(rank: int) -> None:
    tensors = [torch.full((2,), float(rank)), torch.full((1, 2), rank), torch.full((3,), 1.0 + rank)]
    distributed.flat_dist_call(tensors, dist.broadcast, (1,))
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 1.0], [[1, 1]], [2.0, 2.0, 2.0]]
    tensors = [torch.full((2,), float(rank)), torch.full((3, 1), 2.0 * rank)]
    distributed.apply_flat_dist_call(tensors, dist.all_reduce)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [[1.0]] * 3]


def steps_of_a_reduction(rank: int) -> None:
    """Subclasses may call the methods of a reduction one by one."""
    for options in ({}, {"num_allreduce_streams": 2}, {"retain_allreduce_buffers": True}):
        model = DistributedDataParallel(Parts(1), gradient_predivide_factor=2.0, **options)
        model.disable_allreduce()
        model(torch.full((1, 4), 1.0 + rank), [0]).sum().backward()
        expected = [sum(everywhere(param.grad)) / 2 for param in model.parameters()]
        flat = model.allreduce_bucket([param.grad for param in model.parameters()], 1, False)
        torch.testing.assert_close(flat, torch.cat([each.reshape(-1) for each in expected]))
        model.allreduce_fallback()
        assert len(model.allreduce_buffers) == ("retain_allreduce_buffers" in options)
        assert_same_everywhere([param.grad for param in model.parameters()])


def profiles_name_the_work(rank: int) -> None:
    model = DistributedDataParallel(Net(), prof=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_of(model, data(0, rank)).backward()
    names = {event.key for event in profile.key_averages()}
    assert {"apex: gradient ready", "apex: wait for gradients"} <= names


def arguments_are_checked(rank: int) -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for options, words in (
        ({"shared_param": True}, "delay_allreduce=True"),
        ({"message_size": 0}, "message_size must be at least 1"),
        ({"delay_allreduce": True, "allreduce_trigger_params": [net.weight]}, "delay_allreduce=True"),
        ({"allreduce_trigger_params": [other.weight]}, "not a parameter of the module"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be positive"),
        ({"gradient_predivide_factor": 2.0, "gradient_average_split_factor": 4.0}, "old name"),
        ({"num_allreduce_streams": 0}, "num_allreduce_streams must be at least 1"),
        ({"num_allreduce_streams": 2, "delay_allreduce": True}, "num_allreduce_streams=2"),
        ({"allreduce_communicators": ([None], [None])}, "at least 2"),
        ({"num_allreduce_streams": 2, "allreduce_communicators": ([None], [None, None])}, "1 and 2"),
    ):
        with pytest.raises(ValueError, match=words):
            DistributedDataParallel(net, **options)
    with pytest.raises(TypeError, match="not list"):
        DistributedDataParallel([net])


CHECKS: dict[str, Check] = {
    "defaults": equality(),
    "one_bucket_each": equality(message_size=1),
    "small_buckets": equality(message_size=60),
    "delayed": equality(delay_allreduce=True),
    "triggers": equality(trigger=True),
    "retained": equality(retain_allreduce_buffers=True),
    "retained_and_delayed": equality(retain_allreduce_buffers=True, delay_allreduce=True),
    "in_float32": equality(allreduce_always_fp32=True),
    "two_groups": equality(num_allreduce_streams=2, message_size=1),
    "given_groups": equality(communicators=True, message_size=1),
    "sums": equality(gradient_average=False, factor=0.5),
    "predivided": equality(gradient_predivide_factor=2.0),
    "predivided_sums": equality(gradient_average=False, gradient_predivide_factor=2.0),
    "old_name_of_predivision": equality(gradient_average=False, gradient_average_split_factor=2.0),
    "profiled": equality(prof=True),
    "no_sync": accumulation(),
    "no_sync_delayed": accumulation(delay_allreduce=True),
    "no_sync_retained": accumulation(retain_allreduce_buffers=True, message_size=1),
    "every_pass_reduced": accumulates_with_every_pass_reduced,
    "unused": unused(),
    "unused_one_bucket_each": unused(message_size=1),
    "unused_delayed": unused(delay_allreduce=True),
    "unused_retained": unused(retain_allreduce_buffers=True, message_size=1),
    "half_float16": half(torch.float16),
    "half_bfloat16": half(torch.bfloat16),
    **{
        check.__name__: check
        for check in (
            switches,
            state_comes_from_the_first_rank,
            users_collectives_are_not_mixed_up,
            different_models_are_an_error,
            all_ranks_use_the_first_ranks_buckets,
            sizes_of_buckets,
            types_do_not_mix,
            retained_buffers,
            sends_during_the_backward_pass,
            several_backward_passes_of_one_forward_pass,
            gradients_of_inputs_send_nothing,
            checkpoints,
            a_failed_pass_is_forgotten,
            parameters_come_and_go,
            copies_and_files,
            outputs_of_any_kind,
            sparse_gradients_are_an_error,
            a_late_rank_is_waited_for,
            reducer,
            flat_calls,
            steps_of_a_reduction,
            profiles_name_the_work,
            arguments_are_checked,
        )
    },
}
