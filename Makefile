# On a fresh machine each target makes the environment and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format docs clean

demo: $(VENV)/installed
	$(BIN)/tokenmerge generate --model tiny-sdxl --out demo.png

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed
	$(BIN)/python scripts/pages.py
	$(BIN)/zensical build --clean --strict
	@echo site/index.html

$(VENV)/installed: pyproject.toml models/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e .[dev] -e ./models
	$(BIN)/pip install --quiet -c constraints.txt --no-deps triton
	touch $@

clean:
	rm -rf $(VENV) site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
