"""One module per family of benchmark cases; each calls `apex._bench.registry.register` when it is imported."""
