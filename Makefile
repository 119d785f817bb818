# Set-up is part of every target: `make demo` and `make test` each work alone on a fresh clone.
PYTHON ?= python3.11
PYTEST ?= -n 6 --dist loadfile --no-loadscope-reorder --durations=20
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check
export PYTHONPATH := src:.
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes are started, and compiling takes longer than starting

.PHONY: demo test checked collected conformance lint types layers kernels peers unit simulate soak fuzz crash lock bench clean help setup

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## the virtual environment, from requirements.lock

# uv installs in half the processor time of pip, and pip where uv cannot: behind an index that only pip is told of.
$(READY): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Anabranch needs Python 3.11: install it, or use make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@awk '/^[^ ]/{uv=/^uv==/} uv' requirements.lock > $(VENV)/uv.lock
	$(PIP) --no-compile --require-hashes -r $(VENV)/uv.lock
	$(BIN)/uv pip install --quiet --no-cache --python $(BIN)/python --require-hashes -r requirements.lock || \
	$(PIP) --no-compile --require-hashes -r requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

java:
	@java -version >/dev/null 2>&1 || { echo "Spark needs Java 17 or newer: install it (for example: apt-get install openjdk-17-jre-headless) and try again"; exit 1; }

demo: $(READY) java  ## the main job, on real data: 336,776 flights through a topic that is resized as they flow
	$(BIN)/anabranch demo --report report.html $(DEMO)

test: $(READY) java  ## every test
	@$(MAKE) --no-print-directory --jobs=3 checked types peers

checked: lint layers kernels collected
	@$(MAKE) --no-print-directory unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports --no-logo

kernels: $(READY)
	$(BIN)/python -m anabranch.records.arrow.warm
	$(BIN)/python -m anabranch.runtime.native

peers: $(READY)
	@$(BIN)/python -m tests.support.peers

collected: $(READY)  # compiles the tests once: workers that begin together would each do all of it
	@told=$$($(BIN)/pytest --collect-only -qq 2>&1) || { printf '%s\n' "$$told"; exit 1; }

unit: $(READY) java
	$(BIN)/pytest $(PYTEST)

simulate: $(READY)  ## 10,000 simulated groups, each with its own faults, as many with members that share partitions, some with transactions, some with compacted topics, and some where no run has been; mutations: make simulate SEEDS=50000 FIRST=1000000 JOBS=2
	$(BIN)/python -m tests.simulation.groups --seeds $(or $(SEEDS),10000) --first $(or $(FIRST),0) --fresh $(or $(FRESH),500) --jobs $(or $(JOBS),2)
	$(BIN)/python -m tests.simulation.groups --seeds $(or $(SEEDS),10000) --first $(or $(SHARERS),2000000) --jobs $(or $(JOBS),2)
	$(BIN)/python -m tests.simulation.groups --seeds $(or $(SEEDS),4000) --first $(or $(TRANSACTIONS),3000000) --jobs $(or $(JOBS),2)
	$(BIN)/python -m tests.simulation.groups --seeds $(or $(SEEDS),4000) --first $(or $(COMPACTED),4000000) --jobs $(or $(JOBS),2)
	$(BIN)/python -m tests.simulation.controller --seeds 500 --first $(or $(FIRST),0) --fresh $(or $(FRESH),500) --jobs $(or $(JOBS),2)
	ANABRANCH_THOROUGH=1 $(BIN)/pytest $(PYTEST) tests/properties $$(grep -ril --include='*.py' 'import thorough' tests/simulation tests/unit)
	$(BIN)/python -m tests.mutations

soak: $(READY)  ## groups of ours and of stock clients through 100 resizes, with members and brokers killed: make soak MINUTES=30
	$(BIN)/python -m tests.soak.run --minutes $(or $(MINUTES),30) --resizes $(or $(RESIZES),100)

crash: $(READY) kernels  ## a broker killed a thousand times while clients write, resize, commit, compact, create and delete: make crash KILLS=1000 SEED=7
	$(BIN)/python -m tests.crash.loop $(if $(SEED),--seed $(SEED)) --kills $(or $(KILLS),1000)

fuzz: $(READY) kernels  ## a million hostile batches and frames, the longest array of each API, 10,000 blocks scattered in checked memory, 2,000 damaged directories of logs, 2,000 damaged files of brokers, 6,300 bad connections: make fuzz SEED=7 COUNT=1000000
	$(BIN)/python -m tests.fuzz.batches $(if $(SEED),--seed $(SEED)) --count $(or $(COUNT),1000000)
	$(BIN)/python -m tests.fuzz.frames $(if $(SEED),--seed $(SEED)) --count $(or $(COUNT),1000000)
	$(BIN)/python -m tests.fuzz.arrays
	$(BIN)/python -m tests.fuzz.scatter $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.fuzz.storage 2000
	$(BIN)/python -m tests.fuzz.directories 2000 $(SEED)
	$(BIN)/python -m tests.end_to_end.test_many_connections 1000 5000 300

conformance: $(READY) java  ## groups with every kind of member, where `make test` takes one of each library; the long end-to-end tests
	ANABRANCH_ALL_KINDS=1 $(BIN)/pytest $(PYTEST) tests/conformance
	ANABRANCH_THOROUGH=1 $(BIN)/pytest $(PYTEST) $$(grep -il thorough tests/end_to_end/*.py tests/spark/*.py)

lock:  ## pin the dependencies of pyproject.toml, with hashes
	$(BIN)/uv pip compile pyproject.toml --extra dev --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --no-header --python-version 3.11 --quiet --output-file requirements.lock

clean:
	rm -rf $(VENV) .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis
