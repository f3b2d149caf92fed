"""Checks of split layers, losses and random numbers in two or four processes, which are all tensor-parallel."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apex.transformer import finalize_model_grads, parallel_state, tensor_parallel
from apex.transformer.tensor_parallel import layers, mappings
from apex.transformer.tensor_parallel.data import _check_data_types
from apex.transformer.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from apex.transformer.tensor_parallel.random import _set_cuda_rng_state
from apex.transformer.testing import commons
from apex.transformer.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks
from tests.transformer import head_checks
from tests.transformer.block_checks import block_equals_one_process, replicated_block_equals_one_process

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def split_over_all(check: Callable[[int, int], None]) -> Callable[[int], None]:
    """Run `check(rank, ranks)` with all processes tensor-parallel and seeds set."""

    @functools.wraps(check)
    def run(rank: int) -> None:
        parallel_state.initialize_model_parallel(dist.get_world_size())
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        try:
            check(rank, dist.get_world_size())
        finally:
            parallel_state.destroy_model_parallel()

    return run


def doubles(*shape: int) -> Tensor:
    """Return random numbers that are equal on all ranks."""
    return torch.randn(*shape, dtype=torch.float64)


def part(tensor: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    return tensor.chunk(ranks, dim)[rank]


@split_over_all
def exchanges(rank: int, ranks: int) -> None:
    whole = doubles(2 * ranks, 3, 4 * ranks)
    given = whole.clone()
    assert torch.equal(mappings._reduce(whole), whole * ranks)
    assert torch.equal(whole, given)  # not changed in place
    assert torch.equal(mappings._reduce(whole.transpose(0, 2)), whole.transpose(0, 2) * ranks)
    assert torch.equal(mappings._split_along_last_dim(whole), part(whole, rank, ranks, -1))
    assert torch.equal(mappings._gather_along_last_dim(part(whole, rank, ranks, -1)), whole)
    assert torch.equal(mappings._split_along_first_dim(whole), part(whole, rank, ranks, 0))
    assert torch.equal(mappings._gather_along_first_dim(part(whole, rank, ranks, 0)), whole)
    assert torch.equal(mappings._reduce_scatter_along_first_dim(whole), part(whole, rank, ranks, 0) * ranks)
    assert torch.equal(gather_split_1d_tensor(split_tensor_into_1d_equal_chunks(whole)), whole.flatten())
    with pytest.raises(ValueError, match="a dimension of size 3 cannot be divided"):
        mappings.scatter_to_sequence_parallel_region(doubles(3, 2) if ranks == 2 else doubles(3, 4))


@split_over_all
def gradients_of_exchanges(rank: int, ranks: int) -> None:
    """gradcheck of ways in and out again: functions of a tensor that all ranks have, whose result all ranks get.

    All ranks evaluate the same differences at the same time. Between in and out each rank has a factor of its own, so
    that a missing sum or a wrong part shows.
    """
    into, out_of = mappings.copy_to_tensor_model_parallel_region, mappings.reduce_from_tensor_model_parallel_region
    to_parts, of_parts = mappings.scatter_to_sequence_parallel_region, mappings.gather_from_sequence_parallel_region
    ways = [
        lambda x: out_of(own(into(x))),
        lambda x: mappings.gather_from_tensor_model_parallel_region(
            own(mappings.scatter_to_tensor_model_parallel_region(x))
        ),
        lambda x: of_parts(own(to_parts(x)), to_model_parallel=False),
        lambda x: out_of(own(of_parts(to_parts(x)))),
        lambda x: of_parts(mappings.reduce_scatter_to_sequence_parallel_region(own(into(x))), to_model_parallel=False),
    ]

    def own(x: Tensor) -> Tensor:
        return (x * (rank + 2)).tanh()

    for way in ways:
        x = doubles(ranks, ranks).requires_grad_()
        assert torch.autograd.gradcheck(way, x, fast_mode=True)
        assert torch.autograd.gradgradcheck(way, x, doubles(*way(x).shape), fast_mode=True)


@split_over_all
def other_shapes_are_named(rank: int, ranks: int) -> None:
    """If one rank passes another shape or dtype, all raise at once and can continue with matching tensors."""
    column = ColumnParallelLinear(
        4, 4 * ranks, gather_output=False, sequence_parallel_enabled=True, no_async_tensor_model_parallel_allreduce=True
    )
    last = rank == ranks - 1
    message = rf"the all-gather of a sequence: .*rank 0 torch\.float32 \[3, 2, 4\].*rank {ranks - 1} torch\.float32 \[2"
    with pytest.raises(ValueError, match=message):
        column(torch.ones(2 if last else 3, 2, 4))
    with pytest.raises(ValueError, match=rf"rank 0 torch\.float32 \[2\].*rank {ranks - 1} torch\.float64 \[2\]"):
        mappings.reduce_from_tensor_model_parallel_region(torch.ones(2, dtype=torch.float64 if last else torch.float32))
    with pytest.raises(ValueError, match=r"the broadcast of a batch: .* must pass the same dtype and shape"):
        tensor_parallel.broadcast_data(
            ["a", "b"][: 1 if last else 2], {"a": torch.ones(1), "b": torch.ones(1)}, torch.float32
        )
    uneven = nn.Parameter(torch.ones(3 if last else 2))
    uneven.sequence_parallel_enabled = True
    with pytest.raises(ValueError, match=r"the sum of gradients .*: all ranks must pass the same dtype and shape"):
        finalize_model_grads(nn.ParameterList([uneven]))
    # The others do not wait for a tensor that the first rank cannot send.
    with pytest.raises(
        AssertionError, match="different than" if rank == 0 else "first tensor-parallel rank has no batch"
    ):
        tensor_parallel.broadcast_data(["a"], {"a": torch.ones(1)} if rank == 0 else None, torch.int64)
    assert column(torch.ones(2, 2, 4))[0].shape == (2 * ranks, 2, 4)


@split_over_all
def second_derivatives(rank: int, ranks: int) -> None:
    """Second derivatives of a loss of two split layers equal the unsplit layers'."""
    x, a, b = doubles(2, 3, 4), doubles(4 * ranks, 4), doubles(4, 4 * ranks)

    def penalty(x: Tensor, a: Tensor, b: Tensor, split: bool) -> tuple[Tensor, Tensor]:
        hidden = F.linear(mappings.copy_to_tensor_model_parallel_region(x) if split else x, a).tanh()
        output = F.linear(hidden, b)
        loss = (mappings.reduce_from_tensor_model_parallel_region(output) if split else output).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, a))

    expected = penalty(x.clone().requires_grad_(), a.clone().requires_grad_(), b, False)
    mine = part(a, rank, ranks, 0).clone().requires_grad_()
    actual = penalty(x.clone().requires_grad_(), mine, part(b, rank, ranks, 1), True)
    torch.testing.assert_close(actual[0], expected[0], **CLOSE)
    torch.testing.assert_close(actual[1], part(expected[1], rank, ranks, 0), **CLOSE)


