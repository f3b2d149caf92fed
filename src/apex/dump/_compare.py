"""Comparison of two dumps: finds where they begin to differ, in the order of execution."""

from __future__ import annotations

import glob
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .dump import import_h5py

# The largest relative error of results that count as equal, by dtype: some roundings, and sums in another order.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 8e-2}
_COARSEST = 0.5  # for dtypes that are coarser still, such as float8

Key = tuple[str, str, str, int]  # module, kind, dataset and number of the call
Dump = str | os.PathLike[str]


@dataclass(frozen=True)
class Difference:
    """A tensor of both dumps: its relative error (by norms), the tolerance for it, and the largest absolute error."""

    order: int
    module: str
    layer: str
    kind: str
    dtypes: tuple[str, str]
    error: float
    largest: float
    note: str
    tolerance: float

    @property
    def exceeds(self) -> bool:
        return not self.error <= self.tolerance


@dataclass(frozen=True)
class Comparison:
    """All tensors that both dumps have, in the order of execution, and the keys of tensors that only one has."""

    rows: list[Difference]
    only_in_first: list[Key]
    only_in_second: list[Key]

    @property
    def first(self) -> Difference | None:
        """Return the first tensor, by execution, that differs beyond its tolerance, or None."""
        return next((row for row in self.rows if row.exceeds), None)


def compare(first: Dump, second: Dump | Sequence[Dump], *, tolerance: float | None = None) -> Comparison:
    """Compare the dump `second` with `first`, module for module.

    `second` may be the dumps of several processes, as a list or a pattern such as "O2-*-rank_dump.hdf5". These must
    have had equal parts of the batch and a loss that is a mean: outputs are concatenated, gradients averaged. Without a
    `tolerance`, the allowed error follows from the coarsest dtype that either dump has had so far.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, got {tolerance}")
    if isinstance(second, (str, os.PathLike)):  # a file's name may look like a pattern
        second = [second] if os.path.exists(second) else sorted(glob.glob(os.fspath(second))) or [second]
    if not second:
        raise ValueError("second is an empty list; give a dump, a list of dumps or a pattern")
    expected, parts = _read(first), [_read(file) for file in second]
    # Records that every process has.
    common = {key: value for key, value in parts[0].items() if all(key in part for part in parts)}
    rows, allowed = [], 0.0
    for key, (order, layer, values, dtype) in expected.items():
        if key in common:
            module, kind, *_ = key
            dtypes = (dtype, common[key][3])
            allowed = max(allowed, *(TOLERANCES.get(name, _COARSEST if "float" in name else 0.0) for name in dtypes))
            errors = _errors(values, *_joined([part[key][2] for part in parts], kind))
            limit = allowed if tolerance is None else tolerance
            rows.append(Difference(order, module, layer, kind, dtypes, *errors, limit))
    if not rows:
        raise ValueError(f"{os.fspath(first)} and {os.fspath(second[0])} have no module in common: other models?")
    return Comparison(rows, [k for k in expected if k not in common], [k for k in common if k not in expected])


def _read(path: Dump) -> dict[Key, tuple[int, str, Any, str]]:
    """Return order, class, values and dtype of every tensor, by module, kind, dataset and the number of the call."""
    if os.path.isdir(path):
        raise ValueError(f"{os.fspath(path)!r} is a folder, not a dump")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no dump {os.fspath(path)!r}")
    try:
        file = import_h5py().File(path, "r")
    except OSError as error:
        raise ValueError(f"{os.fspath(path)!r} is no HDF5 file: {error}") from error
    records: dict[Key, tuple[int, str, Any, str]] = {}
    calls: Counter[tuple[str, str, str]] = Counter()
    with file:
        for group in sorted(_members(file), key=lambda group: _number(path, group)):
            layer, attributes = group.name.partition("_")[2], group.attrs
            for stored in _members(group):
                dataset, values = stored.name.rpartition("/")[2], _values(path, stored)
                kind = attributes.get("kind", "backward" if dataset.startswith("grad") else "forward")
                name = (attributes.get("module", layer), kind, dataset)  # Ascend's files only name classes
                scale, dtype = attributes.get("loss_scale", 1.0), stored.attrs.get("dtype", str(stored.dtype))
                key = (*name, calls[name])
                records[key] = len(records), layer, values if scale == 1 else values / scale, dtype
                calls[name] += 1
    return records


def _members(group: Any) -> list[Any]:
    """Return the members of an HDF5 group; raise ValueError for links and for data in other files."""
    h5py, members = import_h5py(), []
    for name in group:
        is_own = isinstance(group.get(name, getlink=True), h5py.HardLink)
        member = group[name] if is_own else None
        if not is_own or (isinstance(member, h5py.Dataset) and (member.external or member.is_virtual)):
            place = f"{group.name.rstrip('/')}/{name}"
            raise ValueError(f"{place!r} of {group.file.filename!r} points to data elsewhere, which a dump never does")
        members.append(member)
    return members


def _number(path: Dump, group: Any) -> int:
    """Return the running number in the name of a record; raise ValueError if another program wrote the group."""
    number = group.name[1:].partition("_")[0]
    if isinstance(group, import_h5py().Group) and number.isdecimal():
        return int(number)
    raise ValueError(f"{os.fspath(path)!r} is no dump of apex.dump: {group.name!r} in it is no record")


def _values(path: Dump, stored: Any) -> Tensor:
    """Return a dataset as a tensor; raise ValueError if it is no dataset of numbers."""
    if isinstance(stored, import_h5py().Dataset) and stored.dtype.kind in "fciub":
        return torch.from_numpy(stored[...])
    raise ValueError(f"{os.fspath(path)!r} is no dump of apex.dump: {stored.name!r} in it is no tensor")


def _joined(parts: list[Tensor], kind: str) -> tuple[Tensor | None, str]:
    """Return the tensor that one process would have: concatenated outputs, or gradients of the mean loss.

    Returns None and the shapes, in words, if the processes' tensors do not fit together.
    """
    if len(parts) == 1:
        return parts[0], ""
    is_sum = kind == "parameter" or not parts[0].ndim  # a number is a mean over each process's part of the batch
    if len({part.shape if is_sum else part.shape[1:] or part.ndim for part in parts}) > 1:
        return None, f"shapes {', '.join(str(tuple(part.shape)) for part in parts)} of the processes"
    if is_sum:
        return torch.stack(parts).sum(0) / len(parts), ""
    return torch.cat(parts) / (len(parts) if kind == "backward" else 1), ""


def _errors(first: Tensor, second: Tensor | None, note: str) -> tuple[float, float, str]:
    """Return the relative error, the largest error, and a note."""
    if second is None:
        return math.inf, math.inf, note
    if first.shape != second.shape:
        return math.inf, math.inf, f"shapes {tuple(first.shape)} and {tuple(second.shape)}"
    wide = [values.to(torch.promote_types(values.dtype, torch.float64)) for values in (first, second)]
    finite = [values.isfinite() for values in wide]
    if not torch.equal(*finite):
        counts = " and ".join(str(int((~each).sum())) for each in finite)
        return math.inf, math.inf, f"{counts} values are not finite"
    rest, others = (values[~finite[0]] for values in wide)
    if not ((rest == others) | (rest.isnan() & others.isnan())).all():
        return math.inf, math.inf, "NaN and infinities are not the same"
    one, other = (values[finite[0]] for values in wide)
    gap = one - other
    size, error = float(one.norm()), float(gap.norm())
    largest = float(gap.abs().max()) if gap.numel() else 0.0
    return error / size if size else math.inf if error else 0.0, largest, ""
