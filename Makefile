PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
VENV_OLDEST := .venv-oldest
INSTALLED_OLDEST := $(VENV_OLDEST)/.installed
VENV_ECOSYSTEM := .venv-ecosystem
INSTALLED_ECOSYSTEM := $(VENV_ECOSYSTEM)/.installed

# The processes of the tests share what one of them compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help environments demo test test-oldest test-ecosystem test-lightning test-site gpu-trial lint types docs clean

help:
	@echo "make demo   train a small autoencoder with SHF and draw what it makes of curves (about two minutes)"
	@echo "make test   all tests, and the examples in docstrings"
	@echo "make test-oldest  the quick tests, with every twelfth of their cases, on the oldest supported versions (tests/oldest.txt)"
	@echo "make test-ecosystem  examples of other packages with GrowingBatchSize (tests/ecosystem; installs 7 GB)"
	@echo "make test-site  the documentation in a headless Chromium (Debian: apt-get install chromium)"
	@echo "make test-lightning LIGHTNING=DIRECTORY  Lightning's own tests, of a checkout of the installed version, with GrowingBatchSize (an hour)"
	@echo "make gpu-trial  benchmarks/gpu.py on small sizes on the CPU: what a GPU would be asked, in two minutes"
	@echo "make lint   ruff: rules and format"
	@echo "make types  mypy"
	@echo "make docs   the documentation, into site/"
	@echo "make clean  remove the environments"

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev,docs]'
	touch $@

$(INSTALLED_OLDEST): pyproject.toml tests/oldest.txt
	$(PYTHON) -m venv $(VENV_OLDEST)
	$(VENV_OLDEST)/bin/python -m pip install --quiet --editable '.[dev]' --constraint tests/oldest.txt
	touch $@

$(INSTALLED_ECOSYSTEM): pyproject.toml tests/ecosystem/requirements.txt
	$(PYTHON) -m venv $(VENV_ECOSYSTEM)
	$(VENV_ECOSYSTEM)/bin/python -m pip install --quiet --editable . --requirement tests/ecosystem/requirements.txt
	touch $@

environments: $(INSTALLED) $(INSTALLED_OLDEST)

demo: $(INSTALLED)
	$(VENV)/bin/python -m lightning_struct.recipes.curves_autoencoder fit --config recipes/curves_autoencoder/demo.yaml
	@echo
	@echo "Picture: $$(ls -td results/curves_autoencoder/version_* | head -n 1)/reconstructions.png"
	@echo "The validation loss fell as said above: the upper images are curves that the network was not trained on,"
	@echo "the lower ones what it makes of them from ten numbers each."

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal

test-oldest: $(INSTALLED_OLDEST)
	OMP_NUM_THREADS=1 $(VENV_OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" --one-in 12 -W ignore

test-ecosystem: $(INSTALLED_ECOSYSTEM)
	OMP_NUM_THREADS=1 $(VENV_ECOSYSTEM)/bin/python -m pytest -W ignore tests/ecosystem

test-site: docs
	$(VENV)/bin/python -m pytest tests/site

test-lightning: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --requirement tests/lightning_suite/requirements.txt
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.lightning_suite.compare $(LIGHTNING) $(PARTS)

gpu-trial: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python benchmarks/gpu.py --device cpu --short --file $(VENV)/gpu.jsonl

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(INSTALLED)
	$(VENV)/bin/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict
	@echo "The documentation is in site/index.html; to search in it: $(PYTHON) -m http.server --directory site"

clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_ECOSYSTEM) site
