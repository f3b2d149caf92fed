"""Plugins of the Booster: ways of training in several processes. Each is imported at first use."""

from __future__ import annotations

from ..._lazy import lazy_subpackages
from .plugin_base import DPPluginBase, PipelinePluginBase, Plugin

_PLUGINS = {
    "GeminiPlugin": "gemini_plugin",
    "GradientCheckpointConfig": "_gradient_checkpoints",
    "HybridParallelPlugin": "hybrid_parallel_plugin",
    "LowLevelZeroPlugin": "low_level_zero_plugin",
    "MoeHybridParallelPlugin": "moe_hybrid_parallel_plugin",
    "PipelineGradientCheckpointConfig": "_gradient_checkpoints",
    "TorchDDPPlugin": "torch_ddp_plugin",
    "TorchFSDPPlugin": "torch_fsdp_plugin",
}

__all__ = ["DPPluginBase", "PipelinePluginBase", "Plugin", *_PLUGINS]

__getattr__, __dir__ = lazy_subpackages(__name__, (), _PLUGINS)
