"""Runs at the start of each process of a script of Colossal-AI: a CPU in place of a GPU, tiny models, random data.

Writes each loss of `Booster.backward` to a file. With TWIN=1 the Booster is plain PyTorch: float32 models, gradients
that the processes average, torch.optim.AdamW. With COLOSSAL_TESTS=1 imports of `colossalai` get apex. With ONEDNN=0
PyTorch multiplies matrices without oneDNN.
"""

import importlib.abc
import importlib.machinery
import os
import sys

LOSSES = os.environ.get("LOSSES")
TINY = {
    "BertConfig": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "ViTConfig": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "OPTConfig": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64},
    "LlamaConfig": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
}


def without_gpu() -> None:
    """Make the names of torch.cuda that scripts call work on the CPU."""
    import torch

    if torch.cuda.is_available():
        return
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("max_memory_allocated", "memory_allocated"):
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)
    if os.environ.get("ONEDNN") == "0":
        torch.backends.mkldnn.set_flags(False)


def watch(kinds: list[type]) -> None:
    """Record the losses of the outermost calls of `backward` of a Booster and of optimizers."""
    for kind in kinds:
        kind.backward = recorded(kind.backward)


def recorded(backward):
    def recording(self, loss, *args, **options):
        if watch.depth == 0:
            with open(f"{LOSSES}.{os.environ['RANK']}", "a") as file:
                file.write(f"{loss.item()}\n")
        watch.depth += 1
        result = backward(self, loss, *args, **options)
        watch.depth -= 1
        watch.count += watch.depth == 0
        if watch.count == int(os.environ.get("STEPS", "0")) != 0:
            os._exit(0)  # some scripts have no option for fewer steps
        return result

    return recording


watch.count = watch.depth = 0


def make_plain(booster: type) -> type:
    """Replace a Booster's work by plain PyTorch; return the class of its optimizers."""
    import torch
    import torch.distributed as dist

    import apex.lazy
    import apex.nn.optimizer
    from apex.booster import ModelWrapper, OptimizerWrapper

    class Averaging(OptimizerWrapper):
        max_norm = 0.0

        def step(self, *args, **kwargs):
            params = [param for param in self.parameters if param.requires_grad]
            for param in params:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            if self.max_norm:
                torch.nn.utils.clip_grad_norm_(params, self.max_norm)
            return self.optim.step()

        def clip_grad_by_norm(self, max_norm, *args, **kwargs):
            self.max_norm = max_norm

        def zero_grad(self, *args, **kwargs):
            self.optim.zero_grad()

        def backward(self, loss, *args, **kwargs):
            loss.backward()

    def boost(self, model, optimizer=None, criterion=None, dataloader=None, lr_scheduler=None):
        model = model.float()
        for param in model.parameters():
            dist.broadcast(param.data, 0)
        wrapped = None
        if optimizer is not None:
            wrapped = Averaging(optimizer)
            wrapped.max_norm = getattr(self.plugin, "max_norm", 0.0)
        return ModelWrapper(model), wrapped, criterion, dataloader, lr_scheduler

    def adam(model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, **options):
        return torch.optim.AdamW(model_params, lr, betas, eps, weight_decay)

    booster.boost = boost
    booster.backward = lambda self, loss, optimizer: loss.backward()
    for name in ("save_model", "save_optimizer", "save_lr_scheduler"):
        setattr(booster, name, lambda self, *args, **kwargs: None)
    apex.nn.optimizer.HybridAdam = adam
    # Models are built at once, on the device.
    apex.lazy.LazyInitContext = lambda tensor_cls=None, default_device="cpu": torch.device(default_device)
    return Averaging


def make_tiny(transformers: object) -> None:
    """Give the configurations of transformers the sizes of TINY."""
    for name, sizes in TINY.items():
        kind = getattr(transformers, name)
        original = kind.__init__

        def smaller(self, *args, _original=original, _sizes=sizes, **options):
            _original(self, *args, **{**options, **_sizes})

        kind.__init__ = smaller


def make_random(datasets: object) -> None:
    """Replace downloads of data sets by random ones."""
    import random

    from words import WORDS

    def sentences(count: int, seed: int) -> list[str]:
        rng = random.Random(seed)
        return [" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in range(count)]

    def load_dataset(name, *args, split=None, **options):
        if name == "glue":
            sizes = {"train": 128, "validation": 32, "test": 32}
            made = {
                part: datasets.Dataset.from_dict(
                    {
                        "sentence1": sentences(count, 1),
                        "sentence2": sentences(count, 2),
                        "label": [i % 2 for i in range(count)],
                        "idx": list(range(count)),
                    }
                )
                for part, count in sizes.items()
            }
            return datasets.DatasetDict(made)
        if name == "beans":
            import numpy

            rng = numpy.random.default_rng(0)
            images = [rng.integers(0, 255, (32, 32, 3), dtype="uint8") for _ in range(64)]
            part = datasets.Dataset.from_dict(
                {"image": images, "labels": [i % 3 for i in range(64)]},
                features=datasets.Features(
                    {"image": datasets.Image(), "labels": datasets.ClassLabel(names=["a", "b", "c"])}
                ),
            )
            return datasets.DatasetDict({"train": part, "validation": part})
        return {"description": sentences(64, 3)}

    def load_metric(*args, **options):  # newer releases of datasets have no metrics
        from evaluate import Accuracy

        return Accuracy()

    datasets.load_dataset = load_dataset
    datasets.load_metric = load_metric


def make_short(utils: object) -> None:
    """Shorten the sequences of the GPT demo, whose logits of 1024 tokens take minutes in float16 on a CPU."""
    original = utils.get_data
    utils.get_data = lambda batch, length, words: original(batch, min(length, 32), words)


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function after a module has been imported."""

    actions = {"transformers": make_tiny, "datasets": make_random, "commons.utils": make_short}  # noqa: RUF012
    searching = False

    def find_spec(self, fullname, path=None, target=None):
        # transformers looks for packages that it does not import yet, so the function runs after each import.
        if fullname not in self.actions or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching = False
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.actions[fullname](sys.modules[fullname])

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("COLOSSAL_TESTS"):
    import types

    from apex.compat import colossalai

    without_gpu()
    colossalai.install()
    # Models of packages that are not installed, and one whose configuration is downloaded.
    import importlib.util

    absent = [] if importlib.util.find_spec("transformers") else ["transformers"]
    for name in ("diffusers", "timm", "torchaudio", "torchvision", "transformers.chatglm2", *absent):
        sys.modules[f"tests.kit.model_zoo.{name}"] = types.ModuleType(name)

if LOSSES and "RANK" in os.environ:
    import importlib.util

    without_gpu()
    sys.meta_path.insert(0, AfterImport())
    from apex.booster import Booster, OptimizerWrapper

    watch([Booster, make_plain(Booster) if os.environ.get("TWIN") else OptimizerWrapper])
