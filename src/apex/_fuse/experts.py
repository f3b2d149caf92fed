"""A rule for the experts of mixtures in transformers 5: all experts of a layer in two tensors.

Classes that transformers decorates with `use_experts_implementation` have `gate_up_proj` [E, 2F, H] and `down_proj`
[E, H, F], flags that describe their layout, and `forward(hidden_states, indices, weights)`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops._library import autocast_dtype
from ..ops.moe import moe_experts
from ..ops.moe.reference import ACTIVATIONS, unit
from .rule import FusionRule, in_mode

_FLAGS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")
# Names of the layers of one expert where experts are separate modules.
_SEPARATE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3"))
# Most experts and channels of the small copy that is compared; tokens, and experts per token, of its input.
_EXPERTS, _SIZE, _TOKENS, _CHOSEN = 3, 16, 6, 2


class _Unit(NamedTuple):
    """The gated linear unit of a module, and whether columns of gate and value alternate."""

    activation: str
    interleaved: bool


def _is_batched(module: Any) -> bool:
    matrices = [getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj")]
    return all(hasattr(module, name) for name in _FLAGS) and any(isinstance(matrix, Tensor) for matrix in matrices)


def _is_list(module: Any) -> bool:
    """Return whether a module is a list of separate experts, as in transformers 4."""
    if not isinstance(module, nn.ModuleList) or len(module) < 2 or len({type(expert) for expert in module}) > 1:
        return False
    return any(all(hasattr(module[0], name) for name in names) for names in _SEPARATE)


def _unit_of(module: Any) -> _Unit | None:
    """Return the gated unit that a module's `_apply_gate` computes; None if the unit is unknown."""
    columns = module.gate_up_proj.shape[2 if module.is_transposed else 1]
    generator = torch.Generator().manual_seed(0)
    pre = torch.randn(8, columns, generator=generator, dtype=torch.float64, device=generator.device)
    pre *= torch.logspace(-3, 2, 8, dtype=torch.float64, device=pre.device)[:, None]
    results = []
    try:
        for training in (True, False):
            with torch.no_grad(), in_mode(module, training):
                results.append(module._apply_gate(pre))
    except Exception:  # a foreign function may raise anything
        return None
    for activation in ACTIVATIONS:
        for interleaved in (False, True):
            wanted = unit(pre, activation, interleaved)
            if all(y.shape == wanted.shape and torch.allclose(y, wanted, rtol=1e-5, atol=1e-6) for y in results):
                return _Unit(activation, interleaved)
    return None


def _reason(module: Any) -> str:
    if _is_list(module):
        return "its experts are separate modules; transformers 5 has them in one tensor"
    if not module.has_gate:
        return "its experts have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts end with a norm"
    for name in ("gate_up_proj", "down_proj"):
        weight: Any = getattr(module, name, None)
        if type(weight) not in (nn.Parameter, Tensor):
            return f"its {name} is a {type(weight).__name__}"
        if weight.dim() != 3 or weight.dtype.itemsize == 1:
            return f"its {name} is {weight.dtype} of shape {list(weight.shape)}"
    if len(_argument_names(type(module))) != 3:
        return "its forward takes other arguments"
    if "_apply_gate" in vars(module) or not hasattr(module, "_apply_gate"):
        return "its _apply_gate was replaced in this instance"
    return "" if _unit_of(module) else f"its _apply_gate is none of the units {', '.join(ACTIVATIONS)}"


def _argument_names(kind: Any) -> list[str]:
    """Return the names of the arguments of a class's own forward, without decorators."""
    return list(inspect.signature(inspect.unwrap(kind.forward)).parameters)[1:]


def _make_forward(original: Any) -> Callable[..., Tensor]:
    names = _argument_names(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the experts in the kernels of `apex.ops.moe`; other calls go to the original class."""
        arguments = {**dict(zip(names[: len(args)], args[: len(names)], strict=True)), **kwargs}
        if len(args) > 3 or set(arguments) != set(names) or not _is_plain(self, *(arguments[name] for name in names)):
            return original.forward(self, *args, **kwargs)
        hidden, index, weight = (arguments[name] for name in names)
        gated_unit = self.fused_settings
        output = moe_experts(
            hidden,
            self.gate_up_proj,
            self.down_proj,
            index,
            weight,
            bias=(self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else None,
            activation=gated_unit.activation,
            interleaved=gated_unit.interleaved,
            transposed=self.is_transposed,
        )
        return output.to(hidden.dtype)

    return forward


def _is_plain(module: Any, hidden: Any, index: Any, weight: Any) -> bool:
    """Return whether `moe_experts` takes the arguments of a call."""
    if not all(isinstance(argument, Tensor) for argument in (hidden, index, weight)):
        return False
    alike = hidden.dtype == module.gate_up_proj.dtype == module.down_proj.dtype or autocast_dtype(hidden) is not None
    return alike and hidden.dim() == 2 and index.dim() == 2 and index.shape == weight.shape


def _probe(module: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    if _is_list(module):
        return None
    weight, generator = module.gate_up_proj, torch.Generator().manual_seed(0)
    options: Any = {"generator": generator, "dtype": torch.float32, "device": generator.device}
    *_, few, size = _sizes(module)
    chosen = torch.rand(_TOKENS, few, **options).topk(min(_CHOSEN, few))
    hidden = torch.randn(_TOKENS, size, **options)
    return (
        hidden.to(weight.device, weight.dtype),
        chosen.indices.to(weight.device),
        chosen.values.to(weight.device, weight.dtype),
    )


def _sizes(module: Any) -> tuple[int, int, int, int, int]:
    """Return E, H and F of a module, then E and H of its small copy (see `_small`), where F equals H.

    Sizes that are equal in the module are equal in the copy, because an integer attribute may stand for either.
    """
    experts, first, second = module.gate_up_proj.shape
    hidden, width = (first, second // 2) if module.is_transposed else (second, first // 2)
    size = min(_SIZE, hidden, width)
    return experts, hidden, width, size if experts in (hidden, width) else min(_EXPERTS, experts), size


def _small(module: Any) -> Any:
    """Return a copy with few experts, cut to a small size, because trials with all weights would take gigabytes."""
    small = copy.copy(module)
    experts, hidden, width, few, size = _sizes(module)
    sizes = {experts: few, hidden: size, width: size}
    for name, value in vars(module).items():
        if type(value) is int and value in sizes:
            small.__dict__[name] = sizes[value]
    first = torch.arange(size, device=module.gate_up_proj.device, dtype=torch.int64)
    gate = 2 * first if module.fused_settings.interleaved else first
    both = torch.cat((gate, gate + (1 if module.fused_settings.interleaved else width))).sort().values
    small._parameters = {}
    for name, parameter in module._parameters.items():
        cut = parameter.detach()[:few]
        columns = 2 if cut.dim() == 3 and module.is_transposed else 1
        for dimension in range(1, cut.dim()):
            of_columns = name.startswith("gate_up_proj") and dimension == columns
            cut = cut.index_select(dimension, both if of_columns else first)
        small._parameters[name] = nn.Parameter(cut.clone())
    return small


RULES = [
    FusionRule(
        "experts of a mixture",
        lambda module: _is_batched(module) or _is_list(module),
        _reason,
        _make_forward,
        _probe,
        _unit_of,
        small=_small,
    )
]
