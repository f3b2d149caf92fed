"""Draw whole training steps beside PyTorch's quickest column, from the record of `benchmarks/steps.py`.

python benchmarks/plot_steps.py  # writes docs/steps.svg, which the README shows
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = {
    "gpt-6x384-logits": "GPT, 6 x 384, loss outside",
    "gpt-6x384": "GPT, 6 x 384",
    "gpt-12x768-logits": "GPT, 12 x 768, loss outside",
    "gpt-12x768": "GPT, 12 x 768",
    "gpt2-small": "GPT-2 small",
    "llama": "Llama, 12 x 1024",
    "resnet50": "ResNet-50",
    "unet": "U-Net",
}


def rows(record: dict[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any], str]]:
    """Return (model, our figures, PyTorch's, the name of PyTorch's quickest column) for each model of the record."""
    found = []
    for model, run in record["models"].items():
        timed = {column: figures for column, figures in run["columns"].items() if "milliseconds" in figures}
        theirs = min((c for c in timed if not c.startswith("O5")), key=lambda column: timed[column]["milliseconds"])
        found.append((NAMES[model], timed["O5+compile+graph"], timed[theirs], theirs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks" / "results" / "nvidia_h200-steps.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "steps.svg")
    arguments = parser.parse_args()
    import matplotlib

    matplotlib.use("svg")
    # Letters stay text, and no date or random identifier makes the file differ from run to run.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "apex", "font.size": 9}
    from matplotlib import pyplot

    models = rows(json.loads(arguments.record.read_text()))
    figure, axes = pyplot.subplots(figsize=(7.5, 3.8))
    for place, (_, *figures, column) in enumerate(models):
        ours, theirs = (each["milliseconds"] for each in figures)
        axes.barh(place - 0.2, 1.0, 0.36, color="#b8bfc8")
        axes.barh(place + 0.2, ours / theirs, 0.36, color="#2f6fdb")
        axes.text(1.01, place - 0.2, f"{theirs:.1f} ms, {column}", va="center")
        axes.text(ours / theirs + 0.01, place + 0.2, f"{ours:.1f} ms, apex", va="center", color="#1d4fa8")
    axes.set_yticks(range(len(models)), [name for name, *_ in models])
    axes.set_xlim(0, 1.62)
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title("A training step, bfloat16, AdamW, on an H200: apex and PyTorch's quickest", loc="left", fontsize=9)
    figure.tight_layout()
    figure.savefig(arguments.output, metadata={"Date": None})
    print(arguments.output)


if __name__ == "__main__":
    main()