@split_over_all
def embedding(rank: int, ranks: int) -> None:
    torch.manual_seed(3)
    layer = VocabParallelEmbedding(10 * ranks, 6, nn.init.normal_, use_cpu_initialization=True)
    torch.manual_seed(3)
    whole = torch.empty(10 * ranks, 6).normal_()
    words = torch.randint(0, 10 * ranks, (4, 5))
    expected_weight = whole.clone().requires_grad_()
    expected, actual = F.embedding(words, expected_weight), layer(words)
    assert torch.equal(actual, expected)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    assert torch.equal(layer.weight.grad, part(expected_weight.grad, rank, ranks, 0))
    assert (layer.weight.tensor_model_parallel, layer.weight.partition_dim) == (True, 0)
    for word in (-1, 10 * ranks):  # of no rank
        with pytest.raises(IndexError, match="out of range"):
            layer(torch.tensor([1, word]))
    with pytest.raises(AssertionError, match="not divisible"):
        VocabParallelEmbedding(10 * ranks + 1, 6)


LINEAR_CASES = [
    {"bias": bias, "sequence": sequence, "asynchronous": asynchronous, "fusion": fusion}
    for bias, sequence, asynchronous, fusion in (
        (True, False, True, None),
        (True, False, False, None),
        (False, False, True, torch.float32),
        (True, True, False, None),
        (True, True, False, torch.float32),
        (True, False, True, torch.bfloat16),
    )
]


@split_over_all
def linear_layers(rank: int, ranks: int) -> None:
    """A column and a row layer equal two unsplit layers in output and every gradient."""
    for case in LINEAR_CASES:
        check_linear(rank, ranks, **case)


