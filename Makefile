# Every target makes the environment it needs; nothing but Python is asked for beforehand.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= python3
BIN := .venv/bin
OUT ?= out/quickstart
TEST_WORKERS ?= 2
# One thread in each test worker: two workers then fill two cores, and tiny tensors are fastest on one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal

.PHONY: help install quickstart check test test-full test-gsm8k test-vllm test-round-trip test-extract-vllm test-interop clean
.PHONY: table-rules table-kernels table-adaptive table-methods

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

install: .venv/ready ## make .venv

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[demo,dev,guided]'
	touch $@

.venv-vllm/complete: tests/vllm/make_env.sh
	PYTHON=$(PYTHON) bash tests/vllm/make_env.sh .venv-vllm
	touch $@

quickstart: .venv/ready ## conversations to a measured speculator on SmolLM2
	$(BIN)/speculators quickstart --out $(OUT)

check: .venv/ready ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check ## checks and the fast tests
	$(PYTEST)

test-full: check ## every test, and the tables of methods, rules, kernels, depths and keys in out/
	$(PYTEST) -m 'full or not full'
	$(MAKE) -j $(TEST_WORKERS) table-rules table-kernels table-adaptive
	$(MAKE) table-methods

# Programs that assert what they write; their tests run a small part of each.
table-rules: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.runtime.laws --out out/rules.json

table-kernels: .venv/ready
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m tests.runtime.verification_cases --out out/kernels.json

table-adaptive: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.runtime.adaptive --out out/adaptive.json

table-methods: .venv/ready
	smollm2=$$($(BIN)/speculators fetch-verifier smollm2); OMP_NUM_THREADS=1 $(BIN)/python -m tests.runtime.methods \
	  --workers $(TEST_WORKERS) --verifier "SmolLM2=$$smollm2" --out out/methods.json --against README.md

test-gsm8k: quickstart ## the quickstart's speculator on GSM8K: the answers of plain decoding
	$(BIN)/python -m tests.runtime.gsm8k --speculator $(OUT)/speculator --out out/gsm8k.json

test-vllm: .venv/ready .venv-vllm/complete ## speculators of ours, unmodified, in real vLLM on the CPU
	$(BIN)/python tests/vllm/compare.py --vllm-python .venv-vllm/bin/python \
	  --speculator out/quickstart/speculator --out out/vllm_check.json
	OMP_NUM_THREADS=1 $(BIN)/python tests/vllm/matrix.py --vllm-python .venv-vllm/bin/python --out out/vllm_matrix.json

# Other projects' layouts have none of the norms that the quickstart's draft has otherwise.
out/plain/speculator/config.json: .venv/ready
	$(BIN)/speculators quickstart --out out/plain draft.norm_before_residual=false draft.norm_before_fc=false \
	  draft.norm_output=false

test-round-trip: .venv/ready out/plain/speculator/config.json ## a trained EAGLE-3 in other projects' layouts and back
	$(BIN)/python -m tests.convert.round_trip --speculator out/plain/speculator --out out/round_trip.json

test-extract-vllm: .venv/ready .venv-vllm/complete ## hidden states from real vLLM on the CPU through our connector
	$(BIN)/python tests/vllm/extract_parity.py --vllm-python .venv-vllm/bin/python --out out/extract_parity.json

.venv-peer/complete: tests/interop/make_env.sh
	PYTHON=$(PYTHON) bash tests/interop/make_env.sh .venv-peer
	touch $@

test-interop: .venv/ready .venv-peer/complete ## directories of ours in PyPI's `speculators`, and its own in ours
	$(BIN)/python tests/interop/compare.py --peer-python .venv-peer/bin/python --out out/interop.json
	$(BIN)/python -m tests.interop.converting --peer-python .venv-peer/bin/python --out out/convert_peer.json

clean: ## remove the environments and every output
	rm -rf .venv .venv-vllm .venv-peer out build dist
