# Every target builds .venv itself from the version lock; nothing but Python 3.11, pip and a C compiler is needed.
PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin

.PHONY: help setup demo test check check-extra bench mutation clean

help:
	@echo "make demo   three models make room for each other on this machine (real engines)"
	@echo "make test   the tests"
	@echo "make check  format, lint, types, import contracts"
	@echo "make check-extra  clients' own suites against a whole pool (fetches them; a quarter of an hour)"
	@echo "make bench  gateway throughput and latency beside a bare echo server"
	@echo "make mutation  are the tests of the cores any good? (half an hour; SEED=2 draws another sample)"
	@echo "make clean  remove .venv and caches (converted weights in the user cache stay)"

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11 or run make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "== building $(VENV) (about 2.5 GB, 2 to 5 minutes)"
	@test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --disable-pip-version-check --no-deps -r requirements.lock
	$(RUN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP)
	$(RUN)/carpool demo

test: $(STAMP)
	$(RUN)/python -m pytest

check: $(STAMP)
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports

check-extra: $(STAMP)
	$(RUN)/python -m tests.extra --json

bench: $(STAMP)
	$(RUN)/carpool bench gateway

mutation: $(STAMP)
	$(RUN)/python -m tests.mutation --seed $(or $(SEED),1)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
