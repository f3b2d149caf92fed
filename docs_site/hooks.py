"""Pages that `make docs` adds to docs/: the README as first page, the reference, upstream's names, and results.

mkdocs calls the functions whose names begin with `on_`. Links from docs/ to files of the repository lead to copies of
these files in the site, so that none is broken there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# The packages of the reference, one page each, with the names that users call first: the page starts with these.
PACKAGES: dict[str, tuple[str, ...]] = {
    "apex": ("fuse", "unfuse", "Booster", "estimate_memory", "launch", "launch_from_torch"),
    "apex.amp": ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict"),
    "apex.optimizers": ("FusedAdam", "FusedMuon", "muon_groups", "FusedSGD", "FusedLAMB"),
    "apex.normalization": (),
    "apex.graphs": ("capture",),
    "apex.fp8": ("convert", "revert", "table"),
    "apex.booster": ("Booster",),
    "apex.booster.plugin": (),
    "apex.booster.mixed_precision": (),
    "apex.parallel": ("DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model", "LARC"),
    "apex.checkpoint": ("save", "load", "save_sharded", "load_sharded", "verify", "Series", "latest"),
    "apex.contrib.optimizers": (),
    "apex.contrib.clip_grad": (),
    "apex.contrib.xentropy": ("linear_cross_entropy", "linear_log_probs", "LinearCrossEntropyLoss"),
    "apex.contrib.llm_losses": ("dpo_loss", "grpo_loss", "distillation_loss"),
    "apex.contrib.group_norm": (),
    "apex.contrib.multihead_attn": ("SelfMultiheadAttn", "EncdecMultiheadAttn"),
    "apex.contrib.transducer": (),
    "apex.contrib.sparsity": ("ASP",),
    "apex.contrib.bottleneck": (),
    "apex.transformer.parallel_state": ("initialize_model_parallel", "destroy_model_parallel"),
    "apex.transformer.tensor_parallel": ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"),
    "apex.transformer.pipeline_parallel": ("get_forward_backward_func", "build_model"),
    "apex.transformer.functional": ("FusedScaleMaskSoftmax", "fused_apply_rotary_pos_emb"),
    "apex.fused_dense": ("FusedDense", "FusedDenseGeluDense"),
    "apex.mlp": ("MLP",),
    "apex.fp16_utils": ("FP16_Optimizer", "network_to_half"),
    "apex.RNN": (),
    "apex.reparameterization": ("apply_weight_norm", "remove_weight_norm"),
    "apex.dump": ("HookerAndDumper", "compare"),
}
UPSTREAMS = {"nvidia": "NVIDIA", "rocm": "ROCm", "ascend": "Ascend", "colossal": "Colossal-AI"}
_LINK = re.compile(r"(?<=\]\()(?:\.\./)+([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_config(config: Any) -> Any:
    """Put the pages of the reference into the menu."""
    pages: list[Any] = ["reference.md", *({name: _reference_page(name)} for name in PACKAGES)]
    menu = {"Reference": "reference.md"}
    config["nav"] = [{"Reference": pages} if entry == menu else entry for entry in config["nav"]]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and copies of the repository's files that pages link to."""
    pages = {
        "index.md": _first_page(),
        "reference.md": _reference_index(),
        **{_reference_page(name): _reference(name) for name in PACKAGES},
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
    """Turn links that lead out of docs/ into links to the copies."""
    return _LINK.sub(lambda link: copy_of(link[1]), markdown)


def copy_of(path: str) -> str:
    """Return the path in the site of a repository file, or of the list of a folder's files."""
    if (ROOT / path).is_dir():
        return f"files/{path.rstrip('/')}/index.txt"
    return f"files/{path}.txt" if path.endswith((".md", ".py")) else f"files/{path}"


def _targets(text: str) -> set[str]:
    """Return the repository files that a page links to. mkdocs reports links to files that do not exist."""
    return {link[1] for link in _LINK.finditer(text) if (ROOT / link[1]).exists()}


def _content(path: Path) -> str | bytes:
    if path.is_dir():
        return "\n".join(sorted(str(file.relative_to(path)) for file in path.rglob("*") if _is_ours(file))) + "\n"
    return path.read_bytes() if path.suffix == ".png" else path.read_text()


def _is_ours(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def result_files() -> list[str]:
    """Return the names of `apex bench`'s records, which the page of benchmarks draws."""
    names = []
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        if isinstance(record.get("cases"), list) and "versions" in record:
            names.append(path.name)
    return names


def _first_page() -> str:
    """Return the README, with links into docs/ as links to pages and all others as links to copies."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\((?!https?:|#|docs/)([\w./-]+)\)", r"](../\1)", text)
    return text.replace("](docs/", "](")


def _reference_page(package: str) -> str:
    return f"reference/{package}.md"


def _reference_index() -> str:
    """Return the first page of the reference: every package with the first sentence of its docstring."""
    lines = ["# Reference", "From the docstrings and types of the source.", "| package | |\n|---|---|"]
    for name in PACKAGES:
        summary = (importlib.import_module(name).__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        lines[-1] += f"\n| [{name}]({_reference_page(name)}) | {summary.replace('|', ' ')} |"
    return "\n\n".join(lines) + "\n"


def _reference(name: str) -> str:
    """Return the page of one package: the names that users call first, then all others.

    An object that several packages show is described on one page; the others link to it. Two headings of one object
    would make every cross-reference to it ambiguous, which is a warning, and an error in `make docs`.
    """
    parts = [f"# {name.replace('.', '.<wbr>')}"]  # a phone breaks the line behind a dot, not inside of a word
    for path, member in _documented(name).items():
        page = _page_of()[path]
        parts.append(f"::: {path}" if page == name else f"[`{member}`][{path}]: see `{page}`.")
    return "\n\n".join(parts) + "\n"


@functools.cache
def _documented(name: str) -> dict[str, str]:
    """Return the functions and classes that a package shows: each one's full name, and its name in the package."""
    package = importlib.import_module(name)
    members = getattr(package, "__all__", None) or public_members(package)
    values = {member: getattr(package, member) for member in dict.fromkeys((*PACKAGES[name], *members))}
    return {
        f"{value.__module__}.{value.__qualname__}": member
        for member, value in values.items()
        if (inspect.isroutine(value) or inspect.isclass(value))
        and str(value.__module__).startswith("apex")  # names of PyTorch are not described, nor built-in ones
    }


@functools.cache
def _page_of() -> dict[str, str]:
    """Return for each object the package whose page describes it: of those that show it, the one nearest to it."""
    pages: dict[str, str] = {}
    for name in sorted(PACKAGES, key=len):
        for path in _documented(name):
            if path.startswith(f"{name}.") or path not in pages:
                pages[path] = name
    return pages


def public_members(module: Any) -> list[str]:
    """Return the functions and classes that a module without `__all__` defines itself."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in own if not name.startswith("_")]


def names_page(names: dict[str, Any]) -> str:
    """Return a table of every upstream name: its origin, whether this package has it, and arguments added here."""
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
    """Return the object of a dotted name, or None if this package lacks it."""
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
