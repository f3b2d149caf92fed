"""The `apex` command; `app` has its subcommands."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the apex command needs {error.name}, which is not installed: pip install typer rich")
    app()
