# Everything runs in the project's own virtual environment, made on first use. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
  command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/tools
# Byte code is kept whatever the environment says: each process would compile the tests anew, for some twenty seconds.
export PYTHONDONTWRITEBYTECODE :=
FUZZ_SECONDS ?= 600
QUEUE_STEPS ?= 100000
# How many tests run at once. A file's tests stay together, the long ones of real processes first.
WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 2
PYTEST = $(BIN)/python -m pytest -q --durations=10 --durations-min=1
# $(call timed,name,command): the command, and then how long it took.
timed = SECONDS=0; $(2); code=$$?; echo "==> $(1): $$((SECONDS / 60)) min $$((SECONDS % 60)) s"; exit $$code

# $(call tests,paths): in WORKERS processes at once; what fails there is run once more, alone, and fails if it fails again.
# Tests of real processes share two cores with each other. One that passes only alone is named, and wants a look.
define tests
$(PYTEST) $(PARALLEL) $(1) || { [ $$? = 1 ] && echo "==> once more, alone: what failed beside other tests" && $(PYTEST) --last-failed --last-failed-no-failures none $(1); }
endef

.DEFAULT_GOAL := help
.PHONY: help demo quick test check names prose unit integration test-hard test-kube rollout e2e fuzz soak soak-hours chaos conformance extension-suite lock dist image image-base sbom audit states bench quality real docs docs-serve metrics-page clean

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

# LOCKED=1: what deploy/locks/ci.txt says, by its hashes, and nothing else.
$(VENV)/.dev: $(VENV)/.base pyproject.toml
	@echo "==> installing Fairlead with its test tools (once)"
ifdef LOCKED
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile --only-binary :all: --require-hashes -r deploy/locks/ci.txt
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
else
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile --only-binary :all: -e '.[dev]'
endif
# On all cores at once: pip takes one. Files that no Python can read are templates.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@$(BIN)/python -m compileall -q src
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run ## the main job: real Envoy, 8 stub replicas, round robin against Fairlead (about 3 minutes)
	@$(BIN)/fairlead demo

quick: $(VENV)/.dev ## format, types, and the unit tests that take no simulation, browser or installation (two minutes)
	@$(call timed,format and lint,$(BIN)/ruff format --check . && $(BIN)/ruff check .)
	@$(call timed,types,$(BIN)/mypy)
	@$(call timed,unit tests,$(PYTEST) $(PARALLEL) tests/unit tests/property -m "not slow and not simulation and not install and not browser")

test: check unit integration ## all checks and tests but those of test-kube (nine minutes on two idle cores)

check: $(VENV)/.dev ## ruff, mypy, import contracts, names, the documentation's English (Vale, built once by Go) and its site
	@$(call timed,format and lint,$(BIN)/ruff format --check . && $(BIN)/ruff check .)
	@$(call timed,types,$(BIN)/mypy)
	@$(call timed,imports,$(BIN)/lint-imports)
	@$(call timed,names,$(BIN)/python tools/names.py)
	@$(call timed,English,$(BIN)/python tools/prose.py)
	@$(call timed,documentation,NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict)

prose: $(VENV)/.dev ## the documentation's English by the rules in styles/Fairlead, its length and reading ease
	@$(BIN)/python tools/prose.py
	@$(BIN)/python tools/readability.py

names: $(VENV)/.dev ## names in the sources that say nothing of what they stand for, where they are new (docs/glossary.md)
	@$(BIN)/python tools/names.py

unit: $(VENV)/.dev ## tests of parts, properties and fuzzers
	@$(call timed,unit tests,$(call tests,tests/property tests/fuzz tests/unit))

# These wait for processes more than they compute.
integration: WORKERS = 4
test-kube test-hard: WORKERS = 3
integration: $(VENV)/.dev ## tests with real processes: Envoy, stubs, browsers, other schedulers
	@$(call timed,integration tests,$(call tests,tests/e2e tests/chaos tests/browser tests/integration))

