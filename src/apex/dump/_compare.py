"""Where two dumps begin to differ: the same records of both, in the order of execution."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .dump import import_h5py

# The relative error up to which results in a dtype count as equal: some roundings, and sums in another order.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}
_COARSEST = 0.5  # of dtypes that are coarser still, such as float8

Key = tuple[str, str, str, int]
Dump = str | os.PathLike[str]


@dataclass(frozen=True)
class Difference:
    """One tensor in both dumps: the root mean square of its error over that of its values, and the largest error.

    `module` is a parameter's name where `kind` is "parameter"; `tolerance` is the relative error that is allowed.
    """

    order: int
    module: str
    layer: str
    kind: str
    dtypes: tuple[str, str]
    error: float
    largest: float
    tolerance: float
    note: str = ""

    @property
    def exceeds(self) -> bool:
        return not self.error <= self.tolerance


@dataclass(frozen=True)
class Comparison:
    """All tensors that both dumps have, in the order of execution, and the records that only one of them has."""

    rows: list[Difference] = field(default_factory=list)
    only_in_first: list[str] = field(default_factory=list)
    only_in_second: list[str] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        """The first tensor, by execution, that differs beyond its tolerance."""
        return next((row for row in self.rows if row.exceeds), None)


def compare(first: Dump, second: Dump | Sequence[Dump], *, tolerance: float | None = None) -> Comparison:
    """Holds the dump `second` against `first`, module for module.

    `second` may be the dumps of several processes, as a list or a pattern such as "O2-*-rank_dump.hdf5", that had equal
    parts of the batch and a loss that is a mean: outputs are put together, gradients averaged. Without a `tolerance`
    an error may be as large as the coarsest dtype explains that either dump had up to there.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, got {tolerance}")
    files = _files(second)
    expected, (found, *others) = _read(first), [_read(file) for file in files]
    rows: list[Difference] = []
    allowed = 0.0
    for key, (order, layer, values, dtype) in expected.items():
        if key not in found:
            continue
        module, kind, _, _ = key
        other = _joined([found[key][2], *(part[key][2] for part in others)], kind) if others else found[key][2]
        dtypes = (dtype, found[key][3])
        allowed = max(allowed, *(TOLERANCES.get(name, _COARSEST if "float" in name else 0.0) for name in dtypes))
        error, largest, note = _errors(values, other)
        limit = allowed if tolerance is None else tolerance
        rows.append(Difference(order, module, layer, kind, dtypes, error, largest, limit, note))
    if not rows:
        raise ValueError(f"{os.fspath(first)} and {os.fspath(files[0])} have no module in common: other models?")
    lacking = (
        [_words(key) for key in one if key not in other] for one, other in ((expected, found), (found, expected))
    )
    return Comparison(rows, *lacking)


def _files(second: Dump | Sequence[Dump]) -> list[Dump]:
    if isinstance(second, Sequence) and not isinstance(second, str):
        files = list(second)
    else:
        files = [*sorted(glob.glob(os.fspath(second)))] or [second]
    if not files:
        raise ValueError("second must name at least one dump")
    return files


def _words(key: Key) -> str:
    module, kind, dataset, call = key
    return f"{module or '(model)'} {kind} {dataset}" + (f" (call {call + 1})" if call else "")


def _read(path: Dump) -> dict[Key, tuple[int, str, Any, str]]:
    """Order, class, values and dtype of every tensor, by module, kind, dataset and the number of the call."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no dump {os.fspath(path)!r}")
    try:
        file = import_h5py().File(path, "r")
    except OSError as error:
        raise ValueError(f"{os.fspath(path)!r} is no HDF5 file: {error}") from error
    calls: dict[tuple[str, str, str], int] = {}
    found = {}
    with file:
        for order, (group, dataset, values) in enumerate(_tensors(file)):
            module, kind = group.attrs.get("module", ""), group.attrs.get("kind", dataset)
            call = calls[module, kind, dataset] = calls.get((module, kind, dataset), -1) + 1
            scaled = values[()] / group.attrs["loss_scale"] if "loss_scale" in group.attrs else values[()]
            layer = group.name.partition("_")[2]
            found[module, kind, dataset, call] = order, layer, scaled, values.attrs.get("dtype", str(values.dtype))
    return found


def _tensors(file: Any) -> Iterator[tuple[Any, str, Any]]:
    for group in sorted(file.values(), key=lambda group: int(group.name[1:].partition("_")[0])):
        yield from ((group, dataset, values) for dataset, values in group.items())


def _joined(parts: list[Any], kind: str) -> Any:
    """What one process would have: outputs one below the other, gradients of the mean loss."""
    import numpy

    if kind == "parameter":
        return sum(part.astype(numpy.float64) for part in parts) / len(parts)
    if not parts[0].ndim:  # a mean over each part of the batch
        return sum(parts) / len(parts)
    whole = numpy.concatenate(parts)
    return whole / len(parts) if kind == "backward" else whole


def _errors(first: Any, second: Any) -> tuple[float, float, str]:
    """Relative and largest error, and what else is to be said."""
    import numpy

    if first.shape != second.shape:
        return math.inf, math.inf, f"shapes {first.shape} and {second.shape}"
    if not first.size:
        return 0.0, 0.0, ""
    wide = [
        values.astype(numpy.complex128 if values.dtype.kind == "c" else numpy.float64) for values in (first, second)
    ]
    finite = [numpy.isfinite(values) for values in wide]
    if not numpy.array_equal(finite[0], finite[1]):
        counts = " and ".join(str(int((~each).sum())) for each in finite)
        return math.inf, math.inf, f"{counts} values are not finite"
    one, other = (values[finite[0]] for values in wide)
    size = float(numpy.sqrt(numpy.mean(numpy.abs(one) ** 2))) if one.size else 0.0
    difference = numpy.abs(one - other)
    error = float(numpy.sqrt(numpy.mean(difference**2))) if one.size else 0.0
    relative = error / size if size else (0.0 if not error else math.inf)
    return relative, float(difference.max(initial=0.0)), ""
