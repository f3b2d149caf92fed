"""The implementation that each op family chooses on each device, and a check of its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...ops import _library, all_families
from ...ops._examples import self_check
from .findings import Finding, Severity, one_line

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class FamilyChoice:
    """A family's choice for one dtype on one device. `implementation` is None if the family refuses to run."""

    family: str
    device: str
    dtype: str
    implementation: str | None
    reason: str


@dataclass(frozen=True)
class SelfCheck:
    """The largest error of a family on a device as a multiple of its tolerance, and the problem if it fails."""

    family: str
    device: str
    error: float | None
    problem: str | None


def examine(devices: list[str]) -> tuple[list[FamilyChoice], list[SelfCheck], list[Finding]]:
    """Return the choices and self-checks of every family on every device, and findings about the failures."""
    choices: list[FamilyChoice] = []
    checks: list[SelfCheck] = []
    findings: list[Finding] = []
    for family in all_families().values():
        for device in devices:
            device_choices = [_choice(family, device, dtype) for dtype in DTYPES]
            choices += device_choices
            if all(choice.implementation is None for choice in device_choices):
                # A CPU that cannot run under APEX_IMPL=triton is no defect if there is a GPU.
                severity: Severity = "broken" if device != "cpu" or devices == ["cpu"] else "warning"
                findings.append(Finding(severity, f"{family.name} on {device}", device_choices[0].reason))
                continue
            check = _self_check(family, device)
            checks.append(check)
            if check.problem is not None:
                findings.append(Finding("broken", f"{family.name} on {device}", check.problem))
    return choices, checks, findings


def _choice(family: _library.OpFamily, device: str, dtype: torch.dtype) -> FamilyChoice:
    implementation: str | None
    try:
        choice = _library.explain(family, torch.device(device), dtype)
        implementation, reason = choice.implementation, choice.reason
    except Exception as error:
        implementation, reason = None, one_line(error)
    return FamilyChoice(family.name, device, str(dtype).removeprefix("torch."), implementation, reason)


def _self_check(family: _library.OpFamily, device: str) -> SelfCheck:
    try:
        error = float(self_check(family, torch.device(device)))
    except Exception as failure:
        problem = f"the self-check failed: {type(failure).__name__}: {one_line(failure)}"
        return SelfCheck(family.name, device, None, problem)
    if error <= 1:
        return SelfCheck(family.name, device, error, None)
    problem = f"wrong numbers: the largest error is {error:.3g} times its tolerance"
    return SelfCheck(family.name, device, error if math.isfinite(error) else None, problem)