test-hard: $(VENV)/.dev ## all tests four times: in random order, beside busy cores, on one core, and once more (an hour and more)
	@$(call timed,random order,$(PYTEST) $(PARALLEL) --random-order)
	@$(call timed,busy cores,$(BIN)/python tools/busy.py $(PYTEST) $(PARALLEL))
	@$(call timed,one core,taskset -c 0 $(PYTEST))
	@$(call timed,once more,$(PYTEST) $(PARALLEL))

docs: $(VENV)/.dev ## the documentation as a site in out/site, with the pages, and the schema of the chart's values, that are written from the program
	$(BIN)/python tools/write_reference.py && $(BIN)/python tools/write_values_schema.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open out/site/index.html, or: make docs-serve"

docs-serve: $(VENV)/.dev ## the documentation at http://127.0.0.1:PORT (default 8008), built anew when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve -a 127.0.0.1:$(or $(PORT),8008)

test-kube: $(VENV)/.dev ## against a real kube-apiserver, which Go builds once (about six minutes); the Helm chart and the image
	@$(BIN)/python tests/kube/support/kr_build.py --find-go || $(BIN)/python -m pip install --disable-pip-version-check --only-binary :all: -e '.[kube]'
	@$(call timed,API server,$(BIN)/python tests/kube/support/kr_build.py)
	@$(call timed,tests against the API server,$(call tests,tests/kube))

rollout: $(VENV)/.dev ## all model servers replaced one after the other under 20,000 requests: failures, and the share that finds its cache (two minutes)
	FAIRLEAD_ROLLOUT_REQUESTS=20000 $(PYTEST) tests/kube/test_live_kube.py -k replaced_under_traffic -s -o faulthandler_timeout=1800

fuzz: $(VENV)/.dev ## every fuzzer of tests/fuzz for FUZZ_SECONDS (default 600) each, one after the other
	FAIRLEAD_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest tests/fuzz -q -s -o faulthandler_timeout=$$(($(FUZZ_SECONDS) + 300))

e2e: $(VENV)/.dev ## whole product against the real Envoy: bytes, leases, kills (about two minutes)
	$(BIN)/python -m pytest tests/e2e -q

soak: $(VENV)/.dev ## 10,000 streams through every safe pair of modes, byte by byte
	FAIRLEAD_SOAK_STREAMS=10000 $(BIN)/python -m pytest tests/e2e/test_byte_safety.py -q -s -o faulthandler_timeout=3600

chaos: $(VENV)/.dev ## kills, starvation and attacks at 200 requests a second, against bounds: a table, and out/chaos.json (half an hour); CHAOS="-k uploads" for some
	FAIRLEAD_CHAOS=full FAIRLEAD_CHAOS_JSON=out/chaos.json $(BIN)/python -m pytest tests/chaos -q --ignore tests/chaos/test_soak.py -o faulthandler_timeout=3600 $(CHAOS)

conformance: $(VENV)/.dev ## each MUST of the endpoint picker protocol as a table: Fairlead's in both transports and behind Envoy; PICKER="HOST:PORT ..." for another one
	$(BIN)/python tests/conformance/check_picker.py $(PICKER)

extension-suite: $(VENV)/.dev ## the inference extension's own conformance tests of the data plane, on our picker behind plain Envoys (root; minutes, and five more for Go's first build); TEST=NAME for one
	$(BIN)/python tests/kube/extension_suite.py $(TEST)

soak-hours: $(VENV)/.dev ## HOURS (default 8) of traffic: memory, descriptors, series and leases must not grow; a table, and out/soak.json
	FAIRLEAD_SOAK_HOURS=$(or $(HOURS),8) FAIRLEAD_SOAK_JSON=out/soak.json $(BIN)/python -m pytest tests/chaos/test_soak.py -q -o faulthandler_timeout=0

# In an environment of their own, so that they change nothing of what is tested.
$(TOOLS)/.done: $(VENV)/.base deploy/locks/release.txt
	@$(BIN)/python -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --disable-pip-version-check --only-binary :all: --require-hashes -r deploy/locks/release.txt
	@touch $@

