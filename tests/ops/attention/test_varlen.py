"""Packed attention with masks and grouped queries against the float64 reference, by every route."""

from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from apex.ops import _library
from apex.ops._device import forget_launches
from apex.ops.attention import config, op_varlen, reference, varlen_attention
from apex.ops.attention.op_packed import draw_seed
from tests.ops.attention.cases import assert_close
from tests.support.harness import Route, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Case(NamedTuple):
    """Lengths of the sequences, heads of queries and of keys, and options of the call."""

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (2, 2)
    size: int = 16
    options: dict = {}  # noqa: RUF012  never changed
    lengths_k: tuple[int, ...] | None = None
    tail: int = 0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.name

    def tensors(self, device: str) -> tuple[list[Tensor], dict]:
        """Query, key, value and the gradient of the output, and the bounds as keyword arguments."""
        generator = torch.Generator().manual_seed(0)
        rows, rows_k = sum(self.lengths) + self.tail, sum(self.lengths_k or self.lengths) + self.tail
        shapes = [(rows, self.heads[0]), *[(rows_k, self.heads[1])] * 2, (rows, self.heads[0])]
        made = [torch.randn(*shape, self.size, generator=generator).to(device, self.dtype) for shape in shapes]
        bounds = {"cu_seqlens_q": _edges(self.lengths, device), "max_seqlen_q": max(self.lengths)}
        if self.lengths_k is not None:
            bounds |= {"cu_seqlens_k": _edges(self.lengths_k, device), "max_seqlen_k": max(self.lengths_k)}
        return made, bounds


