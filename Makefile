# One command a job. Each sets itself up in .venv on a machine that has Python 3.11 or newer and make, and nothing else;
# once set up, that costs nothing: the stamp is named after what was asked for.

VENV := .venv
BIN := $(VENV)/bin
EXTRAS := demo,dev,serve,torch
# The release the embedded engine is tested with. pip's own settings choose between its CPU and GPU builds.
TORCH := torch==2.13.0
JOBS ?= 2
PEERS ?= nemo-gym
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
STAMP := $(VENV)/.ready-$(shell { cat pyproject.toml; echo '$(EXTRAS) $(TORCH)'; } | cksum | tr -s ' ' -)
RAY_STAMP := $(STAMP)-ray
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.ready-$(shell cat pyproject.toml tests/vllm/requirements.txt | cksum | tr -s ' ' -)
LANCE := pylance==14.0.2 pyarrow==26.0.1 numpy==2.4.6
TRANSFERQUEUE := transferqueue==0.1.11 ray==2.60.0 tensordict==0.15.3 numpy==2.4.6 $(TORCH)
# Of every peer that PEERS may name.
STAMP_nemo-gym := .bench/nemo-gym/.ready-$(shell cksum < pyproject.toml | tr -s ' ' -)
STAMP_lance := .bench/lance/.ready-$(shell echo '$(LANCE)' | cksum | tr -s ' ' -)
STAMP_transferqueue := .bench/transferqueue/.ready-$(shell echo '$(TRANSFERQUEUE)' | cksum | tr -s ' ' -)

.DEFAULT_GOAL := help
.PHONY: help setup demo train test test-vllm test-ray test-gym test-s3 crash lint format bench clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## everything below runs this by itself
	@echo "ready: $(BIN)/tokenlake"

$(STAMP):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name it with PYTHON=..." >&2; exit 1; }
	@echo "setting up $(VENV): a few minutes, once" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.ready-*
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[$(EXTRAS)]"
	@touch $@

demo: $(STAMP) $(if $(filter vllm,$(ENGINE)),$(VLLM_STAMP)) ## the whole loop on this machine: gate, engine, agents, capture, publish, loader (ENGINE=vllm; ARGS="--groups 2")
	@$(BIN)/tokenlake demo $(if $(ENGINE),--engine $(ENGINE) --vllm-python $(VLLM)/bin/python) $(ARGS)

train: $(STAMP) ## asynchronous GRPO on the embedded model, over captured rows and over text (ARGS="--seeds 3")
	@$(BIN)/python examples/grpo_tiny.py $(ARGS)

test: $(STAMP) ## every test (ARGS="tests/store -k torn")
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

test-vllm: $(STAMP) $(VLLM_STAMP) ## capture inside a real vLLM, on CPUs: 2.5 GB once, then minutes (ARGS="-k stream")
	@TOKENLAKE_TEST_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(BIN)/python -m pytest tests/vllm $(ARGS)

# Its packages are pinned one by one: vLLM moves fast, and some that it names cannot load beside its CPU build.
$(VLLM_STAMP):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name it with PYTHON=..." >&2; exit 1; }
	@echo "setting up $(VLLM): a few minutes, once" >&2
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@rm -f $(VLLM)/.ready-*
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/vllm/requirements.txt
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

test-ray: $(RAY_STAMP) ## finalizers, workers and ready rows in a local Ray of two nodes: 300 MB once, then a minute
	@$(BIN)/python -m pytest -m ray $(ARGS)

$(RAY_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[ray]"
	@touch $@

test-gym: $(STAMP_nemo-gym) ## NeMo-Gym's conformance kit and its protocols over a lake
	@.bench/nemo-gym/bin/python -m pytest tests/ingest/nemo_gym $(ARGS)

test-s3: $(STAMP) .bench/moto/.ready ## ready rows on a server that speaks S3: 300 MB once, then half a minute
	@TOKENLAKE_TEST_S3_SERVER=$(abspath .bench/moto)/bin/moto_server $(BIN)/python -m pytest tests/store/test_s3.py $(ARGS)

.bench/moto/.ready:
	@$(PYTHON) -m venv .bench/moto
	@.bench/moto/bin/python -m pip install --quiet --disable-pip-version-check "moto[s3,server]>=5.2,<6"
	@touch $@

crash: $(STAMP) ## kill, tear and refuse at every call that changes a file: at most 30 minutes (ARGS="--seed 1 --limit-s 600")
	@$(BIN)/python -m tests.crash.runner $(ARGS)
	@TOKENLAKE_TEST_LONG=1 $(BIN)/python -m pytest --quiet tests/store/test_machine.py tests/store/test_reader.py tests/store/test_encoder.py

lint: $(STAMP) ## format, style, types, layers, SQL
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/sqlfluff lint --processes $(JOBS) tokenlake/sql

format: $(STAMP) ## rewrite what lint would complain about, where a tool can
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format --quiet .
	@$(BIN)/sqlfluff fix --quiet --processes $(JOBS) tokenlake/sql

bench: $(STAMP) $(foreach peer,$(PEERS),$(STAMP_$(peer))) ## one table of ratios: ours, floors, peers (PEERS="nemo-gym lance transferqueue"; ARGS="--quick")
	@$(BIN)/python -m bench.run $(foreach peer,$(PEERS),--peer $(peer)=.bench/$(peer)/bin/python) $(ARGS)

# NeMo-Gym's token_id_capture needs pydantic and orjson only, its route of the bench FastAPI; its package asks for a hundred more.
$(STAMP_nemo-gym): $(STAMP)
	@$(PYTHON) -m venv .bench/nemo-gym
	@.bench/nemo-gym/bin/python -m pip install --quiet --disable-pip-version-check orjson pydantic pytest --editable ".[serve]"
	@.bench/nemo-gym/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python nemo-gym==0.7.0
	@touch $@

$(STAMP_lance): PACKAGES := $(LANCE)
$(STAMP_transferqueue): PACKAGES := $(TRANSFERQUEUE)
$(STAMP_lance) $(STAMP_transferqueue):
	@echo "setting up $(@D): a few minutes, once" >&2
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGES)
	@touch $@

clean: ## forget everything that can be made again
	rm -rf $(VENV) $(VLLM) .bench .hypothesis .pytest_cache .ruff_cache build dist bench/results.json
