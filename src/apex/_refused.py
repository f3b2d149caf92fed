"""Names of Colossal-AI that have no counterpart here, and the error that says so."""

from __future__ import annotations

import importlib.abc
from typing import Any

_GEMINI = "Gemini here is FSDP2, without chunks. Use Booster(plugin=GeminiPlugin(...))"
_TRAINING = "apex is for training by Booster"
_LEGACY = "the legacy engine is not here. Use Booster"
_DIVIDED = "its state cannot be divided here. Use HybridAdam with LowLevelZeroPlugin"
_LOADERS = "loaders are made by plugins. Use plugin.prepare_dataloader(dataset, batch_size)"
_MISSING = "it is not implemented. Use HybridAdam"
_POLICY = "models are not rewritten by class. Give custom_policy(model, stage, stages) to HybridParallelPlugin"
_LAYERS = "of its layers Linear1D_Col and Linear1D_Row are here. Use apex.transformer.tensor_parallel for others"

# Paths below the package, each with everything below it, by the reason.
_REASONS = {
    _GEMINI: "gemini nn.parallel tensor.ColoTensor utils.model zero.ColoInitContext zero.GeminiAdamOptimizer "
    "zero.GeminiDDP zero.GeminiOptimizer zero.gemini zero.get_static_torch_model zero.shard_utils zero.wrapper "
    "zero.zero_model_wrapper zero.zero_optim_wrapper",
    _TRAINING: "_analyzer auto_parallel autochunk device fx inference kernel.kernel_loader.InferenceOpsLoader "
    "kernel.triton quantization",
    _LEGACY: "amp.AMP_TYPE constants context core engine kernel.cuda_native kernel.jit legacy nn.layer "
    "tensor.ProcessGroup tensor.ShardSpec trainer utils.checkpoint utils.clip_grad_norm_fp32 "
    "utils.colo_device_memory_capacity utils.colo_set_process_memory_fraction utils.is_dp_rank_0 "
    "utils.is_model_parallel_parameter utils.is_no_pp_or_last_stage utils.is_tp_rank_0 utils.is_using_ddp "
    "utils.is_using_pp utils.is_using_sequence utils.load_checkpoint utils.save_checkpoint utils.sync_model_param",
    _LOADERS: "utils.DataParallelSampler utils.get_dataloader",
    _DIVIDED: "nn.optimizer.DistGaloreAwamW nn.optimizer.DistributedAdaFactor nn.optimizer.DistributedCAME "
    "nn.optimizer.DistributedLamb nn.optimizer.GaLoreAdafactor nn.optimizer.GaLoreAdamW nn.optimizer.GaLoreAdamW8bit "
    "nn.optimizer.distributed_adafactor nn.optimizer.distributed_came nn.optimizer.distributed_galore "
    "nn.optimizer.distributed_lamb nn.optimizer.galore tensor.d_tensor",
    _MISSING: "nn.optimizer.Adafactor nn.optimizer.CAME nn.optimizer.adafactor nn.optimizer.came",
    _POLICY: "shardformer.modeling shardformer.policies",
    _LAYERS: "shardformer.layer",
}
_REASON_OF = {path: reason for reason, paths in _REASONS.items() for path in paths.split()}


def reason_for(name: str) -> str | None:
    """Return the text about a refused name, such as "zero.GeminiDDP" or one below it, or None for other names."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        reason = _REASON_OF.get(".".join(parts[:length]))
        if reason is not None:
            return f"colossalai.{name} has no counterpart in apex: {reason}."
    return None


def refuse(name: str) -> None:
    """Raise a ModuleNotFoundError if `name`, a path below the package, is a refused name of Colossal-AI."""
    reason = reason_for(name)
    if reason is not None:
        # `from apex import legacy` drops an error that has the name of the module, and raises one without the reason.
        raise ModuleNotFoundError(reason, name=f"colossalai.{name}")


class Refusals(importlib.abc.MetaPathFinder):
    """A last finder of modules; it finds nothing, and its error says why a module of Colossal-AI is missing."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raise for a refused module of apex; return None for all others."""
        if fullname.startswith("apex."):
            refuse(fullname.removeprefix("apex."))
