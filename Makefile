# Everything runs in .venv, which holds the pinned versions of requirements/.
PYTHON ?= python3
# Where the default torch wheel is a CUDA build, take the CPU one:
#   make setup TORCH_ARGS='--index-url https://download.pytorch.org/whl/cpu'
TORCH_ARGS ?=
SOAK_ARGS ?=

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest tests --numprocesses 2 --dist loadfile --no-loadscope-reorder
INSTALLED := .venv/.installed

# On a machine with a GPU there is no .venv: this Python has torch, triton, transformers and pytest.
#   make gpu-test GPU_TEST_ARGS='--gpu-models Qwen3-4B -k gemm'
#   make gpu-bench GPU_BENCH_ARGS='--seconds 120 --only linear,attention'
GPU_PYTHON ?= python3
GPU_TEST_ARGS ?=
GPU_BENCH_ARGS ?=

CPU_SETTINGS ?=
ARCHITECTURES_ARGS ?=

.PHONY: setup demo test test-runs test-cpus soak architectures lint gpu-test gpu-bench
.DEFAULT_GOAL := setup

setup: $(INSTALLED)

$(INSTALLED): $(wildcard requirements/*) pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH_ARGS) torch==2.13.0
	$(BIN)/pip install --quiet --requirement requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --requirement requirements/cpu-no-deps.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	cp requirements/torchvision_beside_cpu_torch.* \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

demo: setup
	examples/quickstart/run.sh

test: setup
	$(PYTEST) -m "not runs"

# Whole runs on several hosts, runs that lose a process or a host, and runs that go on from a checkpoint.
test-runs: setup
	$(PYTEST) -m runs

# The tests of what decides bits, under the instruction sets of other processors.
#   make test-cpus CPU_SETTINGS='MKL_CBWR=AVX2 DNNL_MAX_CPU_ISA=SSE41'
test-cpus: setup
	$(BIN)/python tests/support/instruction_sets.py $(CPU_SETTINGS)

# Kills processes of whole runs at random moments; about an hour. It goes on where it was stopped:
#   make soak SOAK_ARGS='--kills 40 --seed 1'
soak: setup
	PYTHONPATH=. $(BIN)/python tests/support/soak.py --json benchmarks/results/soak.json $(SOAK_ARGS)

# What each architecture does, on real engines; about half a minute a cell of docs/architectures.md.
#   make architectures ARCHITECTURES_ARGS='--only gemma2,phi3 --columns float32 --again'
architectures: setup
	PYTHONPATH=. $(BIN)/python tests/support/architecture_table.py $(ARCHITECTURES_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu-test:
	$(GPU_PYTHON) -m tests.gpu.run --json benchmarks/results/gpu_test.json $(GPU_TEST_ARGS)

gpu-bench:
	$(GPU_PYTHON) -m benchmarks.gpu_ops --json benchmarks/results/gpu_ops.json $(GPU_BENCH_ARGS)
