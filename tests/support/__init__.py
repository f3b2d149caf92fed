"""Modules that tests share: routes to an op, forked processes, tables of calls, and the tools behind make targets."""
