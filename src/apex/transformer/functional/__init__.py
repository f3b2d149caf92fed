"""Fused functions of transformers."""
