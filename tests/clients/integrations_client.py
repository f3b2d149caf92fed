"""The checks of `apex.integrations` in tests/integrations, for the packages that are named on the command line."""

import importlib
import sys
from pathlib import Path

from checks import run

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if __name__ == "__main__":
    for package in sys.argv[1:]:
        module = importlib.import_module(f"tests.integrations.{package}_checks")
        checks = {name: check for name, check in vars(module).items() if name.startswith("check_")}
        globals().update({f"{name}_{package}": check for name, check in checks.items()})
    run(__name__, *sys.argv[1:])
