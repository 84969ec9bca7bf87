# Everything runs in .venv, which the first target builds. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
TORCH ?= torch==2.13.0
RUN := .venv/bin/
OP ?=

# what the engines of the SGLang tests need from their start; tests/sglang/engine_jobs.py has the same
SGLANG_ENV := PYTHONPATH=$(CURDIR)/tests/sglang/shim TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore

.PHONY: demo test test-gpu test-sglang test-sglang-gpu test-nightly lint bench sanitize size

# the main job: MINI checkpoints of both families, decoded by the Triton ops and compared op by op with the reference
demo: .venv/ready
	rm -rf build/demo && mkdir -p build/demo
	for family in k3 kimi-linear; do \
	  $(RUN)kimi-kernels make-mini build/demo/$$family --family $$family && \
	  $(RUN)kimi-kernels decode build/demo/$$family --tokens 1,2,3 --new 6 --backend triton && \
	  $(RUN)kimi-kernels compare build/demo/$$family --left reference --right triton --steps 2 || exit 1; \
	done

test: .venv/ready-dev
	$(RUN)ruff check . && $(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)python -m pytest -n 2 --dist worksteal

# on a machine with a GPU: its own torch and triton, no venv
test-gpu:
	$(PYTHON) -m pytest -m gpu $(if $(N),-n $(N) --dist worksteal)

# SGLang's own engine on tiny checkpoints, in an environment of its own; it fails where SGLang cannot be installed
test-sglang: .venv-sglang/ready
	$(SGLANG_ENV) .venv-sglang/bin/python -m pytest tests/sglang

# the same on a Hopper GPU, random weights; its own torch, triton, SGLang, CuTe DSL, and this package with its entry points
test-sglang-gpu:
	$(PYTHON) -m pytest -m gpu -rP tests/sglang/test_gpu.py $(if $(LAYERS),--layers $(LAYERS))

test-nightly: .venv/ready-dev
	HYPOTHESIS_PROFILE=nightly $(RUN)python -m pytest -n 2

lint: .venv/ready-dev
	$(RUN)ruff check --fix . && $(RUN)ruff format . && $(RUN)mypy

bench:
	$(PYTHON) -m kimi_kernels.bench --config k3 --tp 8 --rows 1 $(if $(OP),--ops $(OP))

sanitize:
	compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 $(PYTHON) -m pytest -m gpu tests/test_megakernel_proofs.py -k one_step

size:
	@git ls-files '*.py' | xargs wc -l | sort -n

# TORCH picks the wheel: a CPU build is enough here (where pip offers one, TORCH=torch==2.13.0+cpu); a CUDA build of PyPI
# works too and is gigabytes. triton last and without its dependents' wishes: the interpreter is tested with 3.6.0
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(RUN)pip install -q $(TORCH)
	$(RUN)pip install -q -e .
	$(RUN)pip install -q --no-deps triton==3.6.0
	touch $@

.venv/ready-dev: .venv/ready
	$(RUN)pip install -q -e '.[dev]'
	touch $@

.venv-sglang/ready: pyproject.toml tests/sglang/install.sh tests/sglang/requirements.txt
	PYTHON=$(PYTHON) TORCH=$(TORCH) sh tests/sglang/install.sh .venv-sglang
	touch $@
