# make test         the tests
# make check        ruff and mypy
# make demo         what policies keep, on the small models of tools/models
# make test-matrix  the tests under several versions of transformers
#
# Every target makes .venv first. TORCH_INDEX=https://download.pytorch.org/whl/cpu avoids torch's CUDA packages.

PYTHON ?= python3
TORCH_INDEX ?=
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test check test-matrix

demo: .venv/ok
	.venv/bin/kvpatch demo

test: .venv/ok
	.venv/bin/python -m pytest -n 2

check: .venv/ok
	.venv/bin/ruff check
	.venv/bin/mypy

test-matrix: .venv/ok
	TORCH_INDEX=$(TORCH_INDEX) .venv/bin/python tools/test_matrix.py

.venv/ok: requirements-dev.txt setup.cfg pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'kvpatch is developed with Python 3.11 or newer: make PYTHON=python3.12')"
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch==2.13.0"
	$(PIP) -r requirements-dev.txt "setuptools>=68"
	$(PIP) --no-deps --no-build-isolation -e .
	touch .venv/ok
