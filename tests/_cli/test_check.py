"""`apex check` is `apex doctor`."""

from __future__ import annotations

from typer.testing import CliRunner

from apex._cli.app import app


def test_check_is_doctor() -> None:
    commands = {command.name or command.callback.__name__: command.callback for command in app.registered_commands}
    assert commands["check"] is commands["doctor"]
    helps = [CliRunner().invoke(app, [name, "--help"]).stdout for name in ("check", "doctor")]
    assert all("--json" in text for text in helps)
