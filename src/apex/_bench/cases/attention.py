"""OpenFold's attention and attention within packed sequences, compared with code around PyTorch's attention."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...contrib.fmha import FMHAFun
from ...contrib.openfold_triton import AttnTri
from ...ops.attention import reference
from ..compiling import compiled
from ..directions import Maker, Random, call, exact, leaves_of, long_name, passes
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register

INF = 1e9
MOVED = {"fwd": 4, "bwd": 8}  # number of tensors of the query's size that each direction reads and writes


@dataclass(frozen=True)
class Openfold:
    """An attention problem of OpenFold: rows of an alignment as batches, a residue mask, a trained pair bias."""

    batch: int
    heads: int
    length: int
    head: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"openfold {long_name(self.dtype)} {self.batch}x{self.heads}x{self.length}x{self.head}"

    @property
    def elements(self) -> int:
        return self.batch * self.heads * self.length * self.head

    @property
    def bias_elements(self) -> int:
        return self.heads * self.length * self.length

    def checked(self) -> Openfold:
        """Return the setting that is checked against the reference: small, in float32."""
        return dataclasses.replace(self, batch=3, length=40, dtype=torch.float32)

    def tensors(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Return query, key, value, bias and mask, and the gradient of the output."""
        random = Random(device)
        normal = functools.partial(random.normal, dtype=self.dtype)
        # Heads come after lengths in memory, as projections produce them.
        shape = self.batch, self.length, self.heads, self.head
        query, key, value, gradient = (normal(*shape).transpose(1, 2) for _ in range(4))
        bias = normal(1, self.heads, self.length, self.length)
        mask = random.uniform(self.batch, 1, 1, self.length) > 0.1
        leaves = [each.requires_grad_() for each in (query, key, value, bias)]
        return [*leaves, mask.to(self.dtype)], gradient

    def implementations(self, device: torch.device, all_peers: bool) -> dict[str, Maker]:
        def by_hand(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, bias + (mask - 1) * INF)

        def eager(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
            logits = query * self.head**-0.5 @ key.transpose(-1, -2) + (mask - 1) * INF + bias
            return torch.softmax(logits, -1) @ value

        makers: dict[str, Maker] = {
            OURS: lambda: lambda query, key, value, bias, mask: AttnTri(query, key, value, mask, bias, INF),
            "sdpa": lambda: by_hand,
            "torch": lambda: eager,
        }
        if all_peers:
            makers["compile"] = lambda: compiled(eager, device)
        return makers

    def exact(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return reference.attention(query, key, value, mask, bias, INF)


@dataclass(frozen=True)
class Packed:
    """A problem of packed sequences, each of `shortest` to `length` rows."""

    sequences: int
    shortest: int
    length: int
    heads: int
    head: int
    dtype: torch.dtype = torch.float16
    dropout: float = 0.0

    def __str__(self) -> str:
        lengths = str(self.length) if self.shortest == self.length else f"{self.shortest}-{self.length}"
        dropout = f" dropout {self.dropout}" if self.dropout else ""
        return f"fmha {long_name(self.dtype)} {self.sequences}x{lengths}x{self.heads}x{self.head}{dropout}"

    @functools.cached_property
    def lengths(self) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.shortest, self.length + 1, (self.sequences,), generator=generator).tolist()

    @property
    def elements(self) -> int:
        return sum(self.lengths) * self.heads * self.head

    bias_elements = 0

    def checked(self) -> Packed:
        """Return the setting that is checked: small, in float32, without dropout, which differs between peers."""
        even = self.shortest == self.length
        return dataclasses.replace(
            self, sequences=3, shortest=40 if even else 9, length=40, dtype=torch.float32, dropout=0.0
        )

    def tensors(self, device: torch.device) -> tuple[list[Tensor], Tensor]:
        rows, normal = sum(self.lengths), functools.partial(Random(device).normal, dtype=self.dtype)
        bounds = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        qkv = normal(rows, 3, self.heads, self.head).requires_grad_()
        return [qkv, bounds], normal(rows, self.heads, self.head)

    def implementations(self, device: torch.device, all_peers: bool) -> dict[str, Maker]:
        def ours(qkv: Tensor, bounds: Tensor) -> Tensor:
            return FMHAFun.apply(qkv, bounds, self.dropout, self.length, True, False)

        makers: dict[str, Maker] = {OURS: lambda: ours, "sdpa": lambda: self._by_hand(device)}
        known = importlib.util.find_spec("torch.nn.attention.varlen") is not None
        # PyTorch's varlen attention supports neither dropout nor float32.
        if all_peers and known and not self.dropout and self.dtype != torch.float32:
            makers["varlen"] = lambda: self._varlen
        return makers

    def _by_hand(self, device: torch.device) -> Callable[..., Tensor]:
        """Return attention by padding to the greatest length with a mask; without padding if all lengths are equal."""
        lengths = torch.tensor(self.lengths, device=device)
        inside = torch.arange(self.length, device=device) < lengths[:, None]
        mask = None if self.shortest == self.length else inside[:, None, None, :]

        def attend(qkv: Tensor, bounds: Tensor) -> Tensor:
            if mask is None:
                padded = qkv.view(self.sequences, self.length, *qkv.shape[1:])
            else:
                padded = qkv.new_zeros(self.sequences, self.length, *qkv.shape[1:]).masked_scatter(
                    inside[:, :, None, None, None], qkv
                )
            query, key, value = padded.permute(2, 0, 3, 1, 4)
            output = F.scaled_dot_product_attention(query, key, value, mask, self.dropout).transpose(1, 2)
            return output.flatten(0, 1) if mask is None else output[inside]

        return attend

    def _varlen(self, qkv: Tensor, bounds: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # type: ignore[import-not-found, unused-ignore]

        query, key, value = qkv.unbind(1)
        output = varlen_attn(query, key, value, bounds, bounds, self.length, self.length)
        assert isinstance(output, Tensor)
        return output

    def exact(self, qkv: Tensor, bounds: Tensor) -> Tensor:
        return reference.packed_attention(qkv, bounds.long())


Setting = Openfold | Packed

GPU_SETTINGS: tuple[Setting, ...] = (
    Openfold(256, 4, 256, 32),
    Openfold(128, 8, 256, 32),
    Openfold(256, 8, 128, 32),
    Openfold(512, 4, 384, 32),
    Openfold(128, 8, 384, 16),
    Openfold(256, 4, 256, 32, torch.float32),
    Packed(56, 512, 512, 16, 64),
    Packed(56, 64, 512, 16, 64),
    Packed(56, 512, 512, 16, 64, dropout=0.1),
    Packed(56, 64, 512, 16, 64, torch.bfloat16, dropout=0.1),
    Packed(32, 128, 128, 16, 64),
    Packed(16, 512, 512, 16, 128),
    Packed(16, 512, 512, 16, 64, torch.float32),
)
CPU_SETTINGS: tuple[Setting, ...] = (
    Openfold(16, 4, 128, 32, torch.float32),
    Packed(8, 128, 128, 4, 64, torch.float32),
    Packed(8, 16, 128, 4, 64, torch.float32),
)


def _call(make: Maker, setting: Setting, direction: str, device: torch.device) -> Call:
    inputs, gradient = setting.tensors(device)
    return call(make, inputs, leaves_of(inputs), gradient, direction)


def _expected(setting: Setting, direction: str, device: torch.device) -> list[Expected]:
    inputs, gradient = setting.tensors(device)
    terms = [setting.length] * (1 + len(leaves_of(inputs)))
    return exact(setting.exact, inputs, gradient, direction, setting.dtype, terms)


def _prepare(setting: Setting, direction: str, device: torch.device) -> Prepared:
    small = setting.checked()
    on_gpu = device.type == "cuda"
    checked = small.implementations(device, False)
    timed = setting.implementations(device, on_gpu)
    checked.update({name: maker for name, maker in timed.items() if name not in checked})
    # A peer that accepts only half precision is checked in half precision, on rounded inputs.
    half = dataclasses.replace(small, dtype=setting.dtype)
    others = {name: half for name in checked if name == "varlen"}

    return Prepared(
        {
            name: functools.partial(_call, maker, others.get(name, small), direction, device)
            for name, maker in checked.items()
        },
        _expected(small, direction, device),
        {name: functools.partial(_call, maker, setting, direction, device) for name, maker in timed.items()},
        {name: _expected(other, direction, device) for name, other in others.items()},
    )


def _case(setting: Setting, direction: str) -> Case:
    moved = MOVED[direction] * setting.elements + (2 if direction == "bwd" else 1) * setting.bias_elements
    note = "checked in float32, without dropout" if isinstance(setting, Packed) and setting.dropout else None
    return passes(str(setting), {direction: moved * setting.dtype.itemsize}, _prepare, setting, note=note)[0]


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return cases of both directions; a CPU gets smaller shapes."""
    settings = GPU_SETTINGS if device.type == "cuda" else CPU_SETTINGS
    if quick:
        settings = (settings[0], next(setting for setting in settings if isinstance(setting, Packed)))
    return [_case(setting, direction) for setting in settings for direction in ("fwd", "bwd")]


register(Family("attention", "OpenFold's attention and attention within packed sequences", cases))