def check_linear(rank: int, ranks: int, bias: bool, sequence: bool, asynchronous: bool, fusion: torch.dtype) -> None:
    dtype = torch.bfloat16 if fusion == torch.bfloat16 else torch.float64 if fusion is None else torch.float32
    common = {
        "bias": bias,
        "params_dtype": dtype,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": fusion is not None,
        "sequence_parallel_enabled": sequence,
        "keep_master_weight_for_test": True,
        "accumulation_in_fp16": True if fusion == torch.bfloat16 else None,
    }
    column = ColumnParallelLinear(
        6, 8 * ranks, gather_output=False, no_async_tensor_model_parallel_allreduce=not asynchronous, **common
    )
    row = RowParallelLinear(8 * ranks, 6, input_is_parallel=True, **common)
    x = torch.randn(2 * ranks, 3, 6, dtype=torch.float64).to(dtype)
    whole = [x, column.master_weight, torch.zeros(8 * ranks), row.master_weight, torch.zeros(6)]
    whole = [tensor.to(dtype).clone().requires_grad_() for tensor in whole]
    expected = F.linear(F.linear(whole[0], whole[1], whole[2]).tanh(), whole[3], whole[4])
    weights = torch.randn(2 * ranks, 3, 6, dtype=torch.float64).to(dtype)
    (expected * weights).sum().backward()

    if fusion is not None:
        for layer in (column, row):
            layer.weight.main_grad = torch.ones_like(layer.weight, dtype=fusion)
    mine = (part(x, rank, ranks, 0) if sequence else x).clone().requires_grad_()
    output, _ = row(column(mine)[0].tanh())
    (output * (part(weights, rank, ranks, 0) if sequence else weights)).sum().backward()
    close = CLOSE if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    close = {"rtol": 5e-2, "atol": 0.25} if dtype == torch.bfloat16 else close
    compare = functools.partial(torch.testing.assert_close, check_dtype=False, **close)
    compare(output, part(expected, rank, ranks, 0) if sequence else expected)
    compare(mine.grad, part(whole[0].grad, rank, ranks, 0) if sequence else whole[0].grad)
    for layer, place, dim in ((column, 1, 0), (row, 3, 1)):
        gradient = layer.weight.grad if fusion is None else layer.weight.main_grad - 1
        assert fusion is None or layer.weight.grad is None
        compare(gradient, part(whole[place].grad, rank, ranks, dim))
    if bias:
        compare(column.bias.grad, part(whole[2].grad, rank, ranks, 0))
        if sequence:  # each rank has seen its part of the sequence
            dist.all_reduce(row.bias.grad)
        compare(row.bias.grad, whole[4].grad)
        assert row.bias.sequence_parallel_enabled == sequence


@split_over_all
def excluded_classes(rank: int, ranks: int) -> None:
    """The last rank holds only padding classes of the vocabulary."""
    whole = doubles(3, 4 * ranks)
    whole[:, -4:] = -torch.inf
    target = torch.tensor([0, 1, 2])
    expected = whole.clone().requires_grad_()
    F.cross_entropy(expected, target, reduction="sum").backward()
    mine = part(whole, rank, ranks, -1).clone().requires_grad_()
    loss = tensor_parallel.vocab_parallel_cross_entropy(mine, target)
    torch.testing.assert_close(loss, F.cross_entropy(whole, target, reduction="none"), **CLOSE)
    loss.sum().backward()
    torch.testing.assert_close(mine.grad, part(expected.grad, rank, ranks, -1), **CLOSE)


