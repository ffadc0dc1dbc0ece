# delaylake: `make run` sets all up and shows it at work; `make help` lists the targets.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
CLIENT := clients/python
NODE   := clients/node
KILLS   ?= 50
MINUTES ?= 30
FAULTS  ?= 100
MUTATIONS ?= 1000000
ATTACK_MINUTES ?= 4
# Those that end within some minutes as they are called here; the others, as soak, peers and scale, are long or want arguments.
BENCHMARKS ?= tracker_operations recurring moves keyed control on_time burst cost skeleton release_job unused order idle start pending maintain rebuild engines dashboard
# As many as have 4 GB each, at most three: with more, two cores are full and all is late.
WORKERS ?= $(shell cat /proc/meminfo 2>/dev/null | awk '/^MemAvailable/ {n = int($$2 / 4e6)} END {print (n < 2 ? 2 : n > 3 ? 3 : n)}')
export KILLS MINUTES FAULTS MUTATIONS ATTACK_MINUTES
OTHER_PULSARS := tests/other_systems/pulsar-4.0 tests/other_systems/pulsar-proxy
# Tests start hundreds of processes: what one has compiled, here pytest's assertions, too, is kept for the others.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run test test-long test-fast lint docs bench chaos attack simulate clean lock proto types tools programs pulsars

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name what; do printf '%-9s %s\n' "$$name" "$$what"; done

setup: tools $(VENV)/.stamp ## a .venv with all that is needed, and the JARs; nothing to do when they are there
	@$(PY) -m broker.jvm.jars

run: setup ## the main job on an embedded broker, with a summary that checks itself
	@$(VENV)/bin/delaylake demo

# In the order of tests/conftest.py. Tests wait more than they work: there are more workers than cores.
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: setup programs ## the test suite but its longer half; WORKERS=n, each with about 4 GB
	@$(PYTEST) -m "not chaos and not long"

# These start hundreds of JVMs, brokers and browsers: a few that fail are run once more, and printed with why. Never one
# that saw a message lost, doubled or early.
test-long: setup programs pulsars ## the longer half: crashes for each feature, other systems, browsers
	@$(PYTEST) -m "long and not chaos" --reruns 1 --max-suite-reruns 3 --rerun-except NotExactlyOnceError --rerun-show-tracebacks

test-fast: setup ## what is quick and needs no broker and no Spark, with few examples of each property
	@HYPOTHESIS_PROFILE=fast $(PY) -m pytest tests/unit tests/parity -m "not slow and not long" -n 2 --dist worksteal -p no:schemathesis -p no:anyio -p no:valkey

lint: setup docs ## ruff, mypy, who imports whom, and the docs
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo
	@$(PY) -m mypy --config-file $(CLIENT)/pyproject.toml
	@PYTHONPATH=$(CLIENT)/src $(VENV)/bin/lint-imports --no-logo --config $(CLIENT)/pyproject.toml

docs: setup ## the docs as a site, in .delaylake/site; nothing may be amiss with their links
	@said=$$($(PY) -m zensical build --strict 2>&1) || { echo "$$said" >&2; exit 1; }

bench: setup ## each benchmark prints one JSON object; BENCHMARKS="on_time burst"
	@for name in $(BENCHMARKS); do $(PY) "benchmarks/$$name.py"; done

chaos: setup ## many examples of each property, long crash and soak runs: KILLS=n MINUTES=n FAULTS=n MUTATIONS=n SEED=n
	@HYPOTHESIS_PROFILE=thorough $(PY) -m pytest tests/unit tests/parity -n 2 --dist loadfile
	@$(PY) -m pytest -m chaos -o faulthandler_timeout=0

attack: setup ## everybody sends for the worst beside honest traffic, and figures with bounds: ATTACK_MINUTES=n SEED=n
	@$(PY) -m pytest tests/attack -m "chaos or long" -o faulthandler_timeout=0

# The order of sets is a part of what is simulated.
SIMULATE = PYTHONHASHSEED=0 $(PY) $(if $(COVERAGE),-m coverage run) -m tests.simulation --seed $(or $(SEED),0) \
  --faults $(if $(filter file,$(origin FAULTS)),20000,$(FAULTS)) --minutes $(MINUTES) --processes $(or $(PROCESSES),2) --rates $(or $(RATES),usual) \
  --output $(or $(OUTPUT),text) $(if $(PROGRESS),--progress $(PROGRESS))

simulate: setup ## the service in one thread with a simulated clock, each failure by its seed: SEED=n FAULTS=n MINUTES=n PROCESSES=n PROGRESS=file OUTPUT=json COVERAGE=1
	@$(if $(COVERAGE),rm -f .delaylake/coverage*)
	@$(SIMULATE)
	@$(if $(COVERAGE),$(PY) -m coverage combine --quiet && $(PY) -m coverage report)

