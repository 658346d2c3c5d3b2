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

.PHONY: install serve check test exact bench bench-load clients fuzz soak structures streaming \
	wheel-check clean

install: $(INSTALLED)

# A change of the dependencies installs again. A .venv that works is kept, with what is in it.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || \
		{ $(call new_enough,$(PYTHON3)) && $(PYTHON3) -m venv $(VENV); }
	@$(call new_enough,$(PYTHON))
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

serve: install
	$(PYTHON) -m specrouter serve

check: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test: check
	$(PYTHON) -m pytest -q -m "not gpu and not exact" $(PARALLEL)

exact: install
	$(PYTHON) -m pytest -q -m exact

bench: install
	$(PYTHON) -m specrouter bench chains

bench-load: install
	$(PYTHON) -m specrouter bench load --poisson 1

# Long checks of the running service. `clients` and `fuzz` install into an environment of their own.
clients: install
	$(PYTHON) -m tests.service.clients

fuzz: install
	$(PYTHON) -m tests.service.fuzz

soak: install
	$(PYTHON) -m tests.service.soak

structures: install
	$(PYTHON) -m tests.service.structures

streaming: install
	$(PYTHON) -m tests.service.streaming

wheel-check: install
	$(PYTHON) -m tests.wheel_check

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
