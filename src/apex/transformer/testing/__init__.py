"""Helpers for tests of split models: small models, Megatron's command line, base classes for multi-process tests."""
