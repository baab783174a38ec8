# Every target is one line; `make help` lists them. Nothing but Python 3.11 to 3.14 and pip is needed.
SHELL := /bin/bash
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help setup setup-sglang proto docs site release format check test test-all test-sglang test-gpu mutants chaos starve recovery attack corrupt fuzz demo demo-real up bench

help: ; @grep -E '^[a-z-]+: .*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## (.*)/  make \1\t\2/' | expand -t 22  ## list the targets
setup: ; @.ci/setup  ## create .venv and install everything (idempotent)
setup-sglang: setup ; @.ci/setup-sglang  ## add SGLang for a machine without a GPU to .venv (idempotent)
proto: setup ; @.ci/proto  ## regenerate libs/paceline/v1 from proto/
docs: setup ; @$(BIN)/python .ci/docs  ## write the generated pages of docs/ from the code
site: setup ; @$(BIN)/mkdocs build --strict -q && echo site/index.html  ## build the docs site
release: setup ; @$(BIN)/python .ci/release $(VERSION)  ## turn what is unreleased into a release; VERSION=0.1.0
format: setup ; @$(BIN)/ruff check --fix -q . && $(BIN)/ruff format .  ## sort imports, fix, format
check: setup ; @.ci/check  ## ruff, mypy --strict, import rules, generated code, budgets of size and prose
test: setup ; @.ci/test  ## the quick tests, in about 5 minutes on two cores
test-all: setup-sglang ; @.ci/test-all  ## every test but those that need a GPU or network namespaces
test-sglang: setup-sglang ; @$(BIN)/pytest tests/sglang tests/contracts tests/integration/gateway -m sglang  ## tests over the real SGLang, on the CPU
test-gpu: setup ; @$(BIN)/python -m pytest -m gpu  ## tests that need a CUDA device
network: setup ; @$(BIN)/python -m pytest -m network  ## runs over hosts that are killed, cut off, slow; needs root
mutants: setup ; @$(BIN)/python .ci/mutants  ## change the code a little, a sample of 12 a target: do tests notice? MUTANTS=n|all
chaos: setup ; @$(BIN)/python -m benchmarks.chaos --faults $(or $(FAULTS),50) --seed $(or $(SEED),0) --out $(or $(OUT),runs/chaos.json)  ## 50 faults in a whole run: is anything lost? FAULTS=n SEED=n OUT=file
starve: setup ; @$(BIN)/python -m benchmarks.chaos.starve --seeds $(or $(SEEDS),20) --first $(or $(FIRST),0) $(if $(BUSY),--busy $(BUSY)) --out $(or $(OUT),runs/starve.json)  ## whole runs on a busy machine, every process stopped at random: SEEDS=n FIRST=seed BUSY=n OUT=file
recovery: setup ; @$(BIN)/python -m benchmarks.chaos.recovery --busy $(or $(BUSY),12) --runs $(or $(RUNS),1) --out $(or $(OUT),runs/recovery.json)  ## a policy rank of 135M parameters killed beside busy processes: BUSY=n RUNS=n OUT=file
attack: setup ; @$(BIN)/python -m pytest -m attack  ## tests that attack running services
corrupt: setup ; @$(BIN)/python -m pytest -m corrupt  ## tests that corrupt files and numbers
fuzz: setup ; @PACELINE_FUZZ_S=$${PACELINE_FUZZ_S:-60} $(BIN)/python -m pytest -m fuzz --timeout=600  ## noise for every decoder, 60 s each, and more orders of events
demo: setup ; @$(BIN)/paceline demo  ## train a policy and its drafter from start to report (minutes on 2 cores)
demo-real: setup ; @model=$$($(BIN)/python examples/real/fetch_model.py) && tasks=$$($(BIN)/python examples/real/fetch_model.py --tasks) && PYTHONPATH=$$tasks $(BIN)/paceline demo --config examples/real/real.toml --steps $(or $(STEPS),30) gateway.model=$$model  ## the same with a chat model of 135M parameters and reasoning-gym's tasks; STEPS=n
up: setup ; @$(BIN)/paceline up --config $(or $(CONFIG),examples/demo/demo.toml)  ## start and supervise all services; CONFIG=file
bench: setup ; @$(BIN)/paceline bench $(or $(NAME),transport)  ## run a benchmark; NAME=list names them
