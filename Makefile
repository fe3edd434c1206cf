# prfaas. `make demo` shows the main job on real vLLM, `make test` runs the tests; both set everything up first.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
LOCK   := requirements/cpu.lock
TORCH  := requirements/torch.txt

# torch's CPU build: where pip isn't set up to find it, give PyTorch's wheel index for CPU builds here.
TORCH_INDEX_URL ?=
PIP_INDEX := $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))

# Tests start hundreds of processes. Where Python is told to keep no bytecode, each compiles everything anew.
unexport PYTHONDONTWRITEBYTECODE

STAMP := $(VENV)/.prfaas-setup
SETUP_LOG := build/setup.log

# Disk, memory and platform are looked at before the demo; CHECK=no goes on without.
CHECK ?= yes

DOCS_VENV  ?= .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.docs-setup

DEBIAN := requirements/debian.txt

# `make test-fast WING=core` tests one wing.
WINGS := core serving lab tools cli
WING ?=

# Workers of the tests that start no engine: those wait more than a third of their time, so twice as many as two cores.
WORKERS ?= 4

.PHONY: help setup system fast studies machine demo check test test-all test-gemma test-fast test-docs test-explore \
	fuzz swarm test-extras audit bench docs clean

help:
	@echo "make demo   one long and several short prompts through two clusters on this machine, compared with plain vLLM"
	@echo "make test   all that a change needs (starts real vLLM engines; a quarter of an hour on two cores)"
	@echo "make test-all   what 'make test' leaves out: more cases and examples of the same (half an hour)"
	@echo "make test-gemma   tests that fetch Gemma, whose terms a person accepts first"
	@echo "make test-explore  property tests with new random examples, ten times as many (SEED=… repeats a run)"
	@echo "make fuzz         frames, events, messages, files, bodies, answers, reports of any content (SECONDS=600 for each)"
	@echo "make swarm        schedules of faults through the transport's protocol, on all cores (SEEDS=10000)"
	@echo "make test-fast    the tests that start no engine and are not slow (three minutes on two cores)"
	@echo "make test-fast WING=core   those of one wing: $(WINGS) (a minute)"
	@echo "make test-docs    the guides' commands and programs as written; as root also a whole guide on machines of its own (minutes)"
	@echo "make test-extras  each extra of the wheel in an environment of its own (downloads packages; minutes)"
	@echo "make audit  known holes in the packages of .venv (downloads pip-audit, which asks a service)"
	@echo "make check  formatting, lint, types, import arrows"
	@echo "make bench  every benchmark (about an hour)"
	@echo "make docs   the documentation as a site in build/site"
	@echo "make setup  only the virtual environment"
	@echo "make system Debian packages that some tests use (as root; without them those tests are skipped)"
	@echo "make fast   a compiled copy of the package in build/fast, for long simulations (minutes; needs a C compiler)"
	@echo "make studies   docs/explanation/studies.md anew, by the compiled copy (minutes; needs a C compiler)"

setup: $(STAMP)

# Why the lock is installed as it is: requirements/set_up.py.
$(STAMP): $(LOCK) $(TORCH) pyproject.toml
	@$(PYTHON) requirements/set_up.py $(VENV) $(SETUP_LOG) $(PIP_INDEX)
	@touch $@

# What can't be had is no error: the tests that use it are skipped and say so.
system:
	@missing=$$(grep -v '^#' $(DEBIAN) | while read -r package; do \
		dpkg-query -W -f='$${Status}' "$$package" 2>/dev/null | grep -q 'ok installed' || echo "$$package"; done); \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "not installed, so the tests that use them are skipped:" $$missing; \
	else apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing \
		|| echo "could not install:" $$missing; fi

fast: setup
	$(BIN)/python requirements/compiled.py build/fast

# Compiled or not, the numbers are the same; compiled they come sooner.
studies: fast
	PYTHONPATH=build/fast $(BIN)/prfaas study all --out docs/explanation

# First whether it can work here; disk only where something is to be installed.
machine:
ifneq ($(CHECK),no)
	@$(PYTHON) requirements/machine.py $(if $(wildcard $(STAMP)),,$(VENV))
endif

demo: machine setup
	@$(BIN)/prfaas demo $(DEMO_ARGS)

check: setup
	$(BIN)/ruff format --check src tests bench studies
	$(BIN)/ruff check src tests bench studies
	$(BIN)/mypy
	$(BIN)/lint-imports

