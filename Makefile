# `make help` lists the targets.  Each makes the virtual environment that it needs, once.

VENV ?= .venv
ARGS ?=
# Compiling takes most of the time, on one core per test.
WORKERS ?= auto
# Which cases of parametrized tests run: fast, compatibility, or nightly, which is all (tests/conftest.py).
TIER ?= fast
# The random programs that make fuzz judges: the first seed, and how many.
FUZZ_SEED ?= 0
FUZZ_PROGRAMS ?= 2000

# Processes that are started again and again read the package's bytecode, which Python does not keep by itself where
# PYTHONDONTWRITEBYTECODE is set.
BYTECODE = $(VENV)/bin/python -m compileall -q autopallas

# Memory that a training step frees is kept for the next step, instead of going back to the system and being faulted in
# again.  Without this the unfused program looks worse than it is.  (The C library of Linux reads these.)
ALLOCATOR := MALLOC_MMAP_MAX_=0 MALLOC_ARENA_MAX=1 MALLOC_TRIM_THRESHOLD_=8589934592

.PHONY: help demo test nightly test-line test-other-line test-corpus forms fuzz fuzz-record fuzz-mutations check-tpu check-tpu-line check-gpu check-gpu-line faults soak jax-suite lint bench programs programs-line docs clean
.DEFAULT_GOAL := help

help:  ## Lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## Trains a small GPT as it is written and optimized, and compares (ARGS="--help")
	@$(BYTECODE)
	$(ALLOCATOR) $(VENV)/bin/python examples/train_gpt.py $(ARGS)

test:  ## Runs the tests on both lines: Python 3.11 with JAX 0.10, later Pythons with current JAX, there a choice of them
	@status=0; \
	$(MAKE) --no-print-directory TIER=fast test-line || status=1; \
	$(MAKE) --no-print-directory TIER=compatibility test-other-line || status=1; \
	exit $$status

nightly:  ## Runs all cases of all tests on both lines, and programs of other libraries: many hours on two cores
	@status=0; \
	$(MAKE) --no-print-directory TIER=nightly test-line || status=1; \
	$(MAKE) --no-print-directory TIER=nightly test-other-line || status=1; \
	$(MAKE) --no-print-directory programs || status=1; \
	exit $$status

test-line: $(VENV)/.installed  ## Runs the tests on the default Python alone (TIER: fast, compatibility, nightly; ARGS: of pytest)
	@echo "== Tests on $$($(VENV)/bin/python -c 'import platform, jax; print(f"Python {platform.python_version()} with JAX {jax.__version__}")')"
	@$(BYTECODE)
	$(VENV)/bin/python -m pytest -q --numprocesses=$(WORKERS) --maxprocesses=4 --tier=$(TIER) --durations=5 $(ARGS)

test-other-line: $(VENV)/.installed  ## Runs the tests on the other line alone, if this machine has a Python for it
	@wanted="$$($(VENV)/bin/python -c 'import sys; print("3.11" if sys.version_info >= (3, 12) else "3.12+")')"; \
	if python="$$(.ci/find-python "$$wanted" 2>/dev/null)"; then \
	  $(MAKE) --no-print-directory VENV=".venv-$${wanted%+}" PYTHON="$$python" test-line; \
	else \
	  echo "== NOT TESTED: there is no Python $$wanted with venv on this machine, so the other line of JAX was left out"; \
	fi

test-corpus: $(VENV)/.installed  ## Runs the corpus of models with the libraries they are written in
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,corpus]'
	$(VENV)/bin/python -m pytest -q -rs --numprocesses=$(WORKERS) --maxprocesses=4 tests/recognition/test_corpus.py $(ARGS)

forms: $(VENV)/.installed  ## Counts the sites of the corpus that are found, for each operation and form
	cd tests && $(abspath $(VENV))/bin/python -m recognition.forms

fuzz: $(VENV)/.installed  ## Judges random programs by float64 (FUZZ_SEED: the first of FUZZ_PROGRAMS, by default 0 of 2000)
	$(VENV)/bin/python -m tests.fuzz run --first $(FUZZ_SEED) --programs $(FUZZ_PROGRAMS) $(ARGS)

