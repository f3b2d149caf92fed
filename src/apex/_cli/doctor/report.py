"""The report of `apex doctor`, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..console import make_console, make_table, print_json_document, print_table, severity_text

if TYPE_CHECKING:
    from ..devices import Device
    from .dispatch import FamilyChoice
    from .facts import Report


def print_json(report: Report) -> None:
    """The whole report as one JSON document."""
    print_json_document({"status": "broken" if report.broken else "ok", **asdict(report)})


def print_report(report: Report) -> None:
    """The report as tables, and a verdict as the last line."""
    console = make_console()
    _print_versions(console, report)
    if report.devices:
        _print_devices(console, report)
    if report.choices:
        _print_choices(console, report.choices)
    if report.self_checks:
        _print_self_checks(console, report)
    _print_findings(console, report)
    _print_verdict(console, report)


def _print_versions(console: Console, report: Report) -> None:
    versions = report.versions
    table = make_table(console, "Versions", "what", "version")
    table.add_row("apex", versions.apex)
    table.add_row("python", f"{versions.python} on {versions.platform}")
    table.add_row("torch", _version(versions.torch, versions.torch_problem))
    table.add_row("triton", _version(versions.triton, versions.triton_problem))
    table.add_row("CUDA / HIP", _runtime(report))
    table.add_row("APEX_IMPL", report.requested_implementation or Text("not known", style="bold red"))
    if report.triton_interpreter:
        table.add_row("TRITON_INTERPRET", "on: Triton kernels run in Python, for tests")
    print_table(console, table)


def _version(version: str | None, problem: str | None) -> str | Text:
    if problem is None:
        return version or "not installed"
    return Text(f"{version}, unusable: {problem}" if version else problem, style="yellow")


def _runtime(report: Report) -> str:
    versions = report.versions
    if versions.hip is not None:
        return f"HIP {versions.hip}"
    return f"CUDA {versions.cuda}" if versions.cuda is not None else "none in this PyTorch"


def _print_devices(console: Console, report: Report) -> None:
    table = make_table(console, "Devices", "device", "name", "facts")
    for device in report.devices:
        table.add_row(device.device, device.name, _device_facts(device))
    if report.no_gpu_reason is not None:
        table.add_row("GPU", "none", report.no_gpu_reason)
    print_table(console, table)


def _device_facts(device: Device) -> str:
    if device.problem is not None:
        return device.problem
    facts = []
    if device.memory is not None:
        facts.append(f"{device.memory / 2**30:.1f} GiB")
    if device.multiprocessors is not None:
        facts.append(f"{device.multiprocessors} multiprocessors")
    if device.threads is not None:
        facts.append(f"{device.threads} threads")
    return ", ".join(facts)


def _print_choices(console: Console, choices: list[FamilyChoice]) -> None:
    table = make_table(console, "Implementations", "family", "device", "dtypes", "runs", "because")
    for choice, dtypes in _grouped(choices):
        refused = choice.implementation is None
        runs = Text(choice.implementation or "refuses", style="bold red" if refused else "bold")
        table.add_row(choice.family, choice.device, dtypes, runs, choice.reason)
    print_table(console, table)


def _grouped(choices: list[FamilyChoice]) -> Iterator[tuple[FamilyChoice, str]]:
    """The choices with the dtypes that share one put together."""

    def without_dtype(choice: FamilyChoice) -> tuple[str, str, str | None, str]:
        return choice.family, choice.device, choice.implementation, choice.reason

    for _, same in groupby(choices, without_dtype):
        members = list(same)
        yield members[0], ", ".join(member.dtype for member in members)


def _print_self_checks(console: Console, report: Report) -> None:
    table = make_table(console, "Self-check", "family", "device", "error / tolerance", "verdict")
    for check in report.self_checks:
        error = "" if check.error is None else f"{check.error:.3g}"
        verdict = severity_text("ok" if check.problem is None else "broken")
        table.add_row(check.family, check.device, error, verdict)
    print_table(console, table)


def _print_findings(console: Console, report: Report) -> None:
    table = make_table(console, "Findings", "verdict", "about", "what")
    for finding in report.findings:
        table.add_row(severity_text(finding.severity), finding.subject, finding.message)
    print_table(console, table)


def _print_verdict(console: Console, report: Report) -> None:
    count = sum(finding.severity == "broken" for finding in report.findings)
    if count:
        things = "1 thing is" if count == 1 else f"{count} things are"
        console.print(Text(f"{things} broken; see the findings above.", style="bold red"))
    else:
        console.print(Text("Everything works.", style="bold green"))
