# Everything runs in .venv, which holds the pinned versions of requirements/.
PYTHON ?= python3
# Where the default torch wheel is a CUDA build, take the CPU one:
#   make setup TORCH_ARGS='--index-url https://download.pytorch.org/whl/cpu'
TORCH_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: setup demo test lint
.DEFAULT_GOAL := setup

setup: $(INSTALLED)

$(INSTALLED): requirements/cpu.txt requirements/cpu-no-deps.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH_ARGS) torch==2.13.0
	$(BIN)/pip install --quiet --requirement requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --requirement requirements/cpu-no-deps.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

demo: setup
	examples/quickstart/run.sh

test: setup
	$(BIN)/python -m pytest tests --numprocesses 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
