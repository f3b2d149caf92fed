"""Settings of `mutants.py`: the tests of each package, what is changed, and mutants that nobody could notice."""

from __future__ import annotations

import ast
import re

IN_BOOSTER = ("groups", "booster", "mixed_precision", "checkpoints", "plugin_arguments")
BOOSTER = " ".join(f"tests/booster/test_{name}.py" for name in IN_BOOSTER)
ZERO = " ".join(f"tests/contrib/zero/test_{name}.py" for name in ("layout", "checkpoints", "wait_on_use", "options"))
FILES = "tests/checkpoint/test_checkpoint.py tests/checkpoint/test_writers.py"
FOLDERS = "tests/checkpoint/test_folders.py tests/booster/test_folders.py tests/booster/test_refused_loads.py"
# By package: stages of tests. A later stage takes longer, and runs if those before it have noticed nothing.
PACKAGES = {
    "booster": (BOOSTER, "tests/booster/test_processes.py"),
    "contrib/optimizers/_zero": (ZERO, "tests/contrib/zero", "tests/contrib/test_distributed_fused_lamb.py"),
    "checkpoint": (FILES, "tests/checkpoint/test_untrusted.py tests/booster/test_checkpoints.py", FOLDERS),
    "_atomic": (FILES, "tests/checkpoint/test_kills.py"),
    "_fuse": ("tests/_fuse",),
    "_cli/migrate": ("tests/_cli/test_migrate.py",),
    "amp": ("tests/amp/test_scaler.py tests/amp/test_optimizers.py tests/amp/test_overflow.py", "tests/amp"),
    "contrib/sparsity": ("tests/contrib/sparsity",),
    "fp8": ("tests/fp8",),
}
# Code that a machine without a GPU does not run.
ELSEWHERE = re.compile(r"cuda|nccl|win32|accelerator|captur|_graph_numbers|on_host|TYPE_CHECKING|__all__|Stream|Event")
# Calls that only say something.
MESSAGES = {"warn", "_warn", "warning", "info", "debug", "print", "maybe_print"}
# Operators and calls that are exchanged for others.
OPERATORS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"),
}  # fmt: skip
CALLS = {"min": "max", "amin": "amax", "minimum": "maximum", "any": "all"}
CALLS |= {new: old for old, new in CALLS.items()}

# Mutants that change nothing anybody could notice, with the reason: by file, the line, and the line of the mutant.
WITHOUT_EFFECT: dict[tuple[str, str, str], str] = {
    (
        "src/apex/amp/scaler.py",
        "return (self._min_loss_scale or 0.0) <= value <= self._max_loss_scale",
        "return (self._min_loss_scale or 1.0) <= value <= self._max_loss_scale",
    ): "a scale below 1 without a floor takes the general way to update it, which gives the same numbers",
    (
        "src/apex/amp/_combined.py",
        "for member, view, has in zip(self.members, self.views, has_gradient, strict=True):",
        "for member, view, has in zip(self.members, self.views, has_gradient, strict=False):",
    ): "the three lists are made from the same parameters",
    (
        "src/apex/_distributed/norms.py",
        "first = norms[0]",
        "first = norms[1]",
    ): "the device of another of the norms that are added, of equal dtype or made so",
    (
        "src/apex/contrib/optimizers/_zero/weights.py",
        "arena.outgoing = []",
        "pass",
    ): "the list is empty from the start, and stays so where parameters are written directly",
    (
        "src/apex/contrib/sparsity/_channels.py",
        "first, second = (torch.cat(ids) for ids in zip(*self._joined, strict=True))",
        "first, second = (torch.cat(ids) for ids in zip(*self._joined))",
    ): "the items are pairs",
    (
        "src/apex/contrib/sparsity/sparse_masklib.py",
        "if groups > 1:",
        "if groups >= 1:",
    ): "repeats the squares for one group, to which they would be broadcast",
    (
        "src/apex/contrib/sparsity/permutation_lib.py",
        "__seed = 1",
        "__seed = 2",
    ): "a search from another seed, which finds permutations as good",
    (
        "src/apex/contrib/sparsity/permutation_lib.py",
        "path.write_text(json.dumps(content, indent=1))",
        "path.write_text(json.dumps(content, indent=2))",
    ): "the layout of a file of JSON",
    (
        "src/apex/fp8/convert.py",
        "width = max([5, *(len(row.name) for row in report)])",
        "width = max([6, *(len(row.name) for row in report)])",
    ): "a space more in a table of layers with short names",
}
