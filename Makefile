# Every target does all set-up by itself on a fresh machine. AGENTRL_REQUIRE names real parts that must be there.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
ONLY ?=

.PHONY: setup demo test test-long check bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	touch $@

setup: $(VENV)/.ready

demo: setup
	$(BIN)/agentrl demo --seed $(SEED)

test: setup
	$(BIN)/python -m pytest -m "not long"

test-long: setup
	$(BIN)/python -m pytest -m long

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks $(ONLY)

clean:
	rm -rf $(VENV) runs build dist
