"""The report of `apex doctor`, as tables and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ..console import make_console, make_table, print_json_document, print_table, severity_text

if TYPE_CHECKING:
    from ..devices import Device
    from .dispatch import FamilyChoice
    from .facts import Report
    from .findings import Severity


def print_json(report: Report) -> None:
    """Print the whole report as one JSON document."""
    print_json_document({"status": "broken" if report.broken else "ok", **asdict(report)})


def print_report(report: Report) -> None:
    """Print the report as tables, and a verdict as the last line."""
    console = make_console()
    _print_versions(console, report)
    if report.devices:
        _print_devices(console, report)
    if report.choices:
        _print_choices(console, report.choices)
    if report.self_checks:
        _print_self_checks(console, report)
    if report.tuned:
        _print_tuned(console, report)
    _print_findings(console, report)


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
        facts.append("1 thread" if device.threads == 1 else f"{device.threads} threads")
    return ", ".join(facts)


def _print_choices(console: Console, choices: list[FamilyChoice]) -> None:
    """Print a row for each reason, with the families and dtypes that share it."""
    table = make_table(console, "Implementations", "device", "runs", "because", "what")
    everything = {choice.family: None for choice in choices}
    reasons: dict[tuple[str, str | None, str], dict[str, list[str]]] = {}
    for choice in choices:
        reason = choice.reason.replace(f" {choice.family} ", " it ")  # a refusal names its family
        dtypes = reasons.setdefault((choice.device, choice.implementation, reason), {})
        dtypes.setdefault(choice.family, []).append(choice.dtype)
    for (device, implementation, reason), dtypes in reasons.items():
        families: dict[str, list[str]] = {}  # by their dtypes
        for family, names in dtypes.items():
            families.setdefault(", ".join(names), []).append(family)
        groups = [f"{_families(group, list(everything))}: {names}" for names, group in families.items()]
        runs = Text(implementation or "refuses", style="bold" if implementation else "bold red")
        table.add_row(device, runs, reason, "; ".join(groups))
    print_table(console, table)


def _families(names: list[str], everything: list[str]) -> str:
    """Return a list of families, as "all but ..." if they are most of `everything`."""
    others = [name for name in everything if name not in names]
    if not others:
        return f"all {len(names)} families"
    return f"all but {', '.join(others)}" if len(others) < len(names) else ", ".join(names)


def _print_self_checks(console: Console, report: Report) -> None:
    """Print a row for each device; the findings name the families that are broken."""
    table = make_table(console, "Self-check", "device", "families", "largest error / tolerance", "verdict")
    for device in dict.fromkeys(check.device for check in report.self_checks):
        checks = [check for check in report.self_checks if check.device == device]
        right = [check for check in checks if check.problem is None]
        largest = max(right, key=lambda check: check.error or 0.0, default=None)
        error = "" if largest is None else f"{largest.error:.3g} ({largest.family})"
        verdict = severity_text("ok" if len(right) == len(checks) else "broken")
        table.add_row(device, f"{len(right)} of {len(checks)} right", error, verdict)
    print_table(console, table)


def _print_tuned(console: Console, report: Report) -> None:
    numbers = ("entries", "in use")
    columns = ("table", "GPU", "driver", "triton", *numbers, "why not")
    table = make_table(console, "Tuned launches", *columns, right=numbers)
    for tuned in report.tuned:
        versions = (tuned.gpu, str(tuned.driver), tuned.triton) if tuned.gpu else ("", "", "")
        table.add_row(tuned.path, *versions, str(tuned.entries), str(tuned.in_use), tuned.problem or "")
    print_table(console, table)


def _print_findings(console: Console, report: Report) -> None:
    """Print a row for each message with all of its subjects, and the verdict."""
    groups: dict[tuple[Severity, str], list[str]] = {}
    for finding in report.findings:
        message = finding.message.replace(f" {finding.subject.partition(' on ')[0]} ", " it ")
        groups.setdefault((finding.severity, message), []).append(finding.subject)
    table = make_table(console, "Findings", "verdict", "about", "what")
    for (severity, message), subjects in groups.items():
        about = ", ".join(subjects) if len(subjects) < 4 else f"{subjects[0]} and {len(subjects) - 1} more"
        table.add_row(severity_text(severity), about, message)
    print_table(console, table)
    count = sum(severity == "broken" for severity, _ in groups)
    if count:
        things = "1 thing is" if count == 1 else f"{count} things are"
        console.print(Text(f"{things} broken; see the findings above.", style="bold red"))
    else:
        console.print(Text("Everything works.", style="bold green"))
