"""DPPluginBase at Colossal-AI's path."""

from .plugin_base import DPPluginBase

__all__ = ["DPPluginBase"]
