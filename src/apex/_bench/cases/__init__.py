"""Benchmark cases, one module per family; each calls `apex._bench.registry.register` when it is imported."""
