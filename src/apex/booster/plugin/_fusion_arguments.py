"""Plugin arguments that replace norms, attention and other modules of a model by fused ones of `apex.fuse`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ...checkpoint._ranks import is_first
from ...logging import get_dist_logger

# The name of apex.fuse's rule for the head of a language model with its loss.
HEAD = "linear layer + cross-entropy"


class FusionArguments(NamedTuple):
    """The arguments of HybridParallelPlugin and GeminiPlugin that replace modules by fused ones.

    `enable_all_optimization` turns on the other three.
    """

    enable_all_optimization: bool
    enable_fused_normalization: bool
    enable_flash_attention: bool
    enable_jit_fused: bool

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> FusionArguments:
        """Return these arguments out of all arguments of a plugin's constructor."""
        return cls(*(arguments[name] for name in cls._fields))

    def apply(self, model: nn.Module) -> None:
        """Replace modules in place and log a table of them in the first process; warn if an argument changed nothing.

        Call it before anything is cast or sharded, because each replacement is tried with the weights.
        """
        every, norms, attention, others = self
        tables = {}
        if norms or every:
            tables["enable_fused_normalization"] = _fuse(model, "norms")
        if attention or every:
            tables["enable_flash_attention"] = "\n".join(filter(None, (_fuse(model, "attention"), _take_sdpa(model))))
        if others or every:
            tables["enable_jit_fused"] = _fuse(model, "others")
        for argument, table in tables.items():
            if table:
                get_dist_logger().info(f"{argument}:\n{table}", ranks=[0])
        # Few models have modules for all three kinds, so enable_all_optimization warns only if none was replaced.
        idle = [argument for argument, table in tables.items() if not table and not every]
        if every and not any(tables.values()):
            idle = ["enable_all_optimization"]
        if idle and is_first():
            warnings.warn(f"{'=True, '.join(idle)}=True changes nothing: the model has no module for it", stacklevel=2)


def _fuse(model: nn.Module, kind: str) -> str:
    """Fuse the modules of one kind; return a table of the modules that a rule matched, or "" if none was replaced."""
    from ..._fuse import Report, attention, fuse, norms
    from ..._fuse.rule import RULES

    own: dict[str, Any] = {"norms": norms.RULES, "attention": attention.RULES}
    # A language model with a fused head returns no logits, and some training loops read them.
    left_out = [*norms.RULES, *attention.RULES, *(rule for rule in RULES if rule.name == HEAD)]
    rules = own.get(kind, [rule for rule in RULES if rule not in left_out])

    def is_wanted(name: str, module: nn.Module) -> bool:
        return all(rule in rules for rule in RULES if rule.matches(module))

    report = fuse(model, choose=is_wanted, verbose=False)
    known = {rule.name for rule in rules}
    table = Report(row for row in report if row.rule in known)
    return str(table) if any(not row.reason for row in table) else ""


def _take_sdpa(model: nn.Module) -> str:
    """Switch a Hugging Face model from eager to PyTorch's fused attention; return a line about it, or ""."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        used = getattr(config, "_attn_implementation", None)
        if used is None or not hasattr(module, "set_attn_implementation"):
            continue
        if used == "eager":
            try:
                module.set_attn_implementation("sdpa")  # type: ignore[operator]
            except (ValueError, NotImplementedError, ImportError):  # its class has no such attention
                return ""
        return f"attention of {type(module).__name__}: {config._attn_implementation}"
    return ""
