"""The rule for rotary embeddings: attention that calls a global function to rotate queries and keys.

Libraries have many such functions. They are known by name and arguments, and trials tell what each one computes: which
channels form a pair, and which entry of a table belongs to a channel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.rope import RopeSpec, rotary_embedding_pair, rotate
from .packed import changed_interface
from .rule import FusionRule, names_used, random_input, with_functions

# Names of transformers' functions that rotate queries and keys.
_FUNCTIONS = (
    *("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb_vision"),
    "apply_rotary_emb",
)
_DIM = "unsqueeze_dim"  # an argument of these functions: 1 if heads come before tokens, 2 if after
# Their first arguments: query, key and tables; query, key and complex tables; one tensor and tables.
_PAIR, _COMPLEX, _ONE = ("q", "k", "cos", "sin"), ("xq", "xk", "freqs_cis"), ("x", "cos", "sin")


def _doubled(table: Tensor) -> Tensor:
    """Return a table for both halves of the channels, made of a table for one half."""
    return torch.cat((table, table), -1)


class _Reading(NamedTuple):
    """How a rotation function reads its tables, and the layout of the two channels of a pair.

    `in_halves` makes a table of cosines or sines that the fused rotation takes. A table of width w has the angles of
    `ratio` * w channels.
    """

    pairs: str
    in_halves: Callable[[Tensor], Tensor]
    ratio: int = 1


_HALF_TABLES = _Reading("neighbours", _doubled, 2)
_READINGS = (
    _Reading("halves", lambda table: table),  # Llama and most others
    _Reading("halves", _doubled, 2),  # GPT-OSS
    _Reading("neighbours", lambda table: _doubled(table.chunk(2, -1)[0])),  # GLM
    _Reading("neighbours", lambda table: torch.cat((table[..., 0::2], table[..., 1::2]), -1)),  # Cohere, GLM-V
    _Reading("neighbours to halves", lambda table: _doubled(table.chunk(2, -1)[0])),  # DeepSeek 3
    _Reading("neighbours to halves", lambda table: table),  # DeepSeek 3 of older releases
)


def rotate_heads(
    tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor, heads_first: bool, pairs: str = "halves"
) -> tuple[Tensor, ...]:
    """Return one or two tensors (batch, heads, tokens, channels), rotated by tables (1 or batch, tokens, width).

    Rotates the first `width` channels; tables are in halves. If not `heads_first`, tensors have the shape (batch,
    tokens, heads, channels).
    """
    if heads_first:
        tensors = tuple(t.transpose(1, 2) for t in tensors)
    tables, shapes = (cos.flatten(0, 1)[:, None, None], sin.flatten(0, 1)[:, None, None]), [t.shape for t in tensors]
    if cos.shape[0] > 1:  # one sequence of all tokens, each with a row of the tables
        tensors = tuple(t.flatten(0, 1)[None] for t in tensors)
    if len(tensors) == 2:
        rotated: Any = rotary_embedding_pair(*tensors, tables, tensor_format="bshd", pairs=pairs)
    else:
        rotated = (rotate(tensors[0], tables, RopeSpec("bshd", pairs=pairs)),)
    rotated = tuple(t.view(shape) for t, shape in zip(rotated, shapes, strict=True))
    return tuple(t.transpose(1, 2) for t in rotated) if heads_first else rotated


def _call_pair(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return function(q, k, cos, sin)


def _call_flat(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Call a function of [tokens, heads, channels], which has no batch dimension, with a batch of 1."""
    return [t.transpose(0, 1)[None] for t in function(*(t[0].transpose(0, 1) for t in (q, k)), cos[0], sin[0])]