@split_over_all
def gradient_penalties_are_refused(rank: int, ranks: int) -> None:
    """A penalty must raise, not be lost silently, if a backward pass has no derivative."""
    layer = ColumnParallelLinear(4, 4 * ranks, gather_output=False)
    x = torch.randn(2, 1, 4, requires_grad=True)
    logits = torch.randn(3, 4, requires_grad=True)
    for output, given in (
        (layer(x)[0].sum(), x),
        (tensor_parallel.vocab_parallel_cross_entropy(logits, torch.zeros(3, dtype=torch.int64)).sum(), logits),
    ):
        (gradient,) = torch.autograd.grad(output, given, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()


@split_over_all
def layers_on_meta(rank: int, ranks: int) -> None:
    with torch.device("meta"):
        layer = ColumnParallelLinear(4, 4 * ranks)
        embedding = VocabParallelEmbedding(4 * ranks, 6)
    assert (layer.weight.device.type, layer.weight.shape) == ("meta", (4, 4))
    assert embedding.weight.is_meta


class _NewTensors(TorchDispatchMode):
    """A mode that records the shapes of tensors that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.shapes += [tuple(t.shape) for t in made if t.untyped_storage().data_ptr() not in given]
        return result


@split_over_all
def fusion_makes_no_weight_gradient(rank: int, ranks: int) -> None:
    """Beside `main_grad` no memory is allocated for the weight's gradient."""
    for fusion in (False, True):
        layer = ColumnParallelLinear(6, 10 * ranks, gather_output=False, gradient_accumulation_fusion=fusion)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        output, _ = layer(torch.randn(4, 2, 6, requires_grad=True))
        with _NewTensors() as new:
            output.sum().backward()
        transposed = {(10, 6), (6, 10)}
        assert bool(transposed & set(new.shapes)) == (not fusion), new.shapes


@split_over_all
def linear_options(rank: int, ranks: int) -> None:
    with pytest.raises(RuntimeError, match="cannot be enabled at the same time"):
        ColumnParallelLinear(4, 4 * ranks, gather_output=False, sequence_parallel_enabled=True)
    with pytest.raises(RuntimeError, match="`input_is_parallel` must be `True`"):
        RowParallelLinear(4 * ranks, 4, sequence_parallel_enabled=True)
    layer = ColumnParallelLinear(
        4, 4 * ranks, sequence_parallel_enabled=True, no_async_tensor_model_parallel_allreduce=True
    )
    with pytest.raises(AssertionError, match="gather_output"):
        layer(torch.ones(1, 1, 4))
    fused = ColumnParallelLinear(4, 4 * ranks, gradient_accumulation_fusion=True)
    with pytest.raises(RuntimeError, match="main_grad"):
        fused(torch.ones(1, 1, 4))[0].sum().backward()
    fused.weight.main_grad = torch.zeros_like(fused.weight, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="must be float32, float16 or bfloat16"):
        fused(torch.ones(1, 1, 4))[0].sum().backward()

    column = ColumnParallelLinear(4, 4 * ranks, skip_bias_add=True)  # gathers its outputs
    output, bias = column(torch.ones(2, 1, 4))
    assert (output.shape, bias.shape) == ((2, 1, 4 * ranks), (4,))
    column.weight.requires_grad_(False)
    column.skip_bias_add = False
    column(torch.ones(2, 1, 4))[0].sum().backward()
    assert column.weight.grad is None
    assert torch.equal(column.bias.grad, torch.full((4,), 2.0))  # a frozen weight leaves the bias its gradient
    row = RowParallelLinear(4 * ranks, 4, skip_bias_add=True)  # takes its part of a whole input
    output, bias = row(torch.ones(2, 1, 4 * ranks))
    assert (output.shape, bias.shape) == ((2, 1, 4), (4,))
    # Parts that were made on their own differ between ranks.
    others = [torch.empty_like(row.weight) for _ in range(ranks)]
    dist.all_gather(others, row.weight.detach())
    assert not torch.equal(others[0], others[1])


@split_over_all
def strided_weight(rank: int, ranks: int) -> None:
    """With a stride each rank holds several smaller parts, for example of queries, keys and values side by side."""
    layer = ColumnParallelLinear(
        3, 6 * ranks, stride=3, use_cpu_initialization=True, keep_master_weight_for_test=True, bias=False
    )
    parts = layer.master_weight.split(2)
    assert torch.equal(layer.weight, torch.cat(parts[rank::ranks]))


@split_over_all
def autocast(rank: int, ranks: int) -> None:
    column = ColumnParallelLinear(4, 4 * ranks, gradient_accumulation_fusion=True)
    column.weight.main_grad = torch.zeros_like(column.weight)
    x = torch.randn(3, 2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = column(x)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert (x.grad.dtype, column.bias.grad.dtype) == (torch.float32, torch.float32)
    rows = x.detach().reshape(-1, 4).bfloat16()
    torch.testing.assert_close(column.weight.main_grad[0], rows.float().sum(0), rtol=2e-2, atol=2e-2)


@split_over_all
def cross_entropy(rank: int, ranks: int) -> None:
    for dtype, smoothing, scale in (
        (torch.float64, 0.0, 1.0),
        (torch.float64, 0.1, 1.0),
        (torch.float32, 0.0, 1000.0),
        (torch.bfloat16, 0.2, 4.0),
    ):
        classes = 5 * ranks
        whole = (doubles(3, 4, classes) * scale).to(dtype)
        target = torch.randint(0, classes, (3, 4))
        exact = whole.double().clone().requires_grad_()
        log_probabilities = exact.log_softmax(-1)
        nll = -log_probabilities.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        uniform = smoothing * classes / (classes - 1)
        expected = (1 - uniform) * nll - uniform * log_probabilities.mean(-1)
        weights = doubles(3, 4)
        (expected * weights).sum().backward()

        mine = part(whole, rank, ranks, -1).clone().requires_grad_()
        given = mine.detach().clone()
        loss = tensor_parallel.vocab_parallel_cross_entropy(mine, target, smoothing)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        close = CLOSE if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-3 if scale > 100 else 1e-5}
        torch.testing.assert_close(loss.double(), expected.detach(), **close)
        for _ in range(2):  # twice: nothing that the backward pass needs is overwritten
            mine.grad = None
            (loss * weights.to(loss.dtype)).sum().backward(retain_graph=True)
            close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else close
            torch.testing.assert_close(mine.grad.double(), part(exact.grad, rank, ranks, -1), **close)
        assert torch.equal(mine, given)
        target[0] = -100  # counts for nothing, on one rank or several
        mine.grad = None
        loss = tensor_parallel.vocab_parallel_cross_entropy(mine, target, smoothing)
        loss.sum().backward()
        assert not loss[0].any()
        assert not mine.grad[0].any()
        target[1, 0], target[1, 1] = -1, classes  # of no rank
        loss = tensor_parallel.vocab_parallel_cross_entropy(mine, target, smoothing)
        assert loss.isnan().nonzero().tolist() == [[1, 0], [1, 1]]
    with pytest.raises(ValueError, match=r"target has shape \[3\]"):
        tensor_parallel.vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64))


