# make tune: installs what is needed and tunes attention on this machine.
# make test: installs and passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without compiling: of what is installed most is never imported, and what is, is compiled then.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
# An NVIDIA driver means that the GPU build of jax is wanted.
EXTRA := $(shell nvidia-smi >/dev/null 2>&1 && echo ,gpu)

TEST_PROCESSES := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n + 1 : 8)))

.PHONY: tune test lint all gpu-check clean

tune: $(VENV)/installed
	$(BIN)/shapetune demo

test: $(VENV)/installed-dev
	# One more process than processors: some tests wait for processes of their own; who has
	# none left takes another's, as some tests take a hundred times as long as others.
	SHAPETUNE_TEST_AOT=$(VENV)/aot $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal tests

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(VENV)/lint && ../bin/mypy --config-file ../../pyproject.toml -p shapetune
	PYTHONPATH=$(VENV)/lint $(BIN)/lint-imports --no-cache

gpu-check: $(VENV)/installed-dev
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m shapetune.bench.gpu_check gpu-check.json

all: lint test

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "shapetune needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) --editable '.[cpu,report$(EXTRA)]'
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev$(EXTRA)]'
	mkdir -p $(VENV)/lint && ln -sfn ../.. $(VENV)/lint/shapetune
	# XLA's CUDA compiler, beside the environment: inside, jax would look for a driver.
	-version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	  $(INSTALL) --no-deps --target $(VENV)/aot \
	    jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
