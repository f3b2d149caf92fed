"""The screen of `apex` without a command: installed versions, the default device, and the commands."""

from __future__ import annotations

import platform
from typing import Any

from rich.text import Text

from .._installed import TRITON_DISTRIBUTIONS, installed_version
from .._version import __version__
from .console import make_console, make_table

EXAMPLES = (
    ("apex doctor", "whether everything works here"),
    ("apex demo --model conv", "what mixed precision does to a small model"),
    ("apex run --nproc-per-node 2 train.py", "train.py in two processes"),
)


def print_welcome(context: Any) -> None:
    """Print the screen for the commands of `context`, sorted by their help panels."""
    console = make_console()
    console.print(
        f"apex {__version__}: mixed precision, fused optimizers, norms and kernels for PyTorch\n", style="bold"
    )
    facts = make_table(console, None, "", "")
    facts.show_header = False
    torch, triton = installed_version("torch"), installed_version(*TRITON_DISTRIBUTIONS)
    with_triton = f"Triton {triton}" if triton else "no Triton"
    facts.add_row("installed", f"Python {platform.python_version()}, PyTorch {torch or 'is missing'}, {with_triton}")
    facts.add_row("runs on", _place(triton is not None))
    console.print(facts)
    panels: dict[str, list[Any]] = {}
    for command in context.command.commands.values():
        if not command.hidden:
            panels.setdefault(getattr(command, "rich_help_panel", None) or "More", []).append(command)
    table = make_table(console, None, "to", "", "")
    for panel, commands in panels.items():
        for command in commands:
            table.add_row(panel, Text(f"apex {command.name}", style="bold"), command.get_short_help_str(100))
            panel = ""
    console.print()
    console.print(table)
    examples = make_table(console, None, "for example", "")
    for line, purpose in EXAMPLES:
        examples.add_row(Text(line, style="bold"), purpose)
    console.print()
    console.print(examples)
    console.print("\n`apex COMMAND --help` shows the options of a command.")


def _place(has_triton: bool) -> str:
    """Return a description of the device that commands and ops use by default."""
    try:
        from .devices import list_devices, why_no_gpu
    except ImportError as error:
        return f"nothing: {error}; `pip install torch`"
    devices, problem = list_devices(), why_no_gpu()
    if problem is not None:
        return f"the CPU ({devices[0].name}), with PyTorch's operators; {problem}"
    how = "fused Triton kernels" if has_triton and devices[1].device.startswith("cuda") else "PyTorch's operators"
    count = f"{len(devices) - 1} x " if len(devices) > 2 else ""
    return f"{count}{devices[1].name}, with {how}"
