"""What `make docs` adds to the pages of docs/: the README as first page, the reference, upstream's names, and results.

mkdocs calls the functions whose names begin with `on_`. Links from docs/ to files of the repository lead to copies of
these files in the site, so that none is broken there.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# The packages of the reference, in the order of its page.
PACKAGES = (
    "apex.amp",
    "apex.optimizers",
    "apex.normalization",
    "apex.graphs",
    "apex.fp8",
    "apex.booster",
    "apex.parallel",
    "apex.checkpoint",
    "apex.contrib.optimizers",
    "apex.contrib.clip_grad",
    "apex.contrib.xentropy",
    "apex.contrib.group_norm",
    "apex.contrib.multihead_attn",
    "apex.contrib.transducer",
    "apex.contrib.sparsity",
    "apex.contrib.bottleneck",
    "apex.transformer.parallel_state",
    "apex.transformer.tensor_parallel",
    "apex.transformer.pipeline_parallel",
    "apex.transformer.functional",
    "apex.fused_dense",
    "apex.mlp",
    "apex.fp16_utils",
    "apex.RNN",
    "apex.dump",
)
UPSTREAMS = {"nvidia": "NVIDIA", "rocm": "ROCm", "ascend": "Ascend", "colossal": "Colossal-AI"}
_LINK = re.compile(r"(?<=\]\()(?:\.\./)+([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: Any) -> Files:
    """The generated pages, and copies of the files of the repository that pages link to."""
    pages = {
        "index.md": _first_page(),
        "reference.md": _reference(),
        "names.md": names_page(json.loads((ROOT / "docs_site" / "names.json").read_text())),
        "assets/results/index.json": json.dumps(result_files()),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for name in result_files():
        files.append(File.generated(config, f"assets/results/{name}", content=(RESULTS / name).read_text()))
    for target in sorted({target for page in files.documentation_pages() for target in _targets(page.content_string)}):
        files.append(File.generated(config, copy_of(target), content=_content(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that lead out of docs/ lead to the copies."""
    return _LINK.sub(lambda link: copy_of(link[1]), markdown)


def copy_of(path: str) -> str:
    """Where the site has a file of the repository, or the list of a folder's files."""
    if (ROOT / path).is_dir():
        return f"files/{path.rstrip('/')}/index.txt"
    return f"files/{path}.txt" if path.endswith((".md", ".py")) else f"files/{path}"


def _targets(text: str) -> set[str]:
    """What of the repository a page links to; what is not there is left for mkdocs to complain about."""
    return {link[1] for link in _LINK.finditer(text) if (ROOT / link[1]).exists()}


def _content(path: Path) -> str | bytes:
    if path.is_dir():
        return "\n".join(sorted(str(file.relative_to(path)) for file in path.rglob("*") if _is_ours(file))) + "\n"
    return path.read_bytes() if path.suffix == ".png" else path.read_text()


def _is_ours(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def result_files() -> list[str]:
    """The records of `apex bench`: other records have other shapes."""
    names = []
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        if isinstance(record.get("cases"), list) and "versions" in record:
            names.append(path.name)
    return names


def _first_page() -> str:
    """The README, whose links into docs/ are links to pages, and those to other files to their copies."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    return (
        re.sub(r"\]\((?!https?:|#|[\w./-]+\.md)([\w./-]+)\)", r"](../\1)", text)
        .replace("](CHANGELOG.md)", "](../CHANGELOG.md)")
        .replace("](CONTRIBUTING.md)", "](../CONTRIBUTING.md)")
    )


def _reference() -> str:
    parts = ["# Reference", "From the docstrings and types of the source."]
    for name in PACKAGES:
        package = importlib.import_module(name)
        parts.append(f"## {name}")
        for member in getattr(package, "__all__", None) or public_members(package):
            found = getattr(package, member)
            if inspect.isroutine(found) or inspect.isclass(found):
                if not found.__module__.startswith("apex."):
                    continue  # PyTorch's own under this name
                parts.append(f"::: {found.__module__}.{found.__qualname__}")
    return "\n\n".join(parts) + "\n"


def public_members(module: Any) -> list[str]:
    """The functions and classes that a module without a list defines itself."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in own if not name.startswith("_")]


def names_page(names: dict[str, Any]) -> str:
    """A table of every name of the originals: whose it is, whether it is here, and which arguments are more here."""
    lines = [
        "# Every upstream name",
        "The public names of NVIDIA's, ROCm's and Ascend's Apex and of Colossal-AI's Booster, and where they are here:"
        " under the same name, with the same arguments. The last column has arguments that only this package takes.",
    ]
    by_module: dict[str, list[str]] = {}
    for name in sorted(names):
        by_module.setdefault(name.rpartition(".")[0] or name, []).append(name)
    for module, members in by_module.items():
        lines.append(f"\n## {module}\n\n| name | of | here | more arguments here |\n|---|---|---|---|")
        for name in members:
            facts = names[name]
            here = find(name)
            more = "" if here is None else ", ".join(f"`{word}`" for word in _more_arguments(here, facts["arguments"]))
            of = ", ".join(dict.fromkeys(UPSTREAMS[origin.split("_")[0]] for origin in facts["in"]))
            lines.append(f"| `{name.rpartition('.')[2]}` | {of} | {'no' if here is None else 'yes'} | {more} |")
    return "\n".join(lines) + "\n"


def find(name: str) -> Any:
    """What has this dotted name here; None where nothing has."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found
    return None


def _more_arguments(found: Any, known: list[str] | None) -> list[str]:
    if known is None:
        return []
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.name not in known and p.kind not in kinds and p.name != "self"]
