"""What a random call is held against: its definition in float64, clear errors, and nothing changed if refused."""

from __future__ import annotations

import contextlib
import linecache
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apex.ops._tolerance import excess
from tests.support.drawn import st

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.float32, torch.int64, torch.int32)
DEVICES = ("cpu", "cpu", "cpu", "meta", *(("cuda", "cuda") if torch.cuda.is_available() else ()))
# PyTorch's operators, which serve small tensors and CPUs, round half precision between their steps.
HALF_STEPS = {torch.float16: 2**-6, torch.bfloat16: 2**-3}  # 32 times their precision


class Case(NamedTuple):
    """Where and in which dtype a call runs, and PyTorch's defaults at that time."""

    dtype: torch.dtype
    device: str
    default_dtype: torch.dtype
    seed: int


@dataclass
class Trial:
    """A call, what it should give (None: not looked at), and the tensors that it must not change."""

    case: Case
    call: Callable[[], Sequence[Tensor | None]]
    exact: Callable[[], Sequence[Tensor | None]] | None
    kept: Callable[[], Sequence[Tensor]]
    valid: bool = True
    reduction: int = 1
    slack: float = 0.0
    finite: bool = True
    kept_if_refused: Callable[[], Sequence[Tensor]] = field(default=tuple)


def draw_case(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Case:
    """Also seeds PyTorch, so that what is drawn there belongs to the example."""
    defaults = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    return Case(draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DEVICES)), draw(st.sampled_from(defaults)), seed)


def draw_tensor(draw: Callable[[st.SearchStrategy[Any]], Any], case: Case, shape: Sequence[int]) -> Tensor:
    """Contiguous, every other element of a larger one, with two dimensions swapped in memory, or channels last."""
    layout = draw(st.sampled_from(["contiguous", "contiguous", "strided", "swapped", "channels last", "offset"]))
    sizes = tuple(shape)

    def fresh(*sizes: int) -> Tensor:
        if not case.dtype.is_floating_point:
            return torch.randint(-3, 4, sizes, dtype=case.dtype).to(case.device)
        return torch.randn(sizes, dtype=torch.float64).to(case.device, case.dtype)

    if layout == "strided" and sizes:
        return fresh(*sizes[:-1], 2 * sizes[-1])[..., ::2]
    if layout == "swapped" and len(sizes) > 1:
        return fresh(sizes[1], sizes[0], *sizes[2:]).transpose(0, 1)
    if layout == "channels last" and len(sizes) == 4:
        return fresh(*sizes).to(memory_format=torch.channels_last)
    if layout == "offset":
        return fresh(math.prod(sizes) + 1)[1:].view(sizes)
    return fresh(*sizes)


def layer_trial(
    case: Case,
    function: Callable[..., Tensor],
    truth: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[torch.nn.Parameter] = (),
    *,
    valid: bool = True,
    slack: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Trial:
    """`function` of the inputs, whose `parameters` it knows, and its gradients, against those of `truth` of both."""
    for parameter in parameters:
        if case.device != "meta" and parameter.dim() == 1:  # matrices of such numbers would saturate what follows them
            torch.nn.init.normal_(parameter, 1.0, 0.2)  # a small weight magnifies the rounding of what it divides
    weights: list[Tensor] = []

    def differentiate(run: Callable[..., Tensor], given: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        output = run(*given)
        if not weights:
            weights.append(torch.randn(output.shape, dtype=torch.float64))
        gradients = torch.autograd.grad(output, leaves, weights[0].to(output), allow_unused=True)
        return [output, *(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, leaves, strict=True))]

    def call() -> list[Tensor]:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
        results = differentiate(function, leaves, [*leaves, *parameters])
        wanted = [out_dtype if out_dtype is not None and case.dtype != torch.float64 else None, *leaves, *parameters]
        for result, like in zip(results, wanted, strict=True):
            expected = like.dtype if isinstance(like, Tensor) else like
            assert expected is None or result.dtype == expected, f"a result is {result.dtype}, not {expected}"
        return results

    def exact() -> list[Tensor]:
        given = [torch.zeros_like(t, device="cpu") if t.is_meta else t.detach().cpu() for t in (*inputs, *parameters)]
        leaves = [t.double().requires_grad_() for t in given]
        return differentiate(truth, leaves, leaves)

    return Trial(
        case,
        call,
        exact,
        lambda: [*inputs, *parameters],
        valid=valid and case.dtype.is_floating_point,
        reduction=10 * max(1, *(t.numel() for t in (*inputs, *parameters))),
        slack=slack,
    )


@contextlib.contextmanager
def defaults(case: Case) -> Iterator[None]:
    """PyTorch's default dtype for the time of a call."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(case.default_dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_clear(error: Exception) -> bool:
    """Whether an error was raised on purpose: by a `raise` statement, or by PyTorch for an operator that it lacks."""
    if not isinstance(error, TypeError | ValueError | NotImplementedError | RuntimeError) or not str(error):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    assert last is not None
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno).strip()
    return line.startswith("raise") or isinstance(error, NotImplementedError)


def run_trial(trial: Trial) -> str:
    """Runs and judges a call: "worked" or "refused"; raises AssertionError for what is neither."""
    kept = [t.detach().clone() for t in trial.kept()]
    kept_if_refused = [t.detach().clone() for t in trial.kept_if_refused()]
    try:
        with defaults(trial.case):
            results = trial.call()
    except AssertionError:
        raise
    except Exception as error:
        if not is_clear(error):
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        if trial.valid:
            raise AssertionError(f"refused though it is valid: {error}") from error
        _assert_unchanged([*trial.kept(), *trial.kept_if_refused()], [*kept, *kept_if_refused])
        return "refused"
    _assert_unchanged(trial.kept(), kept)
    if trial.exact is not None and trial.valid:
        for index, (actual, expected) in enumerate(zip(results, trial.exact(), strict=True)):
            _assert_close(trial, index, actual, expected)
    return "worked"


def _assert_unchanged(now: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    assert len(now) == len(before), "there are other tensors than before"
    for index, (tensor, earlier) in enumerate(zip(now, before, strict=True)):
        assert tensor.dtype == earlier.dtype, f"tensor {index} has another dtype than before"
        same = tensor.is_meta or torch.equal(tensor.detach().nan_to_num(7), earlier.nan_to_num(7))
        assert same, f"tensor {index} has changed"


def _assert_close(trial: Trial, index: int, actual: Tensor | None, expected: Tensor | None) -> None:
    assert (actual is None) == (expected is None), f"result {index} is {actual}, not {expected}"
    if actual is None or expected is None:
        return
    assert actual.shape == expected.shape, f"result {index} has shape {list(actual.shape)}, not {list(expected.shape)}"
    if actual.is_meta or not trial.finite:
        return
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    dtype = trial.case.dtype if trial.case.dtype in FLOATS else actual.dtype
    slack = trial.slack + HALF_STEPS.get(dtype, 0.0) * max(1.0, scale)
    error = excess(actual.detach().cpu(), expected.detach(), dtype, reduction=trial.reduction, slack=slack)
    assert error <= 1, f"result {index} is off by {error:.3g} times its tolerance"
