"""Colossal-AI's names for compiled kernels."""
