# `make demo` and `make test`. Both need python3 (3.10 or newer), pip and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ZOO_VENV := .venv-zoo
# Without compiling: most files are never imported, and the first import compiles the others.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
INPUTS := pyproject.toml constraints.txt src/apex/_version.py
# Files whose cases `tests/support/grids.py` samples; a test compares this list with the imports.
GRIDS := tests/_bench/test_plain_models.py tests/booster/test_processes.py tests/contrib/zero/test_processes.py \
	tests/examples/test_examples.py tests/ops/test_examples.py tests/optimizers/test_sharded.py tests/test_compile.py \
	tests/transformer/test_checkpoint.py tests/transformer/test_context_parallel.py \
	tests/transformer/test_parallel_state.py tests/transformer/test_tensor_parallel.py \
	tests/transformer/testing/test_models.py tests/transformer/testing/test_moe_models.py
# What an import compiles is kept, whatever images of containers say: else every process compiles PyTorch anew, for 3
# seconds, and its compiler for 4 more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: dist docs docs-serve demo test gpu-1 gpu-2 test-versions cross-compile grids campaign mutants clients zoo lint types format clean

demo: $(VENV)/.demo-ready
	$(BIN)/apex demo

# Types are checked beside the tests. A test process has one thread, since threads that wait for each other take time
# from the other process; all tests of a file run in one process, since some share what takes long to start.
test: lint
	@$(BIN)/mypy > $(VENV)/types.txt 2>&1 & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.txt; exit $$((tests | types))

# All tests that need a GPU, in two parts of some minutes each: more processes need more of its memory.
GPU_PROCESSES ?= 14
GPU_PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(GPU_PROCESSES) --dist worksteal

gpu-1: $(VENV)/.test-ready
	$(GPU_PYTEST) -m gpu tests/ops

gpu-2: $(VENV)/.test-ready
	$(GPU_PYTEST) -m gpu tests --ignore=tests/ops

# The quick half of the tests on other versions of PyTorch and Python; downloads each PyTorch.
test-versions:
	$(PYTHON) tests/support/other_versions.py $(TESTS)

# Every launch of every kernel for every GPU we name, where `make test` has a sample; takes minutes.
cross-compile: $(VENV)/.test-ready
	$(BIN)/python -m pytest --every-launch tests/ops/test_cross_compile.py

# Whole grids of plugins, precisions, shardings and layouts in several processes, where `make test` has samples, and a
# GPT in every layout of 2, 4 and 8 processes; takes tens of minutes.
grids: $(VENV)/.test-ready
	APEX_TEST_FULL_GRIDS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(GRIDS)
	APEX_TEST_FULL_GRIDS=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.transformer.testing.grid_checks 2 4 8

# What docs/reliability.md promises, tried at random for ten minutes or more; not part of `make test`.
campaign: $(VENV)/.test-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign --output benchmarks/results/reliability-campaign.txt $(CAMPAIGN)

# Small faults put into the source, and whether tests notice them; a quarter of an hour, not part of `make test`.
mutants: $(VENV)/.test-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.mutants --output benchmarks/results/mutants.txt $(MUTANTS)

# The documentation site, into .site; a broken link or a page that is nowhere in the menu is an error. Without --quiet,
# with which mkdocs counts no warnings. tests/docs/test_site.py runs this line.
docs: $(VENV)/.test-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# A wheel and a source archive, in dist/; their metadata is checked.
dist: $(VENV)/.test-ready
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(PIP_INSTALL) twine
	$(BIN)/python -m twine check --strict dist/*

docs-serve: docs
	$(BIN)/python -m http.server --directory .site 8000

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test-ready
	$(BIN)/mypy

format: $(VENV)/.test-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Published packages that use apex, each in an environment of its own; the outcome goes to docs/clients.md. Takes minutes.
clients: $(BIN)/python
	$(BIN)/python tests/clients/run.py

# Errors of boosted steps of some hundred models of transformers, timm, torchvision and diffusers, and of hand-written
# ones, into benchmarks/results and docs/zoo.md; half an hour on two cores. Has an environment of its own, because the
# builds of torchvision choose the PyTorch. `make zoo ZOO="--resume --jobs 8"`.
zoo: $(ZOO_VENV)/.ready
	OMP_NUM_THREADS=1 $(ZOO_VENV)/bin/python -m tests.zoo --record --jobs 2 $(ZOO)

$(ZOO_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(ZOO_VENV)
	$(ZOO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e . \
		transformers timm torchvision diffusers numpy scipy
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# numpy beside torch: torch warns without it, and matplotlib needs it anyway.
$(VENV)/.demo-ready: $(BIN)/python $(INPUTS)
	$(PIP_INSTALL) -e '.[plot]' numpy
	touch $@

$(VENV)/.test-ready: $(BIN)/python $(INPUTS)
	$(PIP_INSTALL) -e '.[test]' numpy
	touch $@ $(VENV)/.demo-ready

clean:
	rm -rf $(VENV) $(ZOO_VENV) .site .pytest_cache .mypy_cache .ruff_cache