lock: $(TOOLS)/.done ## write deploy/locks anew: versions and hashes of what image, tests and tools are installed from
	@$(TOOLS)/bin/python tools/release.py lock

dist: $(VENV)/.dev ## wheel and sdist in out/dist, the same bytes each time for the same commit
	@rm -rf out/dist
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(BIN)/python -m hatchling build -d out/dist
	@cd out/dist && sha256sum *

# IMAGE_FLAGS: what the builder needs besides, e.g. --platform linux/arm64, or --volume /etc/pip.conf:/etc/pip.conf:ro for an index of your own.
image: $(VENV)/.dev ## the container image IMAGE on BASE (best by digest) by buildah, without a daemon; then it must serve a request
	buildah build --isolation chroot --build-arg BASE=$(or $(BASE),python:3.13-slim) --timestamp $$(git log -1 --format=%ct) \
	  --label org.opencontainers.image.version=$$($(BIN)/fairlead --version | grep -o '[0-9.]*$$') --label org.opencontainers.image.revision=$$(git rev-parse HEAD) \
	  $(IMAGE_FLAGS) -t $(or $(IMAGE),fairlead) .
	FAIRLEAD_IMAGE=$(or $(IMAGE),fairlead) $(PYTEST) tests/kube/test_image.py -k container

image-base: ## a base for `make image` out of Debian's or Ubuntu's packages, where no registry of images can be reached: BASE=localhost/fairlead-base
	@mkdir -p out/base
	mmdebstrap --quiet --variant=minbase --include=python3-venv,python-is-python3,openssl,ca-certificates $$(. /etc/os-release && echo $$VERSION_CODENAME) \
	  out/base/base.tar $(firstword $(wildcard /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list.d/ubuntu.sources /etc/apt/sources.list))
	printf 'FROM scratch\nADD base.tar /\n' > out/base/Dockerfile
	buildah build --quiet --isolation chroot -t fairlead-base out/base

sbom: $(TOOLS)/.done dist ## out/sbom.json (CycloneDX) of what the image installs, and out/provenance.json of what make dist built
	$(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --of JSON -o out/sbom.json deploy/locks/image.txt
	$(BIN)/python tools/release.py provenance

audit: $(TOOLS)/.done ## known vulnerabilities of the image's packages; fails where no index of them can be asked
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes -r deploy/locks/image.txt

states: $(VENV)/.dev ## flow control, eviction, remote schedulers and all states of a request as state machines, QUEUE_STEPS (default 100000) random steps each
	FAIRLEAD_QUEUE_STEPS=$(QUEUE_STEPS) $(BIN)/python -m pytest tests/property/test_queues_model.py tests/property/test_flow_pipeline.py tests/property/test_request_states.py -q -o faulthandler_timeout=3600

bench: $(VENV)/.dev ## the benchmarks behind docs/benchmarks.md
	@for b in decision parse tokens idle transport flow kv indexer kube metrics journal state extproc start remote shadows dashboard; do echo "== bench/$$b.py"; $(BIN)/python bench/$$b.py || exit 1; done

real: $(VENV)/.dev ## policies in turns before two real vLLM servers: installs 3 GB once, then an hour; REAL="--rate 5 --seed 1" for a slice
	$(BIN)/python bench/real.py --install $(or $(REAL),--everything --simulate)

quality: $(VENV)/.dev ## policies side by side in the simulator; TRACES=directory with the published traces, SET=all for a release, SET=drawn for 24 scenarios drawn at random
	$(BIN)/python bench/quality.py --set $(or $(SET),development) --out out/quality --docs docs $(if $(TRACES),--traces $(TRACES))

metrics-page: $(VENV)/.dev ## write docs/metrics.md anew, from the code
	$(BIN)/python tools/write_metrics_page.py > docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md

clean: ## remove the virtual environment, caches and out/
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
