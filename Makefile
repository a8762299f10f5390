# Everything runs in .venv, which holds the pinned versions of requirements/.
PYTHON ?= python3
VENV := .venv
PINS := requirements
TORCH ?= 2.13.0
# Where the default torch wheel is a CUDA build, take the CPU one:
#   make setup TORCH_ARGS='--index-url https://download.pytorch.org/whl/cpu'
TORCH_ARGS ?=
SOAK_ARGS ?=

BIN := $(VENV)/bin
# Python compiles what is imported; pip would compile all, for most of the time that it takes.
INSTALL := $(BIN)/pip install --quiet --no-compile
# Three for two cores: servers, ranks and commands are waited for a third of the time.
PYTEST := $(BIN)/python -m pytest tests --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Every process would compile our sources anew.
unexport PYTHONDONTWRITEBYTECODE
INSTALLED := $(VENV)/.installed

# On a machine with a GPU there is no .venv: this Python has torch, triton, transformers and pytest.
#   make gpu-test GPU_TEST_ARGS='--gpu-models Qwen3-4B -k gemm'
#   make gpu-quarter GPU_QUARTER_ARGS='--call 2'
GPU_PYTHON ?= python3
GPU_TEST_ARGS ?=
GPU_QUARTER_ARGS ?=

CPU_SETTINGS ?=
ARCHITECTURES_ARGS ?=

.PHONY: setup demo test test-runs test-further test-kernels test-all test-cpus test-sglang soak architectures site lint gpu-test gpu-quarter
.DEFAULT_GOAL := setup

setup: $(INSTALLED)

# From nothing: what an older environment holds beside the pins would hide that a pin is missing.
$(INSTALLED): $(wildcard $(PINS)/*.*) pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) $(TORCH_ARGS) torch==$(TORCH)
	$(INSTALL) --requirement $(PINS)/cpu.txt
	$(INSTALL) --no-deps --requirement $(PINS)/cpu-no-deps.txt
	$(INSTALL) --no-deps --editable .
	site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  cp onpolicy/compat/torchvision_on_cpu.py $(PINS)/torchvision_on_cpu.pth "$$site"
	touch $@

demo: setup
	examples/quickstart/run.sh

test: setup
	$(PYTEST) -m "not runs and not kernels and not further"

# Whole runs, of which many lose a process or a host or go on from a checkpoint; commands; groups of ranks.
test-runs: setup
	$(PYTEST) -m "runs and not further"

# What CI tests, on further combinations (tests/support/further.py).
test-further: setup
	$(PYTEST) -m further

# Every kernel of the Triton operators, compiled for each generation of GPUs. `test` fails until this has
# passed with the sources as they are.
test-kernels: setup
	$(PYTEST) -m kernels
	$(BIN)/python tests/onpolicy/ops/triton/compiled_sources.py

# `test` and `test-runs` at once, as CI runs them: collected once, and no worker waits for another's last
# test twice.
test-all: setup
	$(PYTEST) -m "not kernels and not further"

# The tests of what decides bits, under the instruction sets of other processors.
#   make test-cpus CPU_SETTINGS='MKL_CBWR=AVX2 DNNL_MAX_CPU_ISA=SSE41'
test-cpus: setup
	$(BIN)/python tests/support/instruction_sets.py $(CPU_SETTINGS)

# What the seam to SGLang needs, with another supported version: which hook moved, from its source, then, in an
# environment of its own with what that version pins: hooks, parity, determinism, weight updates, aborts.
#   make test-sglang VERSION=0.5.22
SEAM := sglang_patches parity e2e/test_verify.py e2e/test_server.py e2e/test_requests.py e2e/test_serve_text.py \
  e2e/test_prompt_log_probs.py e2e/test_weight_sync.py \
  e2e/test_async.py::test_a_free_run_that_is_interrupted_killed_and_resumed_is_repeated_to_the_bit
test-sglang: setup
	PYTHONPATH=. $(BIN)/python tests/support/sglang_version.py $(VERSION)
	$(MAKE) setup VENV=.sglang/$(VERSION)/venv PINS=.sglang/$(VERSION)
	.sglang/$(VERSION)/venv/bin/python -m pytest $(addprefix tests/,$(SEAM)) --numprocesses 2 --dist loadfile

# Kills processes and hosts of whole runs at random moments; an hour or two. It goes on where it was stopped:
#   make soak SOAK_ARGS='--kills 80'
#   make soak SOAK_ARGS='--json benchmarks/results/soak_lora.json --lora-rank 8'
soak: setup
	PYTHONPATH=. $(BIN)/python tests/support/soak.py --json benchmarks/results/soak.json $(SOAK_ARGS)

# What each architecture does, on real engines; about half a minute a cell of docs/architectures.md.
#   make architectures ARCHITECTURES_ARGS='--only gemma2,phi3 --columns float32 --again'
architectures: setup
	PYTHONPATH=. $(BIN)/python tests/support/architecture_table.py $(ARCHITECTURES_ARGS)

# The pages as a site, in runs/site: every link and heading that a page names is there, or it ends. No network.
site: setup
	rm -rf runs/site && mkdir -p runs/site/source
	cp -r --parents *.md LICENSE docs examples benchmarks fallback_correction/*.md runs/site/source
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/mkdocs.yml

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu-test:
	$(GPU_PYTHON) -m tests.gpu.run --json benchmarks/results/gpu_test.json $(GPU_TEST_ARGS)

gpu-quarter:
	$(GPU_PYTHON) -m benchmarks.gpu_quarter $(GPU_QUARTER_ARGS)
