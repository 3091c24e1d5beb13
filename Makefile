# Everything here works with python3 and pip alone; the environments go to .venv (or DJJOBS_VENV).

PYTHON ?= python3
VENV := $(or $(DJJOBS_VENV),.venv)

.DEFAULT_GOAL := help
.PHONY: help demo test check bench chaos lint format clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: ## a small pipeline on an embedded PostgreSQL
	@$(PYTHON) tests/cells.py venv dj2
	@DJ_IGNORE_CONFIG_FILE=true $(VENV)/dj2/bin/djjobs demo $(ARGS)

test: ## lint and all tests; choose with ENGINE=postgresql|mysql|mariadb DATAJOINT=2|0 PYTEST_ARGS=... ALL=1
	@$(PYTHON) tests/cells.py

check: ## lint, types, and the tests that need no server
	@$(PYTHON) tests/cells.py check

bench: ## throughput, compared with DataJoint's own
	@$(PYTHON) tests/cells.py venv dj2 dj0
	@$(PYTHON) tests/bench/run.py $(ARGS)

chaos: ## the fault test for longer; ARGS="--seed 7 --minutes 30 --workers 16 --engine mysql"
	@$(PYTHON) tests/cells.py venv dj2
	@$(VENV)/dj2/bin/python tests/chaos/run.py $(ARGS)

lint: ## ruff and mypy
	@$(PYTHON) tests/cells.py lint

format: ## let ruff put things right
	@$(PYTHON) tests/cells.py format

clean: ## remove environments, logs and caches
	rm -rf $(VENV)/dj2 $(VENV)/dj0 $(VENV)/lint $(VENV)/*.lock build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
