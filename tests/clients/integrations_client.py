"""The checks of `apex.integrations` in tests/integrations, for all packages that are installed."""

import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path

from checks import run

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["HF_HUB_OFFLINE"] = "1"

PACKAGES = [
    name
    for name in ("transformers", "accelerate", "kernels", "lightning")
    if importlib.util.find_spec(name) is not None
]

for package in PACKAGES:
    module = importlib.import_module(f"tests.integrations.{package}_checks")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    for name, check in vars(module).items():
        if name.startswith("check_"):
            globals()[f"{name}_{package}"] = check

if __name__ == "__main__":
    run(__name__, *PACKAGES)
