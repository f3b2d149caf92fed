"""Programs: every rule as calls of PyTorch gives what its function gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from apex.ops.multi_tensor import make_lists, rules, torch_lists
from apex.ops.multi_tensor.programs import Program, elements_of, pattern_of
from apex.ops.multi_tensor.rule import FLAG_COUNT, SCALARS, SLOTS, Rule
from apex.ops.multi_tensor.tracing import FULL, SMALL
from tests.harness import assert_close

ALL_RULES = sorted((rule for rule in vars(rules).values() if isinstance(rule, Rule)), key=lambda rule: rule.name)
ALL_FLAGS = list(itertools.product((False, True), repeat=FLAG_COUNT))
NUMBERS = [0.3, 0.7, 0.9, 0.2, 0.05, 0.4, 1.1, 0.6]


def inputs(rule: Rule, whole_kind: int | None) -> tuple[list, tuple]:
    """Values and numbers of the whole tensor, float64, between 0.5 and 1.5."""
    torch.manual_seed(0)
    values = [torch.rand(6, dtype=torch.float64) + 0.5 if slot in rule.reads else 0.0 for slot in range(SLOTS)]
    if whole_kind is None:
        return values, (0.0, 0.0)
    shape = (6,) if whole_kind == FULL else ()
    return values, tuple(torch.rand(shape, dtype=torch.float64) + 0.5 for _ in range(2))


def expected_results(
    rule: Rule, flags: tuple[bool, ...], whole_kind: int | None, scalars: list[float]
) -> tuple[dict[int, Tensor], list[Tensor]] | None:
    """What the function gives; None where the rule does not exist with these flags and numbers."""
    values, whole = inputs(rule, whole_kind)
    try:
        results = rule.function(tuple(values), whole, tuple(scalars), flags)
    except (TypeError, ZeroDivisionError):  # a slot or a number that this variant does not have
        return None
    results, terms = results if rule.quantities else (results, ())
    written = {slot: results[slot] for slot in rule.writes}
    found = [*written.values(), *terms[: rule.quantities]]
    if not all(isinstance(value, Tensor) and value.isfinite().all() for value in found):
        return None
    return written, list(terms[: rule.quantities])


def compare(rule: Rule, flags: tuple[bool, ...], whole_kind: int | None, scalars: list[float]) -> bool:
    """Compares program and function; says whether there was something to compare."""
    expected = expected_results(rule, flags, whole_kind, scalars)
    if expected is None:
        return False
    written, terms = expected
    program = Program(rule, flags, whole_kind, pattern_of(scalars))
    registers = program.registers(scalars)
    values, whole = inputs(rule, whole_kind)
    before, _ = inputs(rule, whole_kind)
    found, measured = program.run(values, whole, registers)
    for slot, value in written.items():
        torch.testing.assert_close(found[slot], value)
    for term, value in zip(measured, terms, strict=True):
        torch.testing.assert_close(elements_of(term), value)
    for slot in set(rule.reads) - set(rule.writes):
        assert torch.equal(values[slot], before[slot]), f"slot {slot} is only read"
    if program.takes_lists:
        lists = [[value.clone(), value[:2].clone()] if isinstance(value, Tensor) else None for value in before]
        program.run_lists(lists, registers)
        for slot, value in written.items():
            torch.testing.assert_close(lists[slot], [value, value[:2]])
    return True


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.name)
def test_programs_compute_what_functions_compute(rule: Rule) -> None:
    variants = itertools.product(ALL_FLAGS, (None, SMALL, FULL))
    assert sum(compare(rule, flags, whole_kind, NUMBERS) for flags, whole_kind in variants)


def uses(rule: Rule, flags: tuple[bool, ...], position: int) -> bool:
    """Whether the rule asks for this number: what it computes is neither defined nor finite with a stand-in."""
    return expected_results(rule, flags, FULL, [*NUMBERS[:position], Ellipsis, *NUMBERS[position + 1 :]]) is None


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("number", [0.0, 1.0])
def test_zero_and_one_leave_calls_out_but_change_nothing(rule: Rule, number: float) -> None:
    for flags in ((False,) * FLAG_COUNT, (True,) * FLAG_COUNT):
        for position in range(SCALARS):
            if uses(rule, flags, position):
                compare(rule, flags, FULL, [number if i == position else value for i, value in enumerate(NUMBERS)])


def test_what_is_only_scaled_keeps_its_nan() -> None:
    outputs, inputs = [torch.zeros(3)], [torch.tensor([1.0, torch.inf, torch.nan])]
    make_lists([outputs, inputs, None, None, None]).apply(rules.SCALE, {"factor": 0.0})
    assert outputs[0].isnan().tolist() == [False, True, True]


def test_a_decay_of_zero_is_no_pass() -> None:
    pattern = (None, None, None, None, None, 0.0, None, None)
    with_decay = Program(rules.ADAM, (False, False, False), None, (None,) * SCALARS)
    without = Program(rules.ADAM, (False, False, False), None, pattern)
    assert len(without._calls) == len(with_decay._calls) - 1


@pytest.mark.parametrize("rule", [rules.ADADELTA, rules.RMSPROP])
def test_lists_are_cut_into_batches(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of several batches, of one, and several of a batch."""
    monkeypatch.setattr(torch_lists, "CPU_BATCH", 64)
    sizes = (5, 300, 0, 64, 1, 60)
    hyper = {"lr": 0.1, "eps": 1e-6, "weight_decay": 0.1} | ({"rho": 0.9} if rule is rules.ADADELTA else {"alpha": 0.9})
    slots = [[torch.rand(size) for size in sizes] for _ in range(len(rule.reads))]
    scalars = rule.scalars(**hyper)
    numbers = (*scalars, *[0.0] * (SCALARS - len(scalars)))
    exact = [
        rule.function(
            (*(t.double() for t in tensors), *[0.0] * (SLOTS - len(tensors))), (0.0, 0.0), numbers, (False,) * 3
        )
        for tensors in zip(*slots, strict=True)
    ]
    lists = make_lists([*slots, *[None] * (SLOTS - len(slots))])
    assert lists._run_lists(rule, hyper, ())
    assert len(lists._batches_of(64)) == 8
    for slot in rule.writes:
        for tensor, wanted in zip(slots[slot], exact, strict=True):
            assert_close(tensor, wanted[slot])
