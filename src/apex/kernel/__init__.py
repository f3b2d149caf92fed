"""Colossal-AI's path of compiled kernels."""
