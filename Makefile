# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all lint install clean

demo: $(VENV)/.installed
	$(BIN)/rdvit demo

test: $(VENV)/.tests
	$(BIN)/python -m pytest

test-all: $(VENV)/.tests
	$(BIN)/python -m pytest -m "slow or not slow"

lint: $(VENV)/.tests
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

install: $(VENV)/.installed

# torch comes first and alone: with it there, no other package's range can pull in another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

$(VENV)/.tests: $(VENV)/.installed
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo
