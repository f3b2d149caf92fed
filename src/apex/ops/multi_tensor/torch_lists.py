"""Tensor lists on any device: a rule is called tensor by tensor, with PyTorch's operators on float32 copies.

On a CPU PyTorch's fused optimizers replace the rules that they can compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _graph_numbers
from .._graph_numbers import Number, capturing
from .codecs import GROUP, REMAINDERS, STOCHASTIC, Encodings, decode, encode, noise, to_bfloat16
from .flat import flat, laid_out_alike
from .fused import WIDTH
from .rule import GRADIENT, OFF, SLOTS, ZEROS, Rule, Slots

# Elements of a large tensor that a rule processes at once: bounds the temporaries to a few times 16 MB.
SLICE = 1 << 22


class _Piece(NamedTuple):
    """The tensors at one index of every list, or the same slice of each; None for absent lists."""

    index: int  # type: ignore[assignment]
    rows: slice  # rows of the measurements and of `whole`
    start: int  # first element of the slice
    tensors: list[Tensor | None]


class StateSeed(NamedTuple):
    """A seed for codecs that round state stochastically; parameters are rounded to nearest."""

    value: Any


def seed_of(count: Any) -> Any:
    """Return the seed of the step with this count, below 2**24; a tensor if the count is one."""
    return ((count.to(torch.int64) if isinstance(count, Tensor) else count) * 0x9E3779B1) & 0xFFFFFF


class TorchLists:
    """Lists of tensors on one device, one dtype per list; strided in any way.

    `slots` has a list or None for each slot of a rule; `copy` gets a copy of the values written to slot 0. `encodings`
    are codecs of slots, with their companions.
    """

    def __init__(self, slots: Slots, copy: Sequence[Tensor] | None = None, encodings: Encodings | None = None) -> None:
        first = next(tensors for tensors in slots if tensors)
        self.device = first[0].device
        self.sizes = tuple(map(Tensor.numel, first))
        self.row_counts = [self._row_count(tensor) for tensor in first]
        self.results = sum(self.row_counts)
        # Positions of shards in whole tensors (`codecs.NoisePlace`); None if the lists hold whole tensors.
        self.noise_places: Tensor | None = None
        self.point_to(slots, copy, encodings)
        used = [tensors for tensors in (*slots, copy) if tensors]
        self._compute = torch.float64 if any(tensors[0].dtype == torch.float64 for tensors in used) else torch.float32
        # Sums are accumulated in double precision if the device supports it.
        self._sums = torch.float64 if self.device.type in ("cpu", "cuda") else torch.float32

    def point_to(self, slots: Slots, copy: Sequence[Tensor] | None = None, encodings: Encodings | None = None) -> None:
        """Replace the tensors by others of the same sizes and dtypes."""
        self.slots = tuple(slots)
        self.copy = copy
        self._encodings = encodings or {}

    def usable(self) -> bool:
        """Return True: only tables of addresses are bound to a stream."""
        return True

    def _row_count(self, tensor: Tensor) -> int:
        """Return the number of rows of a tensor that a rule measures separately; `whole` has two numbers per row."""
        return 1

    def _by_address(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors have the same dense layout, so that they can be processed as flat vectors."""
        return laid_out_alike(tensors)

    def _pieces(self) -> Iterator[_Piece]:
        row = 0
        for index, (size, count) in enumerate(zip(self.sizes, self.row_counts, strict=True)):
            rows = slice(row, row + count)
            row += count
            if not size:
                continue
            tensors = [members[index] if members else None for members in (*self.slots, self.copy)]
            if not self._by_address([tensor for tensor in tensors if tensor is not None]):
                yield _Piece(index, rows, 0, tensors)
                continue
            tensors = [None if tensor is None else flat(tensor) for tensor in tensors]
            step = SLICE if count == 1 else size
            for start in range(0, size, step):
                yield _Piece(index, rows, start, [None if t is None else t[start : start + step] for t in tensors])

    @torch.no_grad()
    def apply(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        flags: tuple[bool, ...] = (),
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        whole: Tensor | None = None,
        overflow: Tensor | None = None,
        nonfinite_counts: Tensor | None = None,
        checks: tuple[int, ...] = (),
        seed: Any = None,
    ) -> Tensor | None:
        """Run `rule` on all tensors; return its measurements, float32 [tensors, 2 or more], or None without any.

        `hyper` goes to the rule's `scalars`. Nothing is done if `noop` is not 0. `grad_scale` multiplies the gradients;
        `whole` holds the two numbers of each tensor. `overflow` becomes 1 if a slot among `checks` has an infinite or
        NaN element, and `nonfinite_counts`, int32 [tensors, 2], counts such elements of slots 0 and 1. Slot 0 stands
        for the first measurement or, if nothing is measured, for values written to slot 0 that are not finite although
        the values of slots 1 and 2 are. With a `seed`, a number below 2**24, slot 0 is rounded stochastically if it is
        bfloat16 without remainders, and codecs that round stochastically use it.
        """
        measured = torch.zeros(self.results, max(2, rule.quantities), dtype=self._sums, device=self.device)
        skip = None
        if noop is not None:
            if self.device.type != "cpu" or capturing():
                skip = noop.reshape(()) != 0  # on the device, without waiting
            elif noop.item() != 0:
                return measured.to(torch.float32) if rule.quantities else None
        scalars = tuple(map(self._number, hyper.values() if rule.scalars is None else rule.scalars(**hyper)))
        scalars, flags = (*scalars, *ZEROS[len(scalars) :]), (*flags, *OFF[len(flags) :])
        rounds = seed is not None and not isinstance(seed, StateSeed)
        if isinstance(seed, StateSeed):
            seed = seed.value
        if isinstance(seed, Tensor):
            seed = seed.to(self.device, torch.int64)
        may_fuse = whole is None and overflow is None and seed is None and self._calls_fused()
        if may_fuse and self._apply_fused_lists(rule, scalars, flags, grad_scale):
            return None
        for piece in self._pieces():
            values: list[Any] = [self._read(piece, slot) if slot in rule.reads else 0.0 for slot in range(SLOTS)]
            if overflow is not None:
                for slot in checks:
                    if slot:
                        _flag_nonfinite(values[slot], overflow, nonfinite_counts if slot == 1 else None, piece.index)
                if 0 in checks and not rule.quantities:
                    finite = torch.isfinite(values[1]) & torch.isfinite(values[2])
            if grad_scale is not None:
                values[1] = values[1] * grad_scale.to(self._compute)
            results: Any = self._fused(rule, values, scalars, flags) if may_fuse else None
            if results is None:
                numbers = (0.0, 0.0) if whole is None else whole[piece.rows].to(self._compute).split(1, 1)
                results = rule.function(tuple(values), numbers, scalars, flags)
            if rule.quantities:
                results, terms = results
                for column, term in zip(measured[piece.rows].unbind(1), terms[: rule.quantities], strict=False):
                    column.copy_(
                        torch.maximum(column, term.amax(1)) if rule.maximum else column + term.sum(1, dtype=self._sums)
                    )
            elif overflow is not None and 0 in checks:
                assert piece.tensors[0] is not None
                written = results[0].to(piece.tensors[0].dtype).to(torch.float32)
                _flag_nonfinite(torch.where(finite, written, 0.0), overflow, nonfinite_counts, piece.index)
            for slot in rule.writes:
                value = results[slot]
                if slot in self._encodings:
                    self._write_encoded(piece, slot, value, seed, skip)
                    continue
                if slot == 0 and rounds:
                    value = to_bfloat16(value.to(torch.float32), self._noise(value, piece, seed, 0))
                for tensor in (piece.tensors[slot], piece.tensors[SLOTS] if slot == 0 else None):
                    if (
                        tensor is not None and tensor.data_ptr() != value.data_ptr()
                    ):  # otherwise it was computed in place
                        value = value.reshape(tensor.shape)
                        tensor.copy_(value if skip is None else torch.where(skip, tensor, value.to(tensor.dtype)))
        if not rule.quantities:
            return None
        measured = measured.to(torch.float32)
        if overflow is not None and 0 in checks:
            _flag_nonfinite(measured[:, 0], overflow, None, 0)
        return measured

    def _calls_fused(self) -> bool:
        """Return whether PyTorch's fused functions may be called: not in a captured step, whose numbers are tensors."""
        return self.device.type == "cpu" and _graph_numbers.current is None

    def _fused(self, rule: Rule, values: list[Any], scalars: Any, flags: tuple[bool, ...]) -> list[Any] | None:
        """Return the rule's results, computed in place if possible; None if PyTorch has no function for the rule."""
        if rule.fused is None:
            return None
        size = values[GRADIENT].shape[1]
        missing = -size % WIDTH
        pad = torch.nn.functional.pad
        full = lambda value: pad(value, (0, missing)) if missing else value.contiguous().resolve_neg()  # noqa: E731
        vectors = [full(value) if isinstance(value, Tensor) else value for value in values]
        if not rule.fused(vectors, scalars, flags):
            return None
        for slot in rule.writes:  # PyTorch's fused functions omit this; autograd must see the change
            torch.autograd.graph.increment_version(vectors[slot])
        return [value[:, :size] if isinstance(value, Tensor) else value for value in vectors]

    def _apply_fused_lists(self, rule: Rule, scalars: Any, flags: tuple[bool, ...], grad_scale: Tensor | None) -> bool:
        """Run the rule by one call of a fused function of PyTorch for all tensors; return False if there is none."""
        if rule.fused_lists is None:
            return False
        slots = [tensors if slot in rule.slots else None for slot, tensors in enumerate(self.slots)]
        used = [tensors for slot, tensors in enumerate(slots) if tensors and slot != GRADIENT]
        gradients = slots[GRADIENT]
        assert gradients is not None
        if not all(tensor.dtype == self._compute for tensors in used for tensor in tensors):
            return False
        if not all(map(laid_out_alike, zip(gradients, *used, strict=True))):
            return False
        if gradients[0].dtype != self._compute:
            gradients = [gradient.to(self._compute) for gradient in gradients]
        if any(map(Tensor.is_neg, gradients)):
            gradients = [gradient.resolve_neg() for gradient in gradients]
        if grad_scale is not None:
            gradients = torch._foreach_mul(list(gradients), grad_scale.reshape(()).to(self._compute))
        slots[GRADIENT] = gradients
        if not rule.fused_lists(slots, scalars, flags):
            return False
        for slot in rule.writes:
            tensors = slots[slot]
            assert tensors is not None
            torch.autograd.graph.increment_version(tensors)  # see `_fused`
        if self.copy is not None:
            assert slots[0] is not None
            torch._foreach_copy_(list(self.copy), list(slots[0]))
        return True

    def _number(self, value: Any) -> Any:
        if isinstance(value, Number):
            return value.on(self.device).to(self._compute)
        if self.device.type == "cpu" and not capturing():
            return float(value)
        return value.to(self._compute) if isinstance(value, Tensor) else value

    def _read(self, piece: _Piece, slot: int) -> Tensor:
        """Return the elements of one slot, [rows, elements of each], in the dtype of the computation."""
        tensor = piece.tensors[slot]
        assert tensor is not None
        if slot in self._encodings:
            tensor = decode(self._encodings[slot].codec, tensor.reshape(-1), self._companions(piece, slot))
        return tensor.reshape(piece.rows.stop - piece.rows.start, -1).to(self._compute)

    def _companions(self, piece: _Piece, slot: int) -> Tensor | None:
        """Return the scales or remainders of a piece's elements as a vector; None if the codec has none."""
        codec, companions = self._encodings[slot]
        if companions is None:
            return None
        first = piece.start if codec in REMAINDERS else piece.start // GROUP
        return flat(companions[piece.index])[first:][: piece.tensors[slot].numel()]  # type: ignore[union-attr]

    def _write_encoded(self, piece: _Piece, slot: int, value: Tensor, seed: Any, skip: Tensor | None) -> None:
        """Encode the values of a slot and store codes and companions, unless `skip` is set."""
        codec, stored = self._encodings[slot].codec, piece.tensors[slot]
        assert stored is not None
        bits = self._noise(value, piece, seed, slot).reshape(-1) if codec in STOCHASTIC and seed is not None else None
        codes, companions = encode(codec, value.reshape(-1), bits)
        pairs = [(stored, codes.view(stored.shape))]
        if companions is not None:
            stored_companions = self._companions(piece, slot)
            assert stored_companions is not None
            pairs.append((stored_companions[: companions.numel()], companions))
        for target, source in pairs:
            if skip is None:
                target.copy_(source)
            else:  # by bytes, because `where` does not take every dtype
                bytes_of = [tensor.contiguous().view(torch.uint8) for tensor in (target, source)]
                target.copy_(torch.where(skip, bytes_of[0], bytes_of[1]).view(target.dtype))

    def _noise(self, value: Tensor, piece: _Piece, seed: Any, slot: int) -> Tensor:
        """Return 16 bits of noise for each element of a piece, [rows, elements of each]."""
        end = piece.start + value.shape[1]
        index = torch.arange(piece.start, end, dtype=torch.int64, device=value.device)
        row = torch.arange(piece.rows.start, piece.rows.stop, dtype=torch.int64, device=value.device).unsqueeze(1)
        if self.noise_places is not None:
            row, start, run, stride = self.noise_places[piece.rows].to(value.device).split(1, 1)
            index = start + torch.div(index, run, rounding_mode="floor") * stride + index % run
        return noise(seed, row, index, slot)

    @torch.no_grad()
    def total(self, per_tensor: Tensor, rule: Rule, *, root: bool = False) -> Tensor:
        """Return the sum (or maximum) of a rule's first quantity over all tensors, float32 [1]; its root if `root`."""
        values = per_tensor[:, 0]
        if not values.numel():
            return torch.zeros(1, dtype=torch.float32, device=self.device)
        result = values.amax() if rule.maximum else values.sum(dtype=self._sums)
        return (result.sqrt() if root else result).to(torch.float32).reshape(1)

    def measured_total(self, rule: Rule, hyper: dict[str, Any], *, root: bool = False, **options: Any) -> Tensor:
        """Run a rule that measures one quantity; return its sum (or maximum) over all tensors, float32 [1]."""
        measured = self.apply(rule, hyper, **options)
        assert measured is not None
        return self.total(measured, rule, root=root)

    def measured_clip(
        self, rule: Rule, limit: float, margin: float, *, grad_scale: Tensor | None = None, **noop: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of all gradients and the factor that limits it to `limit`, as `TritonLists.measured_clip`."""
        norm = self.measured_total(rule, {}, root=not rule.maximum, grad_scale=grad_scale, **noop)
        factor = torch.clamp(limit / (norm + margin), max=1.0)
        return norm, factor if grad_scale is None else factor * grad_scale

    def measured_average(
        self,
        rule: Rule,
        averages: Tensor,
        share: float,
        over_shards: Callable[[Tensor], Tensor] | None = None,
        **scaling: Any,
    ) -> None:
        """Move `averages` towards the rule's measurement of each tensor, as `TritonLists.measured_average`."""
        measured = self.apply(rule, {}, **scaling)
        assert measured is not None
        move_averages(averages, measured if over_shards is None else over_shards(measured), share, scaling.get("noop"))


def move_averages(averages: Tensor, measured: Tensor, share: float, noop: Tensor | None) -> None:
    """Move column 0 of `averages` by `share` towards column 0 of `measured`, unless `noop` is set.

    A negative average means that there is none yet; it becomes the measurement.
    """
    now, before = measured[:, 0], averages[:, 0]
    after = torch.where(before < 0, now, before.lerp(now, share))
    before.copy_(after if noop is None else torch.where(noop.reshape(()) != 0, before, after))


def _flag_nonfinite(values: Tensor, overflow: Tensor, nonfinite_counts: Tensor | None, index: int) -> None:
    """Set the flag if a number is not finite, and count such numbers of tensor `index`."""
    bad = ~torch.isfinite(values).all()
    overflow.copy_(torch.maximum(overflow, bad.to(overflow.dtype)))
    if nonfinite_counts is not None:
        nonfinite_counts[index] += torch.stack((values.isinf().sum(), values.isnan().sum()))
