"""Random calls of layers, functions and losses, each with its definition in float64, for `test_properties.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from apex import fused_dense, mlp, normalization
from apex.contrib import focal_loss, group_norm, layer_norm, multihead_attn, transducer, xentropy
from apex.transformer import functional
from tests.ops.transducer import formulas
from tests.properties import Trial, draw_case, draw_tensor, layer_trial

Draw = Callable[[st.SearchStrategy[Any]], Any]


def _moved(module: torch.nn.Module, case: Any) -> torch.nn.Module:
    return module.to(case.device, case.dtype if case.dtype.is_floating_point else torch.float32)


def norm(draw: Draw) -> Trial:
    case, affine = draw_case(draw), draw(st.booleans())
    name = draw(st.sampled_from(["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm", "Fast"]))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 5, 17]), max_size=2)))
    row = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 16, 33]), min_size=1, max_size=2)))
    options: dict[str, Any] = {"memory_efficient": draw(st.booleans())}
    if name == "Fast":
        row, module = row[:1], layer_norm.FastLayerNorm(row[0], **options)
    else:
        if not name.startswith("Mixed"):
            options["elementwise_affine"] = affine
        module = getattr(normalization, name)(row, **options)
    module = _moved(module, case)
    input = draw_tensor(draw, case, (*shape, *row))
    parameters = [p for p in (module.weight, module.bias) if p is not None]

    def truth(x: Tensor, *given: Tensor) -> Tensor:
        weight, bias = (*given, None, None)[:2]
        if "RMS" in name:
            return F.rms_norm(x, row, weight, 1e-5)
        return F.layer_norm(x, row, weight, bias, 1e-5)

    # A row of one element has no variance: its gradient is zero, times 1 / sqrt(eps) = 316.
    return layer_trial(case, module, truth, [input], parameters, slack=1e-3 if math.prod(row) == 1 else 0.0)


def grouped_norm(draw: Draw) -> Trial:
    case, groups = draw_case(draw), draw(st.integers(1, 4))
    channels, act = groups * draw(st.integers(1, 5)), draw(st.sampled_from([None, "silu", "swish"]))
    sides = draw(st.lists(st.sampled_from([0, 1, 2, 5]), max_size=3))
    module = _moved(group_norm.GroupNorm(groups, channels, affine=draw(st.booleans()), act=act), case)
    input = draw_tensor(draw, case, (draw(st.integers(0, 3)), channels, *sides))
    parameters = [p for p in (module.weight, module.bias) if p is not None]

    def truth(x: Tensor, *given: Tensor) -> Tensor:
        weight, bias = (*given, None, None)[:2]
        grouped = x.reshape(len(x), groups, channels // groups * math.prod(sides))
        variance, mean = (grouped.var(-1, correction=0, keepdim=True), grouped.mean(-1, keepdim=True))
        result = ((grouped - mean) / (variance + 1e-5).sqrt()).reshape(x.shape)
        if weight is not None and bias is not None:
            per_channel = (1, channels, *(1,) * len(sides))
            result = result * weight.reshape(per_channel) + bias.reshape(per_channel)
        return F.silu(result) if act else result

    return layer_trial(case, module, truth, [input], parameters)


def soft(draw: Draw) -> Trial:
    case, scale = draw_case(draw), draw(st.sampled_from([1.0, 0.5, 0.3, 2.0]))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 5, 17]), min_size=4, max_size=4)))
    scores = draw_tensor(draw, case, shape)
    kind = draw(st.sampled_from(["plain", "masked", "causal", "wrong mask"]))
    mask = (torch.rand(shape[0], 1, *shape[2:]) < 0.3).to(case.device)
    if kind == "wrong mask":
        mask = torch.cat((mask, mask), -1)
    causal = torch.ones(shape[2:], dtype=torch.bool).triu(1 + shape[3] - shape[2])

    def run(x: Tensor) -> Tensor:
        if kind == "causal":
            return functional.scaled_upper_triang_masked_softmax(x, None, scale)
        return functional.scaled_masked_softmax(x, None if kind == "plain" else mask, scale)

    def truth(x: Tensor) -> Tensor:
        hidden = {"causal": causal}.get(kind, mask.cpu() if mask.device.type != "meta" else causal.new_zeros(()))
        if kind == "plain":
            return (scale * x).softmax(-1)
        return (scale * x).masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)

    return layer_trial(case, run, truth, [scores], valid=kind != "wrong mask" or shape[-1] == 0)


def rotated(draw: Draw) -> Trial:
    case, channels = draw_case(draw), draw(st.sampled_from([4, 8, 7, 16]))
    tokens, width = draw(st.sampled_from([0, 1, 3, 8])), draw(st.sampled_from([2, 2, 4, 3]))
    edges = sorted(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    packed, shuffled = draw(st.booleans()), draw(st.integers(0, 4)) == 0
    edges = [edge - 1 for edge in edges] if draw(st.integers(0, 5)) == 0 else edges
    edges = edges[::-1] if shuffled else edges
    t = draw_tensor(draw, case, (tokens, 2, channels) if packed else (tokens, 2, 2, channels))
    freqs = torch.rand(8 if packed else tokens, 1, 1, width, dtype=torch.float32, device=case.device)
    given = torch.tensor(edges, dtype=torch.int32, device=case.device)
    lengths = [b - a for a, b in itertools.pairwise(edges)]
    fits = width % 2 == 0 and width <= channels
    fits = fits and (not packed or (edges[0] >= 0 and all(0 <= length <= 8 for length in lengths)))

    def run(t: Tensor) -> Tensor:
        if packed:
            return functional.fused_apply_rotary_pos_emb_thd(t, given, freqs)
        return functional.fused_apply_rotary_pos_emb(t, freqs)

    def truth(t: Tensor) -> Tensor:
        angles = torch.zeros(tokens, *(1,) * (t.dim() - 2), width, dtype=torch.float64)
        table = torch.zeros(freqs.shape) if freqs.device.type == "meta" else freqs.cpu()
        for token in range(tokens):
            starts = [a for a, b in itertools.pairwise(edges) if a <= token < b] if packed else [0]
            if starts:
                angles[token] = table[token - starts[-1]].double().reshape(angles[token].shape)
        first, second = t[..., :width].chunk(2, -1)
        turned = t[..., :width] * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
        return torch.cat((turned, t[..., width:]), -1)

    return layer_trial(case, run, truth, [t], valid=fits)


def dense(draw: Draw) -> Trial:
    case, bias = draw_case(draw), draw(st.booleans())
    sizes = [draw(st.sampled_from([1, 2, 8, 17])) for _ in range(draw(st.integers(2, 4)))]
    kind = draw(st.sampled_from(["MLP", "FusedDense", "FusedDenseGeluDense"]))
    activation = draw(st.sampled_from(["none", "relu", "sigmoid"]))
    if kind == "MLP":
        module: Any = mlp.MLP(sizes, bias=bias, activation=activation)
        acts = [{"none": lambda x: x, "relu": F.relu, "sigmoid": F.sigmoid}[activation]] * (len(sizes) - 1)
    elif kind == "FusedDense":
        sizes, acts = sizes[:2], [lambda x: x]
        module = fused_dense.FusedDense(*sizes, bias=bias)
    else:
        sizes, acts = (*sizes, *sizes)[:3], [lambda x: F.gelu(x, approximate="tanh"), lambda x: x]
        module = fused_dense.FusedDenseGeluDense(*sizes, bias=bias)
    module = _moved(module, case)
    wrong = draw(st.integers(0, 5)) == 0
    lead = draw(st.lists(st.sampled_from([0, 1, 3]), max_size=2))
    input = draw_tensor(draw, case, (*lead, sizes[0] + wrong))
    parameters = list(module.parameters())

    def truth(x: Tensor, *given: Tensor) -> Tensor:
        named = dict(zip([name for name, _ in module.named_parameters()], given, strict=True))
        weights = [value for name, value in named.items() if "weight" in name]
        biases = [value for name, value in named.items() if "bias" in name] or [None] * len(weights)
        for weight, offset, act in zip(weights, biases, acts, strict=True):
            x = act(F.linear(x, weight, offset))
        return x

    return layer_trial(case, module, truth, [input], parameters, valid=not wrong)


def cross_entropy(draw: Draw) -> Trial:
    case, rows = draw_case(draw), draw(st.sampled_from([0, 1, 3, 8]))
    classes, smoothing = draw(st.sampled_from([1, 2, 5, 33])), draw(st.sampled_from([0.0, 0.1, 1.5]))
    padding = draw(st.sampled_from([0, -1, -100, 2]))
    labels = torch.randint(classes, (rows,), dtype=torch.int64, device=case.device)
    label_dtype = draw(st.sampled_from([torch.int64, torch.int64, torch.int32, torch.float32]))
    fits = smoothing <= 1 and not label_dtype.is_floating_point
    linear = draw(st.booleans())
    if linear:
        given = [draw_tensor(draw, case, shape) for shape in ((rows, 6), (classes, 6))]
    else:
        given = [draw_tensor(draw, case, (rows, classes))]

    def run(*tensors: Tensor) -> Tensor:
        target = labels.to(label_dtype)
        if linear:
            options = {"label_smoothing": smoothing, "ignore_index": padding, "reduction": "none"}
            return xentropy.linear_cross_entropy(*tensors, target, **options)
        return xentropy.SoftmaxCrossEntropyLoss.apply(*tensors, target, smoothing, padding)

    def truth(*tensors: Tensor) -> Tensor:
        logits = F.linear(*tensors) if linear else tensors[0]
        target = torch.zeros(rows, dtype=torch.int64) if labels.device.type == "meta" else labels.cpu()
        return F.cross_entropy(logits, target, ignore_index=padding, label_smoothing=smoothing, reduction="none")

    return layer_trial(case, run, truth, given, valid=fits, out_dtype=torch.float32)


def focal(draw: Draw) -> Trial:
    case, real = draw_case(draw), draw(st.sampled_from([1, 4, 8]))
    gamma, smoothing = draw(st.sampled_from([2.0, 1.5, 0.0])), draw(st.sampled_from([0.0, 0.1]))
    classes, anchors = real + draw(st.sampled_from([0, 1, 8])), draw(st.sampled_from([0, 1, 7]))
    highest = draw(st.sampled_from([real, real, real + 1]))
    targets = torch.randint(-2, highest, (anchors,), dtype=torch.int64)
    positives = torch.tensor([3.0], dtype=torch.float32, device=case.device)
    scores = draw_tensor(draw, case, (anchors, classes))

    def run(scores: Tensor) -> Tensor:
        options = (real, 0.25, gamma, smoothing)
        return focal_loss.focal_loss(scores, targets.to(scores.device), positives, *options)

    def truth(scores: Tensor) -> Tensor:
        x, column = scores[:, :real], targets[:, None]
        right = column == torch.arange(real)
        wanted = torch.where(right, 1 - smoothing / 2, smoothing / 2).double()
        wrong = torch.where(right, 1 - x.sigmoid(), x.sigmoid())
        losses = torch.where(right, 0.25, 0.75) * wrong**gamma
        losses = losses * F.binary_cross_entropy_with_logits(x, wanted, reduction="none")
        return torch.where(column != -2, losses, 0.0).sum() / 3

    fits = not anchors or int(targets.max()) < real
    return layer_trial(case, run, truth, [scores], valid=fits, out_dtype=torch.float32)


def transducer_loss(draw: Draw) -> Trial:
    case, frames, labels = draw_case(draw), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    words, batches = draw(st.sampled_from([2, 5, 9])), draw(st.integers(1, 2))
    wrong = draw(st.integers(0, 4)) == 0
    f_len = torch.tensor([draw(st.integers(0 if wrong else 1, 4 if wrong else frames)) for _ in range(batches)])
    y_len = torch.tensor([draw(st.integers(0, 3 if wrong else labels)) for _ in range(batches)])
    label = torch.randint(-1 if draw(st.integers(0, 3)) == 0 else 0, words, (batches, labels))
    blank = draw(st.sampled_from([0, 0, words - 1, words]))
    x = draw_tensor(draw, case, (batches, frames, labels + 1, words))
    fits = bool((f_len >= 1).all() and (f_len <= frames).all() and (y_len <= labels).all() and blank < words)
    used = torch.arange(labels) < y_len[:, None]
    fits = fits and bool((label[used] >= 0).all())
    fits = fits and case.device != "meta"  # which nodes there are, meta tensors do not say

    def run(x: Tensor) -> Tensor:
        return transducer.TransducerLoss()(x, *(t.to(x.device) for t in (label, f_len, y_len)), blank)

    return layer_trial(case, run, lambda x: formulas.losses(x, label, f_len, y_len, blank), [x], valid=fits)


def attention(draw: Draw) -> Trial:
    case, heads = draw_case(draw), draw(st.sampled_from([1, 2, 4]))
    embed, length = heads * draw(st.sampled_from([1, 4, 8])), draw(st.sampled_from([1, 2, 5]))
    impl, bias = draw(st.sampled_from(["fast", "default"])), draw(st.booleans())
    module: Any = _moved(multihead_attn.SelfMultiheadAttn(embed, heads, bias=bias, impl=impl), case)
    wrong, batch = draw(st.integers(0, 5)) == 0, draw(st.sampled_from([1, 3]))
    query = draw_tensor(draw, case, (length, batch, embed + wrong))
    parameters = list(module.parameters())
    names = [name for name, _ in module.named_parameters()]

    def truth(x: Tensor, *given: Tensor) -> Tensor:
        named = dict(zip(names, given, strict=True))
        projected = F.linear(x, named["in_proj_weight"], named.get("in_proj_bias"))
        parts = projected.reshape(length, batch, heads, 3, embed // heads).permute(3, 1, 2, 0, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0)).permute(2, 0, 1, 3).reshape(length, batch, embed)
        return F.linear(mixed, named["out_proj_weight"], named.get("out_proj_bias"))

    def run(x: Tensor, *_: Tensor) -> Tensor:
        return module(x, x, x)[0]

    return layer_trial(case, run, truth, [query], parameters, valid=not wrong)


SUBJECTS: dict[str, Callable[[Draw], Trial]] = {
    "normalization": norm,
    "group_norm": grouped_norm,
    "softmax": soft,
    "rope": rotated,
    "mlp and fused_dense": dense,
    "cross-entropy": cross_entropy,
    "focal_loss": focal,
    "transducer": transducer_loss,
    "multihead_attn": attention,
}