clean: ## all that was made here, but not the cache of JARs
	@rm -rf $(VENV) .delaylake .cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log $(NODE)/node_modules $(NODE)/dist $(NODE)/LICENSE clients/java/*/target
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

COMPILE = $(VENV)/bin/uv pip compile --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-package delaylake-client --no-annotate --quiet

lock: setup ## what is locked, and the JARs' hashes, anew from pyproject.toml and the POMs
	@$(PY) -m pip install --quiet uv
	@$(COMPILE) pyproject.toml --group dev -o requirements.lock
	@$(COMPILE) --group pyproject.toml:build -c requirements.lock -o requirements-build.lock
	@$(COMPILE) tests/other_systems/bullmq.in -o tests/other_systems/bullmq.lock
	@$(COMPILE) tests/other_systems/oldest.in -o tests/other_systems/oldest.lock
	@$(PY) -m broker.jvm.jars record
	@$(PY) -m broker.jvm.jars record $(OTHER_PULSARS)

# The client's code runs with older protobufs, too (tests/unit/clients/test_oldest_libraries.py): it refuses none of them.
proto: setup ## the Python code of proto/*.proto
	@$(PY) -m grpc_tools.protoc -Iproto --python_out=tracker/wire --pyi_out=tracker/wire $(filter-out proto/pulsar.proto,$(wildcard proto/*.proto))
	@$(PY) -m grpc_tools.protoc -Iproto --python_out=broker/protocol/wire --pyi_out=broker/protocol/wire proto/pulsar.proto
	@$(PY) -m grpc_tools.protoc -Iproto --python_out=$(CLIENT)/src/delaylake/wire --pyi_out=$(CLIENT)/src/delaylake/wire \
	  proto/delaylake.proto
	@sed -i '/^_runtime_version\.Validate/,/^)/d; / runtime_version as /d' $(CLIENT)/src/delaylake/wire/delaylake_pb2.py

types: setup programs ## the types of the client for Node, of what the admin API says of itself
	@mkdir -p .delaylake
	@PYTHONPATH=. $(PY) $(NODE)/openapi.py > .delaylake/openapi.json
	@npm --silent --prefix $(NODE) run types -- $(CURDIR)/.delaylake/openapi.json --output $(CURDIR)/$(NODE)/src/openapi.ts

# One line that names all that is missing.
tools:
	@missing=(); \
	if [ ! -e $(VENV)/.stamp ]; then \
	  $(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    || missing+=("Python 3.11+ with venv (PYTHON=... names another than $(PYTHON))"); \
	fi; \
	java=$${JAVA_HOME:+$$JAVA_HOME/bin/}java; \
	version=$$("$$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1) || true; \
	[ "$${version:-0}" -ge 17 ] || missing+=("JDK 17+"); \
	command -v mvn >/dev/null || missing+=("Maven"); \
	if [ $${#missing[@]} -gt 0 ]; then \
	  (IFS=,; echo "error: please install $${missing[*]}" | sed 's/,/, /g' >&2); exit 1; \
	fi

# Chromium, in which the dashboard is tested, and RabbitMQ, from which an import is; RUNLEVEL keeps its server from being
# started; the oldest libraries that the Python client takes; and with Node what its client is built with. Where they
# can't be had those tests are skipped, but fail if CI is set. Without Sidekiq and BullMQ tests are skipped.
programs:
	@missing=(); \
	command -v chromium >/dev/null || missing+=(chromium); \
	[ -e /usr/lib/rabbitmq/bin/rabbitmq-server ] || missing+=(rabbitmq-server); \
	command -v promtool >/dev/null || missing+=(prometheus); \
	command -v sidekiq >/dev/null || missing+=(ruby-sidekiq); \
	if [ $${#missing[@]} -gt 0 ] && command -v apt-get >/dev/null && [ "$$(id -u)" -eq 0 ]; then \
	  export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
	  { apt-get update || true; for one in "$${missing[@]}"; do apt-get install --yes "$$one" || true; done; } </dev/null >&2; \
	fi
	@[ -d $(VENV)/bullmq ] || $(PY) -m pip install --quiet --target $(VENV)/bullmq --require-hashes \
	  -r tests/other_systems/bullmq.lock || rm -rf $(VENV)/bullmq
	@[ $(VENV)/oldest -nt tests/other_systems/oldest.lock ] || { \
	  $(PY) -m pip install --quiet --upgrade --no-deps --require-hashes --target $(VENV)/oldest \
	  -r tests/other_systems/oldest.lock && touch $(VENV)/oldest; } || rm -rf $(VENV)/oldest
	@if command -v npm >/dev/null && ! [ $(NODE)/node_modules/.package-lock.json -nt $(NODE)/package-lock.json ]; then \
	  npm --silent --prefix $(NODE) ci </dev/null >&2 && touch $(NODE)/node_modules/.package-lock.json || rm -rf $(NODE)/node_modules; fi

# With Go a program that uses Pulsar's Go client, without which its test is skipped; what the Java client is built with;
# and the JARs of other versions of Pulsar. Where they can't be had those tests are skipped, but fail if CI is set.
pulsars: setup
	@$(MAKE) --silent $(VENV)/java.stamp || true
	@if command -v go >/dev/null; then go -C tests/go build -o "$(CURDIR)/$(VENV)/go/messages" . || rm -rf $(VENV)/go; fi
	@$(PY) -m broker.jvm.jars $(OTHER_PULSARS) || true

# Maven fetches what tests need when it runs them.
$(VENV)/java.stamp: clients/java/pom.xml $(wildcard clients/java/*/pom.xml)
	@mvn --quiet --batch-mode --file clients/java verify </dev/null >&2
	@touch $@

# PySpark comes as source: without isolation it is built by what is locked, too, and not by what pip fetches for it.
$(VENV)/.stamp: requirements.lock requirements-build.lock pyproject.toml $(CLIENT)/pyproject.toml
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-build.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes --no-build-isolation -r requirements.lock
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e $(CLIENT)
	@touch $@
