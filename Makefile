PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint types clean

help:
	@echo "make demo   train a small autoencoder with SHF and draw its curves (about two minutes)"
	@echo "make test   all tests"
	@echo "make lint   ruff: rules and format"
	@echo "make types  mypy"
	@echo "make clean  remove the environment"

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(INSTALLED)
	$(VENV)/bin/python -m lightning_struct.recipes.curves_autoencoder fit --config recipes/curves_autoencoder/demo.yaml

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(INSTALLED)
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV)
