# Two commands: `make demo` and `make test`. Both need python3 (3.10 or newer), pip and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt src/apex/_version.py

.PHONY: demo test lint types format clean

demo: $(VENV)/.demo-ready
	$(BIN)/apex demo

test: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test-ready
	$(BIN)/mypy

format: $(VENV)/.test-ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

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
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
