# make demo | test | lint | types | wheel | clean. Each makes the environment first if it is not there yet.
#
#   make demo PYTHON=python3.12        another Python (3.11 or newer)
#   make demo VENV=/tmp/cake           another place for the environment
#   make demo TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'      a build of torch without CUDA
#   make test ARGS='-x tests/test_cli.py'     part of the tests, in one process; without ARGS all, a process on each core

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

MODEL ?= smollm2-135m
DOC ?= examples/harbour.md
QUESTION ?= Which VHF channel does the harbour office keep watch on?
BUDGET ?= 512
export QUESTION

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Made last, so that an interrupted run does not count; its name holds TORCH, so that another TORCH is installed.
STAMP := $(VENV)/.installed-$(shell printf '%s' "$(TORCH)" | cksum | cut -d' ' -f1)
HARNESS := $(VENV)/.installed-harness

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint types wheel clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n 1,6p

venv: $(STAMP) ;

$(STAMP): pyproject.toml constraints.txt
	@sh .ci/venv "$(PYTHON)" "$(VENV)"
	@rm -f "$(VENV)"/.installed-*
	$(PIP) install --quiet -c constraints.txt setuptools
	$(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[demo,chat,eval,serve,llm,dev]'
	@touch "$@"

# lm-evaluation-harness brings 40 packages that only its adapter's tests need.
$(HARNESS): $(STAMP)
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[lm-eval]'
	@touch "$@"

demo: $(STAMP)
	$(VENV)/bin/cake-infer --model $(MODEL) --prompt-file $(DOC) --prompt "$$QUESTION" --budget $(BUDGET)

# Who runs out of tests takes over half of another's, so that the last two end together.
test: $(HARNESS)
	$(PY) -m pytest $(or $(ARGS),--numprocesses=logical --maxprocesses=8 --dist=worksteal)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# mypy finds neither an editable install nor a package that is its own folder: it reads an installed copy.
types: $(STAMP)
	@rm -rf build .types
	$(PIP) install --quiet --no-deps --no-build-isolation --target .types .
	@rm -rf build
	MYPYPATH=.types $(PY) -m mypy -p cake_infer

# pip builds in the tree, and build/ would hand modules that are gone to the next wheel.
wheel: $(STAMP)
	@rm -rf build dist
	$(PIP) wheel --quiet --no-deps --no-build-isolation -w dist .
	@rm -rf build

clean:
	rm -rf build dist .types .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
