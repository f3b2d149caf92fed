"""Random calls of layers, functions and losses, each with its definition in float64, for `test_properties.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from apex.contrib import multihead_attn, transducer
from tests.ops.transducer import formulas
from tests.support.drawn import st
from tests.support.properties import Trial, draw_case, draw_tensor, layer_trial

Draw = Callable[[st.SearchStrategy[Any]], Any]


def _moved(module: torch.nn.Module, case: Any) -> torch.nn.Module:
    return module.to(case.device, case.dtype if case.dtype.is_floating_point else torch.float32)


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
    "transducer": transducer_loss,
    "multihead_attn": attention,
}
