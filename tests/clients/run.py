"""Runs published packages that use apex, unchanged, on this one: `make clients`.

Each client gets an environment of its own, which is thrown away: PyTorch in the version of constraints.txt, this
package, and the newest release of the client that uses apex. Its script, NAME_client.py, calls the client's own code
and says what came out; all of that goes into docs/clients.md. Packages that apex.integrations connects are run in the
oldest and in the newest release that works.

    python tests/clients/run.py [NAME ...]      some of them only, printed and not written
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PAGE = REPOSITORY / "docs/clients.md"
# Packages whose versions stand at the top of the page, once for all clients that run in this interpreter.
COMMON = ("apex", "torch", "Python")


class Client(NamedTuple):
    """Packages to install with their requirements, and `alone` without, if these ask for another PyTorch.

    `python` is the version that a client needs if it is not any, as in "3.10". `script` is the client whose script is
    run if it is not the client's own.
    """

    packages: str = ""
    alone: str = ""
    python: str = ""
    script: str = ""


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
    "colossal": Client(
        "transformers<5 accelerate datasets peft tqdm jsonlines psutil sentencepiece tensorboard pytest einops pyyaml "
        "wandb loralib diffusers<0.36"
    ),
    "nemo": Client(
        "setuptools<81 numpy<1.27 omegaconf<2.4 hydra-core<1.4 torchmetrics<1 lightning-utilities transformers<4.40 "
        "huggingface_hub<0.24 sentencepiece ruamel.yaml wrapt tqdm text-unidecode python-dateutil scikit-learn pandas "
        "h5py einops braceexpand ftfy inflect wget tensorboard onnx attrs psutil matplotlib",
        "nemo_toolkit==1.17.0 pytorch-lightning==1.9.4 webdataset<=0.1.62",
        python="3.10",
    ),
    "trl": Client("trl"),
    "trl_1.12": Client("trl==1.12.* liger-kernel requests", script="trl"),
    "trl_0.19": Client("trl==0.19.* transformers<4.54 rich", script="trl"),
    "integrations": Client("transformers accelerate kernels"),
    "integrations_lightning": Client("lightning", script="integrations"),
    "integrations_oldest": Client(
        "transformers==4.47.0 accelerate==1.0.0 kernels==0.12.1 lightning==2.2.0 setuptools<81",
        script="integrations",
    ),
}

HEADER = """# Clients

Published packages that use apex, or are given its functions, installed as they are and run on this package: `make
clients` does it again, in throw-away environments, and writes this page. It is not part of `make test`.

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
- Colossal-AI 0.5.0: scripts and tests of its repository, not its package. In the scripts the word colossalai is
  replaced by apex and nothing else; around them stand tiny models, random data and, without a GPU, functions of
  torch.cuda that do nothing. Each runs a second time with the Booster replaced by plain PyTorch in float32; the losses
  are compared. `tutorial/glue_bert` gets a stand-in for `datasets.load_metric`, which newer releases do not have;
  `images/dreambooth` runs with diffusers 0.35, the last one that works with transformers 4; `gpt/gemini` has sequences
  of 32 tokens, since those of 1024 take minutes in float16 on a CPU; `opt` runs without oneDNN, whose float16 products
  are slow on ARM. `test_adam_kernel.py` gets a seed: with some random gradients its float16 cases fail with plain
  PyTorch too.
- NeMo: 1.17, which needs Python 3.10 and was installed without its requirements, as OpenNMT-py; stand-ins without
  content took the place of its tokenizers of other languages. Its LightningModule moves batches to a GPU by name, so
  its steps were called one by one; its attention asks for the present GPU, and is told the CPU.
- TRL: each trainer runs with its own losses and within `apex.integrations.trl.enabled()`, and losses and weights are
  compared. TRL 1.12 wants Liger-Kernel installed for fused losses; its loss is not used.
- transformers, accelerate, kernels and lightning, the last rows: the checks of `apex.integrations` in
  tests/integrations, with the oldest releases that work and the newest ones.
"""


def find_python(version: str) -> str | None:
    """Return the interpreter of a version as in "3.10", from the PATH or from pyenv; this one if the version is ""."""
    if not version:
        return sys.executable
    places = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for place in places:
        # A name on the PATH may belong to a pyenv that does not offer this version here.
        if place and not subprocess.call([place, "-c", ""], stderr=subprocess.DEVNULL):
            return str(place)
    return None


def run_client(name: str, folder: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the versions of the packages, and what was run with what outcome."""
    client = CLIENTS[name]
    base = find_python(client.python)
    if base is None:
        return {name: ""}, [{"what": "its script", "outcome": f"not run: it needs Python {client.python}"}]
    python = folder / name / "bin/python"
    subprocess.run([base, "-m", "venv", folder / name], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    pip += ["-c", REPOSITORY / "constraints.txt"]
    subprocess.run([*pip, REPOSITORY, "torch", "numpy", *client.packages.split()], check=True)
    if client.alone:
        subprocess.run([*pip, "--no-deps", *client.alone.split()], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python, "-W", "ignore", HERE / f"{client.script or name}_client.py"]
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
    for name, (versions, checks) in results.items():
        if not CLIENTS[name].python:
            common |= {kind: versions[kind] for kind in COMMON if kind in versions}
        packages = ", ".join(f"{kind} {version}" for kind, version in versions.items() if kind not in COMMON)
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
