"""Bytes per parameter of optimizers: `apex memory --states`, and the table in the documentation."""

import json
from pathlib import Path

from typer.testing import CliRunner

from apex._cli.app import app
from apex._memory.optimizer_states import state_bytes

DOCUMENT = Path(__file__).parents[2] / "docs" / "optimizers.md"


def test_the_documentation_has_the_table() -> None:
    found = [f"| `{row.optimizer}` | `{row.options}` | {row.state:.2f} | {row.total:.2f} |" for row in state_bytes()]
    lines = DOCUMENT.read_text().splitlines()
    assert [line for line in lines if line in found] == found


def test_the_command_prints_it() -> None:
    result = CliRunner().invoke(app, ["memory", "--states", "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["states"]
    assert rows[0] == {"optimizer": "FusedAdam", "options": "master_weights=True", "state": 12.0, "total": 16.0}
    text = CliRunner().invoke(app, ["memory", "--states"]).stdout
    assert "FusedScheduleFreeAdamW" in text
    refused = CliRunner().invoke(app, ["memory"])
    assert refused.exit_code == 2