fuzz-record: $(VENV)/.installed  ## The same, and writes clean ranges with the commit to tests/fuzz/clean_ranges.json
	$(VENV)/bin/python -m tests.fuzz run --first $(FUZZ_SEED) --programs $(FUZZ_PROGRAMS) --record $(ARGS)

fuzz-mutations: $(VENV)/.installed  ## Puts known faults back, one at a time, and says after how many programs each is found
	$(VENV)/bin/python -m tests.fuzz mutations --first $(FUZZ_SEED) --programs $(FUZZ_PROGRAMS) $(ARGS)

check-tpu:  ## Compiles the TPU kernels for every generation, without a TPU, with current JAX; 700 MB are installed once
	@python="$(PYTHON)"; [ -n "$$python" ] || python="$$(.ci/find-python 3.12+)" || exit 1; \
	$(MAKE) --no-print-directory VENV=.venv-3.12 PYTHON="$$python" check-tpu-line

check-tpu-line: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,tpu-check]'
	FULL_GRID=1 $(VENV)/bin/python -m pytest -q -rs --numprocesses=$(WORKERS) --maxprocesses=4 -k "tpu or Tpu" \
	  tests/kernels tests/rematerialisation tests/sharding/test_tpu.py tests/tuning/test_tables_tpu_compile.py $(ARGS)
	$(VENV)/bin/python -m pytest -q --numprocesses=$(WORKERS) --maxprocesses=4 \
	  tests/tuning/test_ahead_of_time.py tests/tuning/test_ranking.py $(ARGS)
	$(VENV)/bin/python -m benchmarks.tpu_schedule

check-gpu:  ## Compiles the GPU kernels for the H100, without a GPU, on a Python of 3.12 or later; 500 MB are installed once
	@python="$(PYTHON)"; [ -n "$$python" ] || python="$$(.ci/find-python 3.12+)" || exit 1; \
	$(MAKE) --no-print-directory VENV=.venv-3.12 PYTHON="$$python" check-gpu-line

check-gpu-line: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,gpu-check]'
	NPROC=32 FULL_GRID=1 $(VENV)/bin/python -m pytest -q -rsP --numprocesses=$(WORKERS) --maxprocesses=4 -k "gpu or Gpu" \
	  tests/kernels tests/rematerialisation tests/tuning/test_gpu_ahead_of_time.py tests/test_benchmarks_gpu_model.py $(ARGS)

faults: $(VENV)/.installed  ## Breaks every kernel at every stage, and prints the matrix of faults
	FAULTS=all $(VENV)/bin/python -m pytest -q --numprocesses=$(WORKERS) --maxprocesses=4 tests/faults $(ARGS)
	$(VENV)/bin/python -m tests.faults.matrix

soak: $(VENV)/.installed  ## 2,000 train steps with random signatures, threads, and a cache that vanishes
	$(VENV)/bin/python -m tests.soak $(ARGS)

jax-suite: $(VENV)/.installed  ## Runs tests of JAX, Flax and Optax with jax.jit as it is and optimized
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,corpus]'
	$(VENV)/bin/python -m tests.strangers .strangers $(ARGS)

lint: $(VENV)/.installed  ## Checks style and types
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy

programs:  ## Measures unmodified programs of other libraries in .venv-programs, which takes about 40 minutes (ARGS="--help")
	@python="$$(.ci/find-python 3.11)" || exit 1; \
	$(MAKE) --no-print-directory VENV=.venv-programs PYTHON="$$python" programs-line

programs-line: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[programs]'
	@$(BYTECODE)
	$(ALLOCATOR) $(VENV)/bin/python -m benchmarks programs $(ARGS)

bench: $(VENV)/.installed  ## Runs the benchmarks (ARGS="--help")
	$(VENV)/bin/python -m benchmarks $(ARGS)

docs: $(VENV)/.installed  ## Makes pages of docs/ in build/site; a warning is an error
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	$(VENV)/bin/python docs/generate.py --check
	$(VENV)/bin/python -m mkdocs build --strict --site-dir build/site  # --quiet would hide warnings from --strict
	@echo "== Made build/site/index.html"

clean:  ## Removes everything that make, the tests and the tools have made
	rm -rf .venv .venv-* .strangers build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml
	@python="$(PYTHON)"; [ -n "$$python" ] || python="$$(.ci/find-python 3.11+)" || exit 1; \
	echo "== Making $(VENV) with $$python"; \
	"$$python" -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@
