"""The facts of `apex doctor` as plain data, and the function that collects them.

`collect` imports PyTorch inside, so that it can also report that PyTorch does not import.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..._installed import TRITON_DISTRIBUTIONS, installed_version
from ..._version import __version__
from .findings import Finding, import_problem, one_line
from .installation import Installation, inspect_installation

if TYPE_CHECKING:
    from ..devices import Device
    from .dispatch import FamilyChoice, SelfCheck
    from .tuned import TunedTable


@dataclass(frozen=True)
class Versions:
    """Versions of apex, Python, PyTorch, Triton, CUDA and HIP; None if absent, with a problem if unusable."""

    apex: str
    python: str
    platform: str
    torch: str | None
    torch_problem: str | None
    triton: str | None
    triton_problem: str | None
    cuda: str | None
    hip: str | None


@dataclass
class Report:
    """All facts. `findings` has a sentence and a severity for each fact that the user should know."""

    versions: Versions
    requested_implementation: str | None
    triton_interpreter: bool
    installation: Installation
    devices: list[Device] = field(default_factory=list)
    no_gpu_reason: str | None = None
    choices: list[FamilyChoice] = field(default_factory=list)
    self_checks: list[SelfCheck] = field(default_factory=list)
    tuned: list[TunedTable] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return any(finding.severity == "broken" for finding in self.findings)


def collect() -> Report:
    """Return all facts. Anything broken becomes a finding, never an exception."""
    from ... import _env

    findings = []
    try:
        requested: str | None = _env.requested_implementation()
    except ValueError as error:
        requested = None
        findings.append(Finding("broken", "APEX_IMPL", one_line(error)))
    torch_problem = import_problem("torch")
    # Without PyTorch, or with an unknown APEX_IMPL, apex.ops does not import either; one finding is enough.
    importable = torch_problem is None and requested is not None
    ops_problem = import_problem("apex.ops") if importable else None
    findings += [
        Finding("broken", name, problem)
        for name, problem in (("torch", torch_problem), ("apex.ops", ops_problem))
        if problem is not None
    ]
    importable = importable and ops_problem is None
    installation, installation_findings = inspect_installation(import_names=importable)
    report = Report(
        versions=_versions(torch_problem, importable),
        requested_implementation=requested,
        triton_interpreter=_env.triton_interpreter_requested(),
        installation=installation,
        findings=[*findings, *installation_findings],
    )
    if torch_problem is None:
        _add_devices(report)
    if importable:
        _add_dispatch(report)
    return report


def _versions(torch_problem: str | None, importable: bool) -> Versions:
    torch_version = installed_version("torch")
    cuda = hip = triton_problem = None
    if torch_problem is None:
        import torch

        torch_version, cuda, hip = torch.__version__, torch.version.cuda, torch.version.hip
    if importable:
        from ...ops import _library

        triton_problem = _library.triton_problem()
    return Versions(
        apex=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=torch_version,
        torch_problem=torch_problem,
        triton=installed_version(*TRITON_DISTRIBUTIONS),
        triton_problem=triton_problem,
        cuda=cuda,
        hip=hip,
    )


def _add_devices(report: Report) -> None:
    from ..devices import list_devices, why_no_gpu

    report.devices = list_devices()
    report.no_gpu_reason = why_no_gpu()
    for device in report.devices:
        if device.problem is not None:
            report.findings.append(Finding("broken", device.device, device.problem))
    if report.versions.triton_problem and any(device.device.startswith("cuda") for device in report.devices):
        report.findings.append(
            Finding("warning", "triton", f"{report.versions.triton_problem}: the GPU runs PyTorch operators instead")
        )


def _add_dispatch(report: Report) -> None:
    from .dispatch import examine

    usable = [device.device for device in report.devices if device.problem is None]
    report.choices, report.self_checks, findings = examine(usable)
    report.findings.extend(findings)
    if report.versions.triton_problem is None:
        from .tuned import examine_tables

        report.tuned, findings = examine_tables([device.name for device in report.devices if device.problem is None])
        report.findings.extend(findings)
