# Each target does all its own set-up and can be run twice.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
RUN ?= language-model-$(shell date +%Y%m%d-%H%M%S)
DATA ?= $(HOME)/undula/data/stdlib-text

.DEFAULT_GOAL := help
.PHONY: help horovod setup train test test-gpu check format bench bench-data bench-start bench-elastic bench-study nightly gallery versions clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

.venv/ready: pyproject.toml constraints.txt
	@echo 'installing into .venv, which takes a minute or two'
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt --editable '.[study,jobs]'
	@touch $@

.venv/ready-to-test: .venv/ready
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt --editable '.[study,jobs,dev]'
	@command -v chromium >/dev/null || tests/install_chromium.sh
	@touch $@

.venv/ready-with-horovod: .venv/ready-to-test
	@$(BIN)/undula build-horovod
	@touch $@

horovod: .venv/ready-with-horovod  ## Build Horovod for the installed torch, once, and install it into .venv

setup: .venv/ready-with-horovod  ## Install everything that development needs into .venv

train: .venv/ready  ## Prepare the data, start a local Ray, train the main job, leave a run directory
	@$(BIN)/undula data stdlib-text --out $(DATA) --if-missing
	@$(BIN)/undula run jobs/language_model.yaml name=$(RUN) data.train=$(DATA)/train data.validation=$(DATA)/validation

test: .venv/ready-with-horovod check  ## Lint, type check, all tests
	$(BIN)/pytest --numprocesses=3 --dist=loadgroup --no-loadscope-reorder

test-gpu: .venv/ready-to-test  ## Tests that need a GPU; skipped where torch sees none
	$(BIN)/pytest tests/gpu --confcutdir=tests/gpu

check: .venv/ready-to-test  ## Lint and type check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready-to-test  ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/ready-with-horovod  ## Cost of a step beside hand-written loops, torchrun DDP and horovodrun; build/bench/loop*.json, tree.json, sharded.json
	$(BIN)/python -m tests.baselines.bench_loop
	$(BIN)/python -m tests.baselines.bench_loop --engine horovod
	$(BIN)/python -m tests.baselines.bench_tree
	$(BIN)/python -m tests.baselines.bench_sharded

bench-start: .venv/ready-to-test  ## Seconds from `undula run` to the first step and back to the prompt, beside torchrun; build/bench/start.json
	$(BIN)/python -m tests.baselines.bench_start

bench-data: .venv/ready-to-test  ## Reading rows beside a plain scan, Ray Data, MosaicML Streaming and LitData; build/bench/data-*.json
	$(BIN)/python -m tests.baselines.bench_data

bench-elastic: .venv/ready-with-horovod  ## Outage and lost steps beside Ray Train, torchft and torchrun, pauses of sharded models, restores at 256 ranks, and cost per step; build/bench/elastic-*.json, pauses.json, restore.json
	$(BIN)/python -m tests.baselines.bench_elastic
	$(BIN)/python -m tests.baselines.bench_pauses
	$(BIN)/python -m tests.baselines.bench_restore
	$(BIN)/python -m tests.baselines.bench_cost

bench-study: .venv/ready-to-test  ## Trials per hour of a study beside Ray Tune alone; build/bench/study-*.json
	$(BIN)/python -m tests.baselines.bench_study

nightly: .venv/ready-with-horovod  ## Further proofs, about three hours: more random faults and more combinations, and half an hour of growth in one test
	$(BIN)/pytest -m nightly

gallery: .venv/ready-to-test  ## Scripts in the manner of other libraries, as they were and as they are, under faults; a part of the nightly tests
	$(BIN)/pytest -m nightly tests/chaos/test_gallery.py

versions: .venv/ready-to-test  ## The adapters' tests and the main job with the oldest and newest versions of each library; a part of the nightly tests
	$(BIN)/pytest -m nightly tests/integration/test_oldest_and_newest.py

clean:  ## Remove what make made here
	rm -rf .venv .venv-versions build .mypy_cache .ruff_cache .pytest_cache .hypothesis