# Of the tests with engines two files at a time: what shares engines is in one, or in one folder (tests/conftest.py;
# xdist's groups do nothing with pytest 9). In their order: xdist would begin with the files of many tests, and the demo,
# a single test that takes a minute, would run last and alone.
# 5: TEST_ARGS chose none of that kind.
PYTEST  := $(BIN)/python -m pytest
PLAIN   := $(PYTEST) -n $(WORKERS) --dist worksteal
# Where tests with engines are: to collect all others takes each worker ten seconds.
ENGINES := $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder $(if $(TEST_ARGS),,tests/integration tests/core/kv/test_allocation.py)
# All others are elsewhere, and to collect these takes each worker two seconds.
BESIDE  := $(if $(TEST_ARGS),,--ignore tests/integration)
# A fifth of the examples of property tests: `make test-all` takes all of them.
FEW     := --hypothesis-profile=few

test: setup system
	$(PLAIN) $(BESIDE) $(FEW) -m "not engine and not newcomer and not extended and not gemma" $(TEST_ARGS) || [ $$? = 5 ]
	$(ENGINES) -m "engine and not extended and not gemma" $(TEST_ARGS) || [ $$? = 5 ]

# The last -n counts: engines that are killed at a moment, and those that are timed, have the machine to themselves here.
test-all: setup system
	$(PLAIN) $(BESIDE) -m "(extended or hypothesis) and not engine and not newcomer and not gemma" $(TEST_ARGS) || [ $$? = 5 ]
	$(ENGINES) -n 1 -m "extended and engine and not gemma" $(TEST_ARGS) || [ $$? = 5 ]

test-gemma: setup
	$(PYTEST) -n 2 --dist loadfile -m gemma $(TEST_ARGS) || [ $$? = 5 ]

# The seed is printed first: whatever fails, fails again with `make test-explore SEED=...`.
test-explore: setup
	@seed=$${SEED:-$$($(BIN)/python -c 'import secrets; print(secrets.randbelow(2**32))')}; \
	echo "make test-explore SEED=$$seed"; \
	$(PYTEST) -m "hypothesis and not engine" --hypothesis-profile=explore --hypothesis-seed=$$seed \
		--timeout=3600 $(TEST_ARGS) || { status=$$?; echo "repeat with: make test-explore SEED=$$seed"; exit $$status; }

fuzz: setup
	$(BIN)/python bench/fuzz.py --seconds $(or $(SECONDS),600)

swarm: setup
	$(BIN)/python -m tests.world.swarm --seeds $(or $(SEEDS),10000) --first $(or $(FIRST),0)

# Importing vLLM takes each process ten seconds, torch three.
test-fast: setup
	$(if $(filter-out $(WINGS),$(WING)),$(error WING is one of: $(WINGS)))
	$(PLAIN) $(if $(WING),tests/$(WING)) --ignore tests/integration --ignore tests/serving/engines/vllm \
		--ignore-glob "tests/bench/test_gpu_*" --ignore tests/serving/engines/trained/test_conversion.py $(FEW) \
		-m "not slow and not extended and not engine and not newcomer and not gemma" $(TEST_ARGS)

# One after the other: each starts processes enough for all cores.
test-docs: setup system
	$(PYTEST) -m docs $(TEST_ARGS)

test-extras: setup
	$(BIN)/python tests/extras/install.py $(EXTRAS)

audit: setup
	$(BIN)/python requirements/audit.py

bench: setup
	$(BIN)/python bench/transport.py
	$(BIN)/python bench/gateway.py
	$(BIN)/python bench/tracing.py
	$(BIN)/python bench/planner.py
	$(BIN)/python bench/index.py
	$(BIN)/python bench/routing.py
	$(BIN)/python bench/allocation.py
	$(BIN)/python bench/pool.py
	$(BIN)/python bench/synthetic.py
	$(BIN)/python bench/corruption.py --cost
	$(BIN)/python bench/burst.py
	$(BIN)/python bench/faults.py
	$(BIN)/python bench/hostile.py
	$(BIN)/python bench/rollout.py
	$(BIN)/python bench/overload.py
	-$(BIN)/python bench/wan_e2e.py
	$(BIN)/python bench/fidelity.py recorded bench/data/vllm_real_timings_RTXPRO6000_Llama-3.1-8B.jsonl.gz
	$(BIN)/python bench/simulator.py --requests 10000 100000

$(DOCS_STAMP): requirements/docs.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -qq --no-deps -r requirements/docs.txt
	touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=true $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:
	rm -rf $(VENV) $(DOCS_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