@split_over_all
def batches(rank: int, ranks: int) -> None:
    torch.manual_seed(rank)  # other numbers on each rank
    sizes = {"a": (2, 3), "empty": (0, 3), "deep": (1, 2, 1, 2, 1, 2), "number": ()}
    data = {name: torch.randint(0, 1000, size) for name, size in sizes.items()} | {"other": torch.zeros(2)}
    sent = tensor_parallel.broadcast_data(list(sizes), data if rank == 0 else None, torch.int64)
    torch.manual_seed(0)
    for name, size in sizes.items():
        assert torch.equal(sent[name], torch.randint(0, 1000, size)), name
    assert tensor_parallel.broadcast_data([], data if rank == 0 else None, torch.int64) == {}
    leaf = {"x": torch.full((2,), float(rank), requires_grad=True)}  # the first rank failed after the others waited
    sent = tensor_parallel.broadcast_data(["x"], leaf, torch.float32)
    assert (sent["x"].tolist(), sent["x"].requires_grad) == ([0.0, 0.0], False)
    with pytest.raises(AssertionError, match="a has data type"):
        _check_data_types(["a"], data, torch.float32)


@split_over_all
def random_streams(rank: int, ranks: int) -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    shared = torch.rand(4)
    with tracker.fork():
        own = torch.rand(4)
    after = torch.rand(4)
    for tensor, same in ((shared, True), (own, False), (after, True)):
        others = [torch.empty(4) for _ in range(ranks)]
        dist.all_gather(others, tensor)
        assert torch.equal(others[0], others[1]) == same
    for name, seed, words in (("model-parallel-rng", 1, "already exists"), ("x", 7 + 2718 + rank, "already exists")):
        with pytest.raises(Exception, match=words):
            tracker.add(name, seed)
    with pytest.raises(Exception, match="is not added"), tracker.fork("unknown"):
        pass
    states = tracker.get_states()
    with tracker.fork():
        first = torch.rand(4)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(4), first)
    state = torch.get_rng_state()
    first = torch.rand(4)
    _set_cuda_rng_state(state)
    assert torch.equal(torch.rand(4), first)


