# Needs Python 3.10 or newer and make, nothing else. `make help` lists the targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  := models/SmolLM2-135M-Instruct
OUT    := runs/smollm2_135M_full
# Twice quiet: errors are shown, warnings about how dependencies declare theirs are not.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet -c constraints.txt
# Stamps: newer than pyproject.toml and constraints.txt means there is nothing to install.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
# More arguments: make test ARGS="-k masks", make quickstart ARGS="max_steps_per_epoch=5".
ARGS   ?=

# Two pips in one environment at a time would spoil it.
.NOTPARALLEL:
.PHONY: help quickstart test lint format docs model install install-dev clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart  install, prepare model and data, finetune SmolLM2-135M on packs (CPU is enough)"
	@echo "make test        install with the development tools and run all tests"
	@echo "make lint        ruff check, ruff format --check, mypy"
	@echo "make format      let ruff rewrite what it can"
	@echo "make docs        build the documentation into site/"
	@echo "make model       prepare $(MODEL)"
	@echo "make clean       remove what was built; keeps $(VENV), models/ and runs/"

# Repeated, it starts afresh and replaces the earlier run, unless ARGS says otherwise.
quickstart: $(RUN_STAMP) $(MODEL)/config.json
	@if [ -e $(OUT) ]; then echo "$(OUT) holds an earlier run; this one replaces it."; fi
	PYTHONPATH=. $(BIN)/tune run recipes/full_finetune.py --config configs/smollm2/135M_full.yaml \
	  output_dir=$(OUT) overwrite_output_dir=True $(ARGS)

test: $(DEV_STAMP) $(MODEL)/config.json
	$(BIN)/python -m pytest $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

model: $(MODEL)/config.json

install: $(RUN_STAMP)

install-dev: $(DEV_STAMP)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "torchtune_packing needs Python 3.10 or newer, but '$(PYTHON)' is missing or older; name a newer one: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing torchtune_packing into $(VENV) (the first time takes some minutes)."
	@$(PIP) -e ".[quickstart]"
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing torchtune_packing and the development tools into $(VENV) (the first time takes some minutes)."
	@$(PIP) -e ".[dev,docs,bench]"
	@touch $(RUN_STAMP) $@

# The folder appears whole or not at all, so one file of it stands for all. No stamp among the
# prerequisites: a newer installation does not make the model old.
$(MODEL)/config.json: | $(VENV)/bin/python
	@$(MAKE) --silent --no-print-directory $(RUN_STAMP)
	$(BIN)/python -m torchtune_packing.models.smollm2.download $(MODEL)

clean:
	rm -rf build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