def _edges(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


CAUSAL = {"causal": True}
CASES = [
    Case("plain", (5, 33, 17)),
    Case("causal", (1, 33, 70), options=CAUSAL),
    Case("empty documents", (0, 19, 0, 0, 40, 0), options=CAUSAL),
    Case("grouped", (5, 33, 17), (6, 2)),
    Case("grouped causal", (40, 23), (8, 2), options=CAUSAL),
    Case("one head of keys", (40, 3), (3, 1), 24, CAUSAL),
    Case("window", (70, 33), (2, 1), options={"window_size": (7, 3)}),
    Case("causal window", (150, 20), options={"causal": True, "window_size": (9, -1)}),
    Case("narrow window", (20,), options={"window_size": (1, 0)}),
    Case("right window", (37, 50), options={"window_size": (-1, 20)}),
    Case("left window", (37, 90), options={"window_size": (33, -1)}),
    Case("more keys", (5, 30, 1), (4, 2), options=CAUSAL, lengths_k=(40, 30, 7)),
    Case("fewer keys", (40, 30, 7), (4, 2), options=CAUSAL, lengths_k=(5, 30, 0)),
    Case("no keys", (9, 4), lengths_k=(0, 12)),
    Case("no queries", (0, 4), options=CAUSAL, lengths_k=(7, 12)),
    Case("window between lengths", (20, 50), options={"window_size": (4, 2)}, lengths_k=(50, 20)),
    Case("scale", (21,), options={"scale": 0.7, "causal": True}),
    Case("dropout", (21, 30), (4, 2), options={"dropout_p": 0.3, "causal": True}),
    Case("tail", (21, 8), options=CAUSAL, tail=11),
    Case("tail of keys", (21, 8), (2, 1), lengths_k=(3, 8), tail=20),
    Case("bfloat16", (21, 40), (4, 1), options=CAUSAL, dtype=torch.bfloat16),
    Case("float16", (21, 40), (4, 1), options={"window_size": (12, 0)}, dtype=torch.float16),
    Case("wide head", (9, 30), (2, 1), 130, CAUSAL),
]
LARGE_CASES = [
    Case("causal 3000", (1000, 3000, 3), (4, 1), 128, CAUSAL, dtype=torch.bfloat16),
    Case("window 1024", (1000, 3000, 3), (4, 2), 128, {"causal": True, "window_size": (1024, 0)}, dtype=torch.bfloat16),
    Case("float32", (700, 1300), (4, 2), 64, CAUSAL),
    Case("float16 between lengths", (700, 1300), (8, 2), 96, CAUSAL, (900, 1000), dtype=torch.float16),
    Case("head of 256", (300, 130), (2, 1), 256, CAUSAL, dtype=torch.bfloat16),
]


def run(tensors: list[Tensor], bounds: dict, options: dict) -> list[Tensor]:
    """Output and gradients of query, key and value; the same dropout every time."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    torch.manual_seed(7)
    output = varlen_attention(*leaves, **bounds, **options)
    return [output, *torch.autograd.grad(output, leaves, tensors[3])]


def settings(case: Case) -> dict:
    """The arguments of the reference for the options of the call."""
    given = dict(case.options)
    left, right = given.pop("window_size", (-1, -1))
    right = 0 if given.pop("causal", False) else right
    return {"left": left, "right": right, "scale": case.size**-0.5, **given}


def exact(case: Case, tensors: list[Tensor], bounds: dict) -> tuple[list[Tensor], Tensor]:
    """Output and gradients in float64, and the logs of sums."""
    torch.manual_seed(7)
    given = settings(case)
    if "dropout_p" in given:
        given["seed"] = draw_seed(tensors[0].device).cpu()
    leaves = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors[:3]]
    edges = bounds["cu_seqlens_q"].tolist()
    edges_k = bounds["cu_seqlens_k"].tolist() if "cu_seqlens_k" in bounds else edges
    output, lse = reference.varlen_attention(*leaves, (edges, edges_k), **given)
    return [output, *torch.autograd.grad(output, leaves, tensors[3].double().cpu())], lse


def check(case: Case, route: Route) -> None:
    tensors, bounds = case.tensors(route.device)
    expected, expected_lse = exact(case, tensors, bounds)
    with _library.implementation(route.implementation):
        results = run(tensors, bounds, case.options)
        with_lse, lse = varlen_attention(*tensors[:3], **bounds, **case.options, return_lse=True)
    for name, result, right in zip(("output", "dquery", "dkey", "dvalue"), results, expected, strict=True):
        assert_close(result, right, name)
    if "dropout_p" not in case.options:
        assert_close(with_lse, expected[0])
        end = sum(case.lengths)
        finite = expected_lse[:, :end] > -torch.inf
        assert torch.equal(lse[:, :end].cpu() > -torch.inf, finite)
        torch.testing.assert_close(
            lse[:, :end].cpu()[finite].double(), expected_lse[:, :end][finite], rtol=0, atol=0.05
        )


def test_the_reference_is_attention_of_each_document() -> None:
    """The definition, written out with loops over documents, heads and queries."""
    case = CASES[11]
    (query, key, value, _), bounds = case.tensors("cpu")
    query, key, value = query.double(), key.double(), value.double()
    edges, edges_k = bounds["cu_seqlens_q"].tolist(), bounds["cu_seqlens_k"].tolist()
    output, _ = reference.varlen_attention(query, key, value, (edges, edges_k), scale=0.25, right=0)
    for start, end, start_k, end_k in zip(edges, edges[1:], edges_k, edges_k[1:], strict=False):
        for row in range(start, end):
            seen = end_k - (end - 1 - row)  # the last query has the position of the last key
            for head in range(4):
                weights = (key[start_k:seen, head // 2] @ query[row, head] / 4).softmax(0)
                torch.testing.assert_close(output[row, head], weights @ value[start_k:seen, head // 2])


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: Case, route: Route) -> None:
    check(case, route)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_matches_reference_at_model_sizes(case: Case) -> None:
    check(case, Route("cuda", "triton"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_gives_the_same_without_knowing_lengths(case: Case) -> None:
    """Other devices, torch.compile and second derivatives use it."""
    tensors, bounds = case.tensors("cpu")
    expected, expected_lse = exact(case, tensors, bounds)
    given = settings(case)
    torch.manual_seed(7)
    seed = draw_seed(tensors[0].device) if "dropout_p" in given else None
    masks = (given["scale"], given["left"], given["right"], given.get("dropout_p", 0.0), seed)
    edges, longest = bounds["cu_seqlens_q"], bounds["max_seqlen_q"]
    lengths = (edges, bounds.get("cu_seqlens_k", edges), longest, bounds.get("max_seqlen_k", longest))
    leaves = [tensor.double().requires_grad_() for tensor in tensors[:3]]
    output, lse = reference.padded_varlen_attention(*leaves, lengths, masks)
    gradients = torch.autograd.grad(output, leaves, tensors[3].double())
    for result, right in zip((output, *gradients), expected, strict=True):
        torch.testing.assert_close(result, right)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("route", routes())
def test_logits_far_below_zero_behind_a_tile_without_keys(route: Route) -> None:
    """A tile in which a row sees nothing must not count as a largest logit of 0."""
    case = Case("", (200,), (1, 1), options={"window_size": (3, 0)})
    tensors, bounds = case.tensors(route.device)
    tensors[0], tensors[1] = torch.full_like(tensors[0], 10.0), torch.full_like(tensors[1], -10.0)
    expected, _ = exact(case, tensors, bounds)
    with _library.implementation(route.implementation):
        results = run(tensors, bounds, case.options)
    assert_close(results[0], expected[0])
    assert_close(results[3], expected[3])


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window_size": (40, 0)},
        {"window_size": (30, 5)},
        {"window_size": (-1, -1)},
        {"causal": True, "window_size": (40, 0), "dropout_p": 0.2},
    ],
    ids=str,
)
def test_whole_tiles_between_masked_ones(options: dict, route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 by 16: a tile of keys has masked tiles of queries before and after whole ones, in three heads."""
    for rule in ("queries_tile", "keys_tile"):
        monkeypatch.setattr(config, rule, lambda *_: config.Tile(16, 16, 4, 1))
    forget_launches()
    check(Case("", (7, 88), (3, 1), options=options), route)
    forget_launches()


@pytest.mark.parametrize("route", routes())
def test_strided_tensors_of_one_projection(route: Route) -> None:
    case = CASES[4]
    (query, key, value, dout), bounds = case.tensors(route.device)
    joined = torch.cat((query, key, value), 1)
    strided = [*joined.split((8, 2, 2), 1), dout.transpose(0, 1).contiguous().transpose(0, 1)]
    expected, _ = exact(case, [query, key, value, dout], bounds)
    with _library.implementation(route.implementation):
        for result, right in zip(run(strided, bounds, case.options), expected, strict=True):
            assert_close(result, right)


@pytest.mark.parametrize("route", routes())
def test_equal_bits_twice_and_with_the_logs_of_sums(route: Route) -> None:
    case = CASES[4]
    tensors, bounds = case.tensors(route.device)
    with _library.implementation(route.implementation):
        first, second = (run(tensors, bounds, case.options) for _ in range(2))
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        output, lse = varlen_attention(*leaves, **bounds, causal=True, return_lse=True)
        gradients = torch.autograd.grad(output, leaves, tensors[3])
    assert not lse.requires_grad
    for one, other, third in zip(first, second, (output, *gradients), strict=True):
        assert_equal_bits(one, other)
        assert_close(third, one.double())


@pytest.mark.parametrize("route", routes())
def test_nothing_to_attend_to(route: Route) -> None:
    with _library.implementation(route.implementation):
        for rows, edges in ((0, [0]), (0, [0, 0]), (4, [0]), (4, [0, 0, 0])):
            query = torch.randn(rows, 2, 8, device=route.device, requires_grad=True)
            output = varlen_attention(query, query, query, torch.tensor(edges, device=route.device), 4, causal=True)
            assert output.shape == (rows, 2, 8)
            assert not output.any()
            assert not torch.autograd.grad(output.sum(), query)[0].any()


@pytest.mark.parametrize("route", routes())
def test_second_derivative(route: Route) -> None:
    case = Case("", (2, 4), (2, 1), 3, {"causal": True})
    tensors, bounds = case.tensors(route.device)

    def second(function, leaf):
        (first,) = torch.autograd.grad(function(leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    key, value = tensors[1:3]
    with _library.implementation(route.implementation), torch.enable_grad():
        arguments = (bounds["cu_seqlens_q"], None, None, 4, 4, 3**-0.5, -1, 0, 0.0, False)
        actual = second(
            lambda x: op_varlen.VARLEN_ATTENTION.differentiable(x, key, value, *arguments), tensors[0].requires_grad_()
        )
    wide = tensors[0].detach().double().cpu().requires_grad_()
    others, edges = (key.double().cpu(), value.double().cpu()), bounds["cu_seqlens_q"].tolist()
    assert_close(
        actual,
        second(lambda x: reference.varlen_attention(x, *others, (edges, edges), 3**-0.5, right=0)[0], wide),
    )


@pytest.mark.parametrize("route", routes())
def test_activation_checkpointing_repeats_the_dropout(route: Route) -> None:
    case = CASES[17]
    tensors, bounds = case.tensors(route.device)
    with _library.implementation(route.implementation):
        plain = run(tensors, bounds, case.options)
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        torch.manual_seed(7)
        output = checkpoint(lambda *x: varlen_attention(*x, **bounds, **case.options), *leaves, use_reentrant=False)
        output.backward(tensors[3])
    assert torch.equal(leaves[1].grad, plain[2])


@pytest.mark.parametrize("route", routes())
def test_autocast_computes_in_its_dtype(route: Route) -> None:
    case = CASES[4]
    tensors, bounds = case.tensors(route.device)
    with _library.implementation(route.implementation), torch.autocast(route.device, dtype=torch.bfloat16):
        output = varlen_attention(*tensors[:3], **bounds, causal=True)
    assert output.dtype == torch.bfloat16
    assert_close(output, exact(case, tensors, bounds)[0][0])


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("size", [13, 2**31 - 1, 2**31, 2**63])
def test_windows_longer_than_sequences_hide_nothing(size: int, route: Route) -> None:
    """Positions plus numbers near 2^31 overflowed in kernels."""
    tensors, bounds = Case("window", (13, 1, 5), (2, 1)).tensors(route.device)
    with _library.implementation(route.implementation):
        for options in ({}, CAUSAL):
            expected = run(tensors, bounds, options)
            for window in ((size, size), (size, -1), (-1, size)):
                torch.testing.assert_close(run(tensors, bounds, {**options, "window_size": window}), expected)


EQUAL_CASES = [
    Case("one", (21,), (4, 2), options=CAUSAL, dtype=torch.bfloat16),
    Case("several", (20, 20, 20), (4, 2), options=CAUSAL, dtype=torch.bfloat16),
    Case("float16", (20, 20), (2, 2), dtype=torch.float16),
    Case("other length of keys", (9, 9), (2, 1), lengths_k=(13, 13), dtype=torch.bfloat16),
]
OTHER_CASES = [
    Case("different lengths", (20, 3, 20), (4, 2), options=CAUSAL, dtype=torch.bfloat16),
    Case("rows left over", (20, 20), (4, 2), options=CAUSAL, tail=20, dtype=torch.bfloat16),
    Case("few rows left over", (20, 20), (4, 2), options=CAUSAL, tail=3, dtype=torch.bfloat16),
    Case("rows left over after one", (20,), tail=4, dtype=torch.bfloat16),
    Case("window", (20, 20), options={"window_size": (3, 0)}, dtype=torch.bfloat16),
    Case("causal, other length of keys", (9, 9), options=CAUSAL, lengths_k=(13, 13), dtype=torch.bfloat16),
    Case("no rows", (0, 0), tail=4, dtype=torch.bfloat16),
    Case("float32", (20, 20), options=CAUSAL),
]


@pytest.mark.parametrize("case", [*EQUAL_CASES, *OTHER_CASES], ids=str)
def test_equal_lengths_on_the_host_are_a_batch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-precision batches go through PyTorch's attention, everything else does not."""
    tensors, bounds = case.tensors("cpu")
    expected, _ = exact(case, tensors, bounds)
    shapes, batched = [], reference.batched_attention
    monkeypatch.setattr(
        reference, "batched_attention", lambda *x, **how: shapes.append(x[0].shape) or batched(*x, **how)
    )
    for result, right in zip(run(tensors, bounds, case.options), expected, strict=True):
        assert_close(result, right)
    batch = (len(case.lengths), case.heads[0], case.lengths[0], case.size)
    assert shapes == ([batch] if case in EQUAL_CASES else [])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*EQUAL_CASES, *OTHER_CASES], ids=str)
def test_bounds_on_the_host_of_tensors_on_a_gpu(case: Case) -> None:
    tensors, bounds = case.tensors("cuda")
    expected, _ = exact(case, tensors, bounds)
    bounds = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in bounds.items()}
    for result, right in zip(run(tensors, bounds, case.options), expected, strict=True):
        assert_close(result, right)