def _call_complex(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return function(q, k, torch.complex(cos, sin))


def _call_complex_tokens_first(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return [t.transpose(1, 2) for t in _call_complex(function, q.transpose(1, 2), k.transpose(1, 2), cos, sin)]


def _call_one(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return [function(x, cos, sin) for x in (q, k)]


@functools.cache
def _agrees(function: Callable[..., Any], call: Callable[..., Any], reading: _Reading, width: int) -> bool:
    """Return whether `function` has the results of `rotate_heads`, for tables of `width` and 8 channels.

    Compares outputs and gradients for queries and keys of usual size, large and tiny, for a table that all rows of a
    batch share and for a table per row.
    """
    batch = 1 if call is _call_flat else 2
    for rows, scale in ((1, 1.0), (batch, 1.0), (1, 2.0**10), (1, 2.0**-10)):
        shapes = ((batch, 3, 5, 8), (batch, 1, 5, 8), (rows, 5, width), (rows, 5, width))
        q, k, cos, sin = (random_input(nn.Identity(), *shape) for shape in shapes)
        sin = sin.roll(1, 1)  # numbers that differ from the cosines
        q, k = ((scale * tensor).requires_grad_() for tensor in (q, k))
        results = []
        try:
            with torch.enable_grad():
                tables = reading.in_halves(cos), reading.in_halves(sin)
                fused = rotate_heads((q, k), *tables, True, reading.pairs)
                for rotated in (call(function, q, k, cos, sin), fused):
                    gradients = torch.autograd.grad(rotated, (q, k), (q.detach().cos(), k.detach().cos()))
                    results.append([*rotated, *gradients])
        except Exception:  # a foreign function may raise anything
            return False
        sizes = (scale, scale, 1.0, 1.0)  # magnitudes of the two outputs and the two gradients
        for theirs, expected, size in zip(*results, sizes, strict=True):
            if theirs.shape != expected.shape or not torch.allclose(theirs, expected, atol=1e-6 * size):
                return False
    return True


def _readings(function: Callable[..., Any], call: Callable[..., Any]) -> dict[bool, _Reading]:
    """Return how a function reads tables of all channels (True) and of the first channels (False), if trials agree."""
    readings: dict[bool, _Reading] = {}
    for is_full in (True, False):
        channels = 8 if is_full else 4
        agreeing = (r for r in _READINGS if _agrees(function, call, r, channels // r.ratio))
        reading = next(agreeing, None)
        if reading is not None:
            readings[is_full] = reading
    return readings


def _rotated(
    readings: dict[bool, _Reading], tensors: tuple[Any, ...], cos: Any, sin: Any, heads_first: bool
) -> tuple[Tensor, ...] | None:
    """Return the rotated tensors; None if no reading fits, for example if the tables are for some of the tokens."""
    tokens = 2 if heads_first else 1
    if any(t is None or t.dim() != 4 for t in tensors) or cos.dim() != 3 or cos.shape[0] not in (1, len(tensors[0])):
        return None
    if any(t.shape[tokens] != cos.shape[1] for t in tensors):
        return None
    width, channels = cos.shape[2], tensors[0].shape[3]
    for is_full, reading in readings.items():
        covered = reading.ratio * width
        if covered == channels if is_full else covered < channels:
            return rotate_heads(tensors, reading.in_halves(cos), reading.in_halves(sin), heads_first, reading.pairs)
    return None


def _fused_real(function: Callable[..., Any], count: int) -> Callable[..., Any] | None:
    """Return a fused function of `count` tensors, cosines and sines, or None if `function` computes something else.

    Calls with further arguments, or with tables for only some of the tokens, go to `function`.
    """
    parameters = inspect.signature(function).parameters
    names, extras = tuple(parameters), tuple(parameters)[count + 2 :]
    defaults = {name: parameters[name].default if name in extras else None for name in names}
    readings = _readings(function, _call_pair if count == 2 else _call_one)
    flat = _readings(function, _call_flat) if count == 2 and not extras else {}
    if not readings and not flat:
        return None

    def rotate(*args: Any, **options: Any) -> Any:
        arguments = {**defaults, **dict(zip(names[: len(args)], args[: len(names)], strict=True)), **options}
        values = list(arguments.values())
        tensors, (cos, sin) = tuple(values[:count]), values[count : count + 2]
        dim = arguments.get(_DIM, 1)
        is_usual = len(args) <= len(names) == len(values) and all(
            arguments[name] is None for name in extras if name != _DIM
        )
        rotated = None
        if is_usual and all(isinstance(value, Tensor) for value in (*tensors, cos, sin)):
            if flat and tensors[0].dim() == 3 and cos.dim() == 2:
                rotated = _rotated(flat, tuple(t[None] for t in tensors), cos[None], sin[None], False)
                rotated = rotated and tuple(t[0] for t in rotated)
            elif dim in (1, 2):
                rotated = _rotated(readings, tensors, cos, sin, dim == 1)
        if rotated is None:
            return function(*args, **options)
        return rotated if count == 2 else rotated[0]

    return rotate


def _fused_complex(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a fused function of a query, a key and complex tables, or None if `function` computes something else."""
    calls = {_call_complex: True, _call_complex_tokens_first: False}
    heads_first = next((first for call, first in calls.items() if _agrees(function, call, _HALF_TABLES, 4)), None)
    if heads_first is None:
        return None

    def rotate(*args: Any, **options: Any) -> Any:
        if len(args) == 3 and not options and isinstance(args[2], Tensor) and args[2].is_complex():
            cos, sin = torch.view_as_real(args[2]).unbind(-1)
            rotated = _rotated({True: _HALF_TABLES}, args[:2], cos, sin, heads_first)
            if rotated is not None:
                return rotated
        return function(*args, **options)

    return rotate


def fused_function(function: Any) -> Callable[..., Any] | None:
    """Return the fused counterpart of a library's rotation; None if its arguments or its results are unknown."""
    names = tuple(inspect.signature(function).parameters)
    if names[:4] == _PAIR or names[:3] == _ONE:
        return _fused_real(function, 2 if names[:4] == _PAIR else 1)
    return _fused_complex(function) if names == _COMPLEX else None


def _functions(kind: Any) -> dict[str, Any]:
    """Return the rotating global functions that the forward of a class uses, by name."""
    forward = inspect.unwrap(kind.forward)
    names, known = names_used(forward), getattr(forward, "__globals__", {})
    return {name: known[name] for name in _FUNCTIONS if name in names and callable(known.get(name))}


def _reason(module: Any) -> str:
    functions = _functions(type(module))
    if with_functions(type(module).forward, {}) is None:
        return "its forward is wrapped by a decorator"
    arguments = [tuple(inspect.signature(rotation).parameters) for rotation in functions.values()]
    if not any(names[:4] == _PAIR or names[:3] == _ONE or names == _COMPLEX for names in arguments):
        return f"its {next(iter(functions))} takes other arguments"
    computes = any(fused_function(function) is not None for function in functions.values())
    return "" if computes else f"its {next(iter(functions))} computes something else"


def _forward(original: type) -> Callable[..., Any]:
    """Return the forward of an attention class with fused rotations instead of its global functions."""
    fused = {name: fused_function(function) for name, function in _functions(original).items()}
    method: Any = original.forward  # type: ignore[attr-defined]
    changes = {name: function for name, function in fused.items() if function is not None}
    return with_functions(method, changes | changed_interface(method))


RULES = [FusionRule("rotary embedding", lambda module: bool(_functions(type(module))), _reason, _forward)]
