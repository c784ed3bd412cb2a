# Everything runs in the project's own virtual environment, made on first use. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
  command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
FUZZ_SECONDS ?= 600
QUEUE_STEPS ?= 100000

.DEFAULT_GOAL := help
.PHONY: help demo test check unit test-kube e2e fuzz soak states bench quality docs metrics-page clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/.base:
	@test -n "$(PYTHON)" || { echo "Fairlead needs Python 3.11 or newer; none was found. Set PYTHON=/path/to/python3."; exit 1; }
	@echo "==> making a virtual environment in $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "Python's venv module is missing. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.run: $(VENV)/.base pyproject.toml
	@echo "==> installing Fairlead and what it needs (once)"
	@$(BIN)/python -m pip install --disable-pip-version-check --only-binary :all: -e '.[report]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml
	@echo "==> installing Fairlead with its test tools (once)"
	@$(BIN)/python -m pip install --disable-pip-version-check --only-binary :all: -e '.[dev]'
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run ## the main job: real Envoy, 8 stub replicas, round robin against Fairlead (about 3 minutes)
	@$(BIN)/fairlead demo

test: check unit ## all checks and tests but those of test-kube

check: $(VENV)/.dev ## ruff, mypy, import contracts, the documentation: its commands, links and configurations, its site
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: $(VENV)/.dev ## the documentation as a site in out/site, with the pages that are written from the program
	$(BIN)/python tools/write_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open out/site/index.html"

unit: $(VENV)/.dev
	$(BIN)/python -m pytest

test-kube: $(VENV)/.dev ## against a real kube-apiserver, which Go builds once (about six minutes); the Helm chart and the image
	@$(BIN)/python tests/kube/support/kr_build.py --find-go || $(BIN)/python -m pip install --disable-pip-version-check --only-binary :all: -e '.[kube]'
	@$(BIN)/python tests/kube/support/kr_build.py
	$(BIN)/python -m pytest tests/kube -q

fuzz: $(VENV)/.dev ## every fuzzer of tests/fuzz for FUZZ_SECONDS (default 600) each, one after the other
	FAIRLEAD_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest tests/fuzz -q -s -o faulthandler_timeout=$$(($(FUZZ_SECONDS) + 300))

e2e: $(VENV)/.dev ## whole product against the real Envoy: bytes, leases, kills (about two minutes)
	$(BIN)/python -m pytest tests/e2e -q

soak: $(VENV)/.dev ## 10,000 streams through every safe pair of modes, byte by byte
	FAIRLEAD_SOAK_STREAMS=10000 $(BIN)/python -m pytest tests/e2e/test_byte_safety.py -q -s

states: $(VENV)/.dev ## flow control, eviction and remote schedulers as state machines, QUEUE_STEPS (default 100000) random steps each
	FAIRLEAD_QUEUE_STEPS=$(QUEUE_STEPS) $(BIN)/python -m pytest tests/property/test_queues_model.py tests/property/test_flow_pipeline.py -q -o faulthandler_timeout=3600

bench: $(VENV)/.dev ## the benchmarks behind docs/benchmarks.md
	@for b in decision parse tokens idle transport flow kv indexer kube metrics journal extproc remote shadows dashboard; do echo "== bench/$$b.py"; $(BIN)/python bench/$$b.py || exit 1; done

quality: $(VENV)/.dev ## policies side by side in the simulator, docs/policies.md; TRACES=directory with the published traces
	$(BIN)/python bench/quality.py --out out/quality --docs docs $(if $(TRACES),--traces $(TRACES))

metrics-page: $(VENV)/.dev ## write docs/metrics.md anew, from the code
	$(BIN)/python -m fairlead.observe.reference > docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md

clean: ## remove the virtual environment, caches and out/
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
