# Everything a user or a CI machine runs. Each target sets up what it needs.
PYTHON ?= python3
PY := .venv/bin/python

.PHONY: setup quickstart test test-slow notebooks bench gpu clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quintet needs Python 3.11 or later; try: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --constraint constraints.txt --editable ".[test,notebook]"
	@touch $@

quickstart: setup
	$(PY) -m experiments.corpus experiments/configs/small.yaml
	$(PY) -m experiments.ablate experiments/ablations/quickstart.yaml

test: setup
	$(PY) -m pytest

test-slow: setup
	$(PY) -m pytest -m slow

# Runs every notebook where it lies and keeps what it says.
notebooks: setup
	$(PY) -m jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

bench: setup
	$(PY) -m experiments.bench
	$(PY) -m experiments.pipeline

gpu: setup
	$(PY) -m experiments.gpu

clean:
	rm -rf .venv .cache results/rows results/ablations results/attempts results/tables results/figures results/bench
