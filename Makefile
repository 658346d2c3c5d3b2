# Two commands for newcomers: `make serve` and `make test`. Each sets up .venv first, once.

# Makes .venv.
PYTHON3 ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# Asks the Python $(1): pip would say no more than that it is another one, and leave .venv with it.
MIN_PYTHON = $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)
NEWER = rm -rf $(VENV); make serve PYTHON3=python3.12
new_enough = $(1) -c 'import sys; now = sys.version_info[:2]; \
	now >= tuple(map(int, "$(MIN_PYTHON)".split("."))) or sys.exit( \
	"$(1) is Python %d.%d, which is below $(MIN_PYTHON); with a newer one: $(NEWER)" % now)'

# One test process for each core, of which one takes up to 2 GiB; `make test PARALLEL=` is one in all.
PARALLEL := --numprocesses=auto --maxprocesses=4 --dist=worksteal

# Bytecode is kept, also where the environment would not have it: each of the many processes that
# tests start would compile everything anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install serve check fast test research-test exact checks real gpu replay bench \
	bench-load clients cluster-test fuzz attack soak page-test streaming wheel wheel-check clean

.DEFAULT_GOAL := install

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' Makefile | expand -t 16

install: $(INSTALLED)  ## set up .venv, once

# A change of the dependencies installs again. A .venv that works is kept, with what is in it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || \
		{ $(call new_enough,$(PYTHON3)) && $(PYTHON3) -m venv $(VENV); }
	@$(call new_enough,$(PYTHON))
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# SmolLM2 is fetched once; where it cannot be had, and with MODEL=tiny, the bundled models are served.
serve: install  ## serve SmolLM2-135M, or MODEL=tiny, or any model, on http://127.0.0.1:8000, or PORT=8001
	$(PYTHON) -m specrouter serve $(or $(MODEL),$$($(PYTHON) -m modelpool.checkpoint.released smollm2)) $(PORT:%=--port %)

check: install  ## ruff and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

fast: install  ## check, and the tests that load no model: a minute or so
	$(PYTHON) -m tests.fast_lane $(PARALLEL)

# Types are checked beside the tests: alone, mypy would leave all cores but one idle. To rewrite all
# assertions takes each process ten seconds: what fails is run again, and then shows its values.
SUITE = $(PYTHON) -m pytest -q -m "not gpu and not exact and not timing and not long"

test: install  ## check, and all tests but the long ones
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy & types=$$!; \
	$(SUITE) --assert=plain $(PARALLEL); tests=$$?; \
	[ $$tests -ne 1 ] || $(SUITE) --last-failed --maxfail=9; \
	wait $$types && exit $$tests

exact: install  ## the long checks of exactness, and what asserts on measured times
	$(PYTHON) -m pytest -q -m "exact and not timing" $(PARALLEL)
	$(PYTHON) -m pytest -q -m timing

checks: exact research-test replay wheel-check  ## make exact, research, recorded decisions, the wheel, other long tests
	$(PYTHON) -m pytest -q -m long $(PARALLEL)

research-test: install  ## tests of the laboratory, research/
	$(PYTHON) -m pytest -q -m "not timing" research $(PARALLEL)
	$(PYTHON) -m pytest -q -m timing research

# `make real REAL="FOLDER --only smollm2 --quick"`: see checks/real/README.md.
real: install  ## released models give one text however they are served: downloads 1.7 GB, up to two hours
	$(PYTHON) -m checks.real.first_start
	$(PYTHON) -m checks.real.same_text --out real-results $(REAL)

gpu: install  ## tests on a GPU: what only it can show, and the kernels' own
	$(PYTHON) -m pytest -q -m gpu
	$(PYTHON) -m pytest -q tests/modelpool/attention tests/modelpool/fast/test_cuda_forward.py \
		tests/processors/test_choice_kernels.py tests/processors/test_fused_sampler.py

replay: install  ## recorded decisions decided again, and some policies in simulated time
	$(PYTHON) -m research.replay
	$(PYTHON) -m research.replay digest

bench: install  ## tokens per second of every chain
	$(PYTHON) -m specrouter bench chains

bench-load: install  ## latency and goodput under Poisson arrivals
	$(PYTHON) -m specrouter bench load --poisson 1

# Long checks of the running service. Three of them install into environments of their own.
# `make clients CLUSTER=replicas`, or `pair`, asks a cluster. Continuous integration lets a machine
# pass on which Ray cannot be installed; who asks for `make cluster-test` is told by its failure.
clients: install  ## clients of others against a running service
	$(PYTHON) -m checks.service.clients $(if $(CLUSTER),--cluster $(CLUSTER))

fuzz: install  ## any request against a running service
	$(PYTHON) -m checks.service.fuzz

attack: install  ## what is hostile or too large against a running service, and damaged files
	$(PYTHON) -m checks.service.attack

soak: install  ## a long run of the service
	$(PYTHON) -m checks.service.soak

cluster-test: install  ## replicas on Ray, killed and restarted, in an environment of its own
	$(PYTHON) -m checks.service.replicas $(CLUSTER_TEST)

# Continuous integration lets a machine pass that has no Chromium, and says so.
page-test: install  ## the page at / in headless Chromium
	$(PYTHON) -m checks.service.page $(PAGE_TEST)

streaming: install  ## what a streamed token costs
	$(PYTHON) -m checks.service.streaming

wheel: install  ## dist/*.whl for this platform, with the C library in it
	SPECROUTER_LIBRARY=1 $(PYTHON) -m pip wheel --no-deps --wheel-dir dist .

wheel-check: install  ## the built wheel serves in an environment of its own
	$(PYTHON) -m checks.wheel_check

clean:  ## remove .venv and all caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
