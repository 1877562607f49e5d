# Everything runs in .venv, made on first use and again when a requirement changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint format docs bench clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test,docs]' --constraint constraints.txt
	touch $@

demo: $(VENV)/.ready  ## train the demo GPT, compressed and dense, and compare
	$(BIN)/python examples/train_gpt.py --compare --out out

test: lint  ## lint, types, tests, doctests and examples
	$(BIN)/python -m pytest -n auto --maxprocesses 4 -m "not slow"

test-slow: $(VENV)/.ready  ## the longer runs
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready  ## the figures of docs/results.md
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/step.py

docs: $(VENV)/.ready
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) out build dist site
