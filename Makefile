# `make test` on a fresh machine makes the environment, installs everything and runs all checks.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: test lint format clean

test: lint
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e .[dev]
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