def _call(shape=(4, 2, 8), key=(4, 2, 8), edges=(0, 4), longest=4, **options):
    tensors = (torch.zeros(shape), torch.zeros(key), torch.zeros(key))
    return varlen_attention(*tensors, torch.tensor(edges), longest, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (4, 16)}, "query has shape"),
        ({"key": (4, 3, 8)}, "multiple of the key's"),
        ({"key": (4, 2, 16)}, "equal sizes"),
        ({"key": (5, 2, 8)}, "without cu_seqlens_k"),
        ({"edges": [[0, 4]]}, "cu_seqlens_q has shape"),
        ({"edges": (0, 5), "longest": 5}, "cu_seqlens_q="),
        ({"edges": (0, 3, 2)}, "must grow"),
        ({"longest": 3}, "max_seqlen_q=3"),
        ({"cu_seqlens_k": torch.tensor([0, 2, 4]), "max_seqlen_k": 2}, "must be equal"),
        ({"cu_seqlens_k": torch.tensor([0, 4]), "max_seqlen_k": 2}, "max_seqlen_k=2"),
        ({"max_seqlen_k": 3}, "max_seqlen_k=3 is less than max_seqlen_q=4"),
        ({"window_size": (1,)}, "window_size="),
        ({"window_size": (-2, 0)}, "window_size="),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"dropout_p": 1.0}, "dropout_p=1.0"),
    ],
)
def test_arguments_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(**options)


def test_dtypes_that_do_not_fit() -> None:
    query, edges = torch.zeros(4, 2, 8), torch.tensor([0, 4])
    with pytest.raises(TypeError, match=r"cu_seqlens_q is torch.float32"):
        varlen_attention(query, query, query, edges.float(), 4)
    with pytest.raises(TypeError, match="floating-point"):
        varlen_attention(query.int(), query, query, edges, 4)
    with pytest.raises(ValueError, match=r"key is torch\.float64"):
        varlen_attention(query, query.double(), query, edges, 4)
