"""Runs published packages that use apex, unchanged, on this one: `make clients`.

Each client gets an environment of its own, which is thrown away: PyTorch in the version of constraints.txt, this
package, and the newest release of the client that uses apex. Its script, NAME_client.py, calls the client's own code
and says what came out; all of that goes into docs/clients.md.

    python tests/clients/run.py [NAME ...]      some of them only, printed and not written
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PAGE = REPOSITORY / "docs/clients.md"


class Client(NamedTuple):
    """What to install: with its requirements, and without, where these ask for another PyTorch or for torchvision."""

    packages: str = ""
    alone: str = ""


CLIENTS = {
    "transformers": Client("transformers<5 accelerate"),
    "timm": Client("pyyaml huggingface_hub safetensors pillow", "timm"),
    "ignite": Client("pytorch-ignite"),
    "mmengine": Client("mmengine"),
    "opennmt": Client(
        "pyonmttok configargparse pyyaml six requests spacy rapidfuzz sacrebleu pyahocorasick ctranslate2<5 "
        "tensorboard flask waitress fasttext-wheel",
        "OpenNMT-py",
    ),
    "megatron": Client("packaging", "megatron-core"),
}

HEADER = """# Clients

Published packages that use apex, installed as they are and run on this package: `make clients` does it again, in
throw-away environments, and writes this page. It is not part of `make test`.

{versions}. On a CPU; where a client asks for a GPU the notes say what was done.

| client | what was run | outcome |
|---|---|---|
"""

NOTES = """
Notes

- transformers: 4.x, since 5 uses apex no more.
- timm refuses apex's optimizers without a GPU; its question `torch.cuda.is_available()` is answered with yes while it
  makes them. "Without torchvision" says that a stand-in without content took the place of torchvision, of which there
  was no build for this PyTorch: timm imports it, and what was run does not use it.
- mmengine loads its checkpoints on PyTorch 2.6 and later only with `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1`.
- OpenNMT-py asks for an older PyTorch; it was installed beside this one without its requirements, which were installed
  by name.
- megatron-core's functions that put tensors on a GPU by name were not run.
"""


def run_client(name: str, folder: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Versions, and what was run with what outcome."""
    client = CLIENTS[name]
    python = folder / name / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    pip += ["-c", REPOSITORY / "constraints.txt"]
    subprocess.run([*pip, REPOSITORY, "torch", "numpy", *client.packages.split()], check=True)
    if client.alone:
        subprocess.run([*pip, "--no-deps", *client.alone.split()], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, "-W", "ignore", HERE / f"{name}_client.py"]
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith(('{"versions', '{"what'))]
    if process.returncode or len(lines) < 2:
        print(process.stdout, process.stderr, sep="\n", file=sys.stderr)
    if not lines:
        return {}, [{"what": "its script", "outcome": "FAILED: it did not start"}]
    return lines[0]["versions"], lines[1:]


def page(results: dict[str, tuple[dict[str, str], list[dict[str, str]]]]) -> str:
    """docs/clients.md."""
    common: dict[str, str] = {}
    rows = []
    for versions, checks in results.values():
        common = {name: versions.get(name, common.get(name, "")) for name in ("apex", "torch", "Python")}
        packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name not in common)
        rows += [f"| {packages} | {check['what']} | {check['outcome']} |" for check in checks]
    versions = f"apex {common['apex']}, PyTorch {common['torch']}, Python {common['Python']}"
    return HEADER.format(versions=versions) + "\n".join(rows) + "\n" + NOTES


def main(names: list[str]) -> int:
    if unknown := set(names) - set(CLIENTS):
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {}
    for name in names or CLIENTS:
        # One at a time: an environment with PyTorch takes a gigabyte or more.
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run_client(name, Path(folder))
        for check in results[name][1]:
            print(f"{name}: {check['what']}: {check['outcome']}", flush=True)
    if not names:
        PAGE.write_text(page(results))
    return int(any(check["outcome"].startswith("FAILED") for _, checks in results.values() for check in checks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
