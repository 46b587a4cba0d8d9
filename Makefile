# make test         the tests that are not slow, at most 6 minutes on two cores
# make test-all     every test
# make check        ruff, mypy and the documentation
# make docs         the documentation, in docs/_build/html; a warning is an error
# make demo         what policies keep, on the small models of tools/models
# make soak         random sequences of everything on a patched model, for 30 minutes, and docs/reliability.md
# make test-matrix  the tests under several versions of transformers and torch (several GB), and docs/reliability.md
# make test-wheel   the sdist's tests, and the wheel in an environment of its own
# make results      every experiment of tools/evaluation on those models, and docs/results.md
# make mutation     docs/reliability.md: which small changes of the library no test notices
# make reliability  the other sections of that page: memory, misuse, fuzzing
# make upstream-tests TRANSFORMERS=PATH  transformers' own tests, unpatched and patched at 1.0, from a checkout of its repository
# make peer-env     NVIDIA kvpress in .venv-kvpress, for `python -m tools.bench --peer kvpress`
#
# Every target makes .venv first. TORCH_INDEX=https://download.pytorch.org/whl/cpu avoids torch's CUDA packages.

PYTHON ?= python3
TORCH_INDEX ?=
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
PEER_PIP = $(subst .venv,.venv-kvpress,$(PIP))

.PHONY: demo test test-slow test-all check docs soak test-matrix test-wheel results mutation reliability upstream-tests peer-env

demo: .venv/ok
	.venv/bin/kvpatch demo

PYTEST = .venv/bin/python -m pytest -n 2 --dist worksteal

test: .venv/ok .venv/torchao
	$(PYTEST) -m "not slow and not gpu"

# what `make test` leaves out; tests marked gpu skip themselves where there is none
test-slow: .venv/ok .venv/torchao
	$(PYTEST) -m "slow or gpu"

test-all: .venv/ok .venv/torchao
	$(PYTEST)

check: .venv/ok docs
	.venv/bin/ruff check
	.venv/bin/mypy

docs: .venv/ok
	.venv/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

soak: .venv/ok
	.venv/bin/python -m tools.reliability.soak --minutes 30 --processes 2 --write

test-matrix: .venv/ok
	TORCH_INDEX=$(TORCH_INDEX) .venv/bin/python -m tools.reliability.test_matrix --write

# WHEEL="3.10 3.12" tries other Pythons too: see tools/reliability/wheel.py
test-wheel: .venv/ok
	TORCH_INDEX=$(TORCH_INDEX) .venv/bin/python -m tools.reliability.wheel $(WHEEL)

results: .venv/ok
	.venv/bin/python -m tools.evaluation.results --fresh

# MUTATION="--sample 300" and such: see tools/reliability/mutation.py. cosmic-ray brings a lot, and only lists mutants here
mutation: .venv/ok .mutation/packages/ok
	.venv/bin/python -m tools.reliability.mutation $(MUTATION)

.mutation/packages/ok: .venv/ok
	$(PIP) --target .mutation/packages "cosmic-ray==8.7.0"
	touch .mutation/packages/ok

reliability: .venv/ok
	.venv/bin/python -m tools.reliability.memory
	.venv/bin/python -m tools.reliability.fuzz --minutes 10 --write
	.venv/bin/python -m tools.reliability.misuse --write

upstream-tests: .venv/ok .upstream/packages/ok
	.venv/bin/python -m tools.reliability.upstream "$(TRANSFORMERS)" --packages .upstream/packages --write

# what transformers' tests import beside the development environment
.upstream/packages/ok: .venv/ok
	$(PIP) --target .upstream/packages "parameterized==0.9.0" "expecttest==0.3.0" "httpx==0.28.1"
	touch .upstream/packages/ok

# kvpress needs transformers below 5.3 and kvpatch a newer one, so they cannot share an environment
peer-env: .venv/ok .venv-kvpress/ok

.venv-kvpress/ok:
	$(PYTHON) -m venv --clear .venv-kvpress
	$(PEER_PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch==2.13.0"
	$(PEER_PIP) "kvpress==0.5.5" "transformers==5.2.0"
	touch .venv-kvpress/ok

# for the tests alone: with it, whatever imports transformers prints warnings about torchao's own kernels
.venv/torchao: .venv/ok
	$(PIP) --no-deps "torchao==0.18.0"
	touch .venv/torchao

.venv/ok: requirements-dev.txt pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'kvpatch is developed with Python 3.11 or newer: make PYTHON=python3.12')"
	$(PYTHON) -m venv .venv
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch==2.13.0"
	$(PIP) -r requirements-dev.txt "setuptools>=77"
	$(PIP) --no-deps --no-build-isolation -e .
	touch .venv/ok