@split_over_all
def checkpoints(rank: int, ranks: int) -> None:
    """Gradients are the same with checkpoints, with dropout from both streams, a non-tensor argument, and autocast."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    weight = torch.randn(4 * ranks, 4 * ranks)

    def block(x: Tensor, weight: Tensor, scale: float, nothing: None) -> tuple[Tensor, Tensor]:
        with tracker.fork():
            x = F.dropout(x, 0.5)
        return F.dropout(x @ weight, 0.3) * scale, x

    for distribute in (False, True):
        results = []
        for recompute in (False, True):
            tensor_parallel.model_parallel_cuda_manual_seed(11)
            inputs = [torch.ones(2, 3, 4 * ranks, requires_grad=True), weight.clone().requires_grad_()]
            with torch.autocast("cpu", torch.bfloat16):
                if recompute:
                    outputs = tensor_parallel.checkpoint(block, distribute, *inputs, 2.0, None)
                else:
                    outputs = block(*inputs, 2.0, None)
            drawn = torch.rand(2)
            (outputs[0].float().square().sum() + outputs[1].sum()).backward()
            results.append([*outputs, drawn, torch.rand(2), *(tensor.grad for tensor in inputs)])
        assert all(map(torch.equal, *results))


@split_over_all
def compiled(rank: int, ranks: int) -> None:
    """A column and a row layer compile without a graph break and give the same results."""
    if ranks > 2:
        return  # tracing takes many seconds in each process, and two show as much
    for sequence in (False, True):
        options = {"sequence_parallel_enabled": sequence, "use_cpu_initialization": True}
        torch.manual_seed(5)
        column = ColumnParallelLinear(
            4, 4 * ranks, gather_output=False, no_async_tensor_model_parallel_allreduce=sequence, **options
        )
        row = RowParallelLinear(4 * ranks, 4, input_is_parallel=True, **options)

        def block(x: Tensor, column=column, row=row) -> Tensor:
            return row(column(x)[0].relu())[0]

        results = []
        for run in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
            x = torch.ones(2, 3, 4, requires_grad=True)
            column.zero_grad()
            row.zero_grad()
            output = run(x)
            output.square().sum().backward()
            results.append([output, x.grad, column.weight.grad.clone(), row.weight.grad.clone()])
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)


@split_over_all
def attributes(rank: int, ranks: int) -> None:
    one, other = torch.zeros(1), torch.zeros(1)
    layers.set_tensor_model_parallel_attributes(one, True, 1, 2)
    with pytest.raises(AssertionError):
        layers.set_tensor_model_parallel_attributes(one, True, 1, 2)
    layers.copy_tensor_model_parallel_attributes(other, one)
    assert (other.tensor_model_parallel, other.partition_dim, other.partition_stride) == (True, 1, 2)
    plain = torch.zeros(1)
    layers.set_defaults_if_not_set_tensor_model_parallel_attributes(plain)
    assert (plain.tensor_model_parallel, plain.partition_dim, plain.partition_stride) == (False, -1, 1)
    assert layers.param_is_not_tensor_parallel_duplicate(one)
    assert layers.param_is_not_tensor_parallel_duplicate(plain) == (rank == 0)


@split_over_all
def models_of_tests(rank: int, ranks: int) -> None:
    """The split models of apex.transformer.testing.commons equal the unsplit ones, alone and as stages."""
    commons.set_random_seed(5)
    batch = torch.randn(3, 2 * ranks, 4)
    results = []
    for sequence in (False, True):
        commons.set_random_seed(5)
        model = commons.mlp_provider_func(4, True, True, sequence_parallel_enabled=sequence)
        output, loss_function = commons.ToyParallelMLPFwdBwdStepFunc(sequence)([batch], model)
        loss, reduced = loss_function(output)
        loss.backward()
        assert torch.equal(reduced["avg"], loss.detach().view(1))
        model.set_input_tensor([torch.zeros(2 * ranks // (ranks if sequence else 1), 3, 4)])
        assert torch.equal(model(None)[:, 0], model(None)[:, 1])
        results.append(mappings._gather_along_first_dim(output) if sequence else output)
    torch.testing.assert_close(*results)
    model = commons.model_provider_func(4, True, True)
    output, loss_function = commons.fwd_step_func(batch, model)
    assert torch.equal(loss_function(output)[0], output.sum())
    assert commons.IdentityLayer((2, 3), 0.0)().tolist() == [[0.0] * 3] * 2
    commons.print_separator("passed")


CHECKS = {
    check.__name__: check
    for check in (
        exchanges,
        gradients_of_exchanges,
        other_shapes_are_named,
        second_derivatives,
        embedding,
        linear_layers,
        excluded_classes,
        gradient_penalties_are_refused,
        layers_on_meta,
        fusion_makes_no_weight_gradient,
        linear_options,
        strided_weight,
        autocast,
        cross_entropy,
        batches,
        random_streams,
        checkpoints,
        attributes,
        models_of_tests,
        compiled,
        block_equals_one_process,
        replicated_block_equals_one_process,
        *head_checks.CHECKS,
    )
}
