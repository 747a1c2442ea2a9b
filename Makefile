# Needs Python and make. Everything that is installed goes into .venv; nothing is installed twice.

VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
WORKERS ?= 2
DEMO := examples/smolagents_stock

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-seeds demo-control demo-solver-judge demo-compaction test test-openai3 test-versions test-peers vllm test-vllm demo-vllm test-cluster test-faults test-all test-shard check format wheel clean

help:  ## Say what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

setup: $(VENV)/.done  ## Make .venv and install the SDK, the trainer and the tools

$(VENV)/.done: pyproject.toml tools/setup.sh
	@sh tools/setup.sh $(VENV)

demo: setup  ## Train the SmolAgents app on SmolLM2-135M (SEED=n); writes runs/demo/result.json
	@$(BIN)/python $(DEMO)/run.py --seed $(SEED) --out runs/demo
	@$(BIN)/python $(DEMO)/check.py runs/demo

demo-seeds: setup  ## The demo with three seeds, and the smallest rise of the three
	@for seed in 0 1 2; do $(MAKE) --no-print-directory demo SEED=$$seed || exit 1; done
	@$(BIN)/python $(DEMO)/check.py runs/demo --seeds 0 1 2

demo-control: setup  ## The demo with lr=0: its interval must contain 0
	@$(BIN)/python $(DEMO)/run.py --seed $(SEED) --lr 0 --out runs/demo-control
	@$(BIN)/python $(DEMO)/check.py runs/demo-control --control

demo-solver-judge: setup  ## Train two solvers and a judge, each on its own reward (SEED=n); writes runs/solver-judge/result.json
	@$(BIN)/python examples/solver_judge/run.py --seed $(SEED) --out runs/solver-judge
	@$(BIN)/python examples/solver_judge/check.py runs/solver-judge

demo-compaction: setup  ## Train a chat whose history is compacted, every sampled token once (SEED=n); writes runs/compaction/result.json
	@$(BIN)/python examples/compaction/run.py --seed $(SEED) --out runs/compaction
	@$(BIN)/python examples/compaction/check.py runs/compaction

test: setup test-openai3  ## Run the test suite, and the client's part of it on openai 3.x too
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not vllm and not cluster and not peer and not faults and not jaeger" tests

# Strands holds the main environment at openai 2.x (httpx); 3.x speaks through httpx2.
OPENAI3 := .venv-openai3
CLIENT_TESTS := $(wildcard tests/trace/test_client_*.py) tests/trace/test_routing.py tests/trace/test_testing.py tests/trace/core/test_end_to_end.py

$(OPENAI3)/.done: pyproject.toml | setup
	@$(BIN)/python -m uv venv --quiet --clear --seed --python $(BIN)/python $(OPENAI3)
	@$(OPENAI3)/bin/python tools/install_all.py . "openai[aiohttp]>=3,<4" pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

test-openai3: $(OPENAI3)/.done  ## Run the client's tests on openai 3.x, in an environment of its own
	@$(OPENAI3)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(CLIENT_TESTS)

test-versions: setup  ## Run the SDK's tests on the oldest and newest openai, OpenTelemetry and Python (ROW=name: that one); see tools/versions.py
	@$(BIN)/python tools/versions.py --workers $(WORKERS) $(ROW)

PEERS := .venv-peers

test-peers: setup  ## Run the tests beside other instrumentations of the OpenAI client and with agent frameworks (PEER=name: that one), each in an environment of its own
	@$(BIN)/python tools/peers.py $(PEERS) $(PEER)

# vLLM pins other versions than the trainer does.
VLLM := .venv-vllm

vllm: $(VLLM)/.done  ## Make .venv-vllm, an environment with vLLM for the CPU

$(VLLM)/.done: tools/install_vllm.py | setup
	@$(BIN)/python -m uv venv --quiet --clear --seed --python $(BIN)/python $(VLLM)
	@$(VLLM)/bin/python tools/install_vllm.py
	@touch $@

test-vllm: setup vllm  ## Run the tests that start a real vLLM, in .venv-vllm
	@$(BIN)/python -m pytest -m vllm tests/vllm

demo-vllm: setup vllm  ## The demo with serving="vllm"; writes runs/demo-vllm/result.json
	@$(BIN)/python $(DEMO)/run.py --seed $(SEED) --serving vllm --out runs/demo-vllm
	@$(BIN)/python $(DEMO)/check.py runs/demo-vllm --within 1200

test-cluster: setup  ## Run the tests that start Ray
	@$(BIN)/python -m pytest -m cluster tests

test-faults: setup  ## Run the tests that kill, fill or hang parts of real runs
	@$(BIN)/python -m pytest -m faults tests/faults tests/cluster

# .ci/run runs one of these after the suite, in turn.
SHARDS := faults peers versions cluster vllm

test-all: test $(addprefix test-,$(SHARDS))  ## Run the suite and every slow shard; one that cannot install what it needs fails

test-shard: test-$(word $(shell expr $$(git rev-list --count HEAD) % $(words $(SHARDS)) + 1),$(SHARDS))  ## Run the slow shard whose turn it is, by the number of commits

check: setup  ## Format, lint, types and import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports
	@$(BIN)/python tools/file_tree.py --check

format: setup  ## Rewrite the code as `make check` wants it
	@$(BIN)/ruff format .
	@$(BIN)/python tools/file_tree.py
	@$(BIN)/ruff check --fix .

wheel: setup  ## Build the wheel, through the source distribution, into dist/
	@$(BIN)/python -m build --outdir dist .

clean:  ## Remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) $(VLLM) $(OPENAI3) $(PEERS) .venv-versions build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
