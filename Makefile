# Every target first sees to .venv, so a fresh clone needs nothing but Python 3.10+ and make.

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench lock clean

# TorchServe, its archiver and DeepSpeed look for their helpers on PATH.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# Where this is set, every process would compile anew what it imports, for want of .pyc files: 15 seconds each time.
unexport PYTHONDONTWRITEBYTECODE

# The file appears when a set-up has succeeded; whatever changes what is to be installed makes it stale.
READY := .venv/.ready

help: ## Show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml $(wildcard packages/*/pyproject.toml) constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" scripts/setup.sh

setup: $(READY) ## Make .venv with everything in it (the other targets do it when it is missing or stale)

demo: $(READY) ## Go the whole way: train exits, calibrate, serve on TorchServe, ask it, compare
	@python -m demo $(ARGS)

test: $(READY) ## Run all tests, two at a time (ARGS="-k scheduler" picks some)
	python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(READY) ## Check style, types, import rules and spelling
	ruff check .
	ruff format --check .
	basedpyright
	lint-imports
	codespell

format: $(READY) ## Rewrite the code in the project's style
	ruff check --fix .
	ruff format .

bench: $(READY) ## Measure the engine's speed, and where its time goes (ARGS="--plan full" takes long)
	@python benchmarks/run.py $(ARGS)

lock: $(READY) ## Pin every dependency anew in constraints.txt (ARGS="mlflow" moves one)
	scripts/lock.sh $(ARGS)

clean: ## Remove .venv and every cache; results of runs stay
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find packages tests demo benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
