# `make serve` answers on http://127.0.0.1:8000, `make test` runs every test. Both set up what they
# need the first time: a virtual environment in .venv with the versions of requirements/lock.txt, and
# for the tests one in .venv-clients with those of requirements/clients.txt.
#
#   make PYTHON=/path/to/python3.12 …   another interpreter than the one found
#   make serve ARGS="--port 9000"       more options for the command behind a target
#   make VENV=/tmp/env …                another place for the virtual environment
#   PIP_EXTRA_INDEX_URL=… make …        PyTorch's index of CPU builds keeps 4 GB of CUDA out of .venv

SHELL := /bin/sh
VENV ?= .venv
CLIENTS ?= .venv-clients
MODEL ?= smollm2-135m-instruct
PYTHON ?=
ARGS ?=

# Installed before everything else: a range in another requirement would bring a different build.
TORCH := torch==2.13.0
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
# `make test JOBS=0` runs all tests in one process, which shows a test's output at once.
JOBS ?= logical
EXTRAS := worker,embedded,postgres,loadtest,dev

# Sets $$python to an interpreter that can make the environment, or ends with one sentence.
define find_python
usable='import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))'; python=; \
for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
  if "$$candidate" -c "$$usable" >/dev/null 2>&1; then python=$$candidate; break; fi; \
done; \
if [ -z "$$python" ]; then \
  echo "tpugate needs Python 3.11 or newer with the venv module$(if $(PYTHON),; PYTHON=$(PYTHON) is not one,; install python3.11 (Debian: python3.11-venv) or name one: make PYTHON=/path/to/python)." >&2; \
  exit 1; \
fi
endef

.PHONY: help serve test clients lint format validate lock loadtest bench bench-gateway clean
.PHONY: lint-style lint-format lint-types lint-imports
.PHONY: validate-images validate-compose validate-kubernetes

help: ## What can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

serve: $(VENV)/.installed ## Start everything on this machine and answer on port 8000
	@exec $(VENV)/bin/tpugate serve --model $(MODEL) $(ARGS)

test: $(VENV)/.installed $(CLIENTS)/.installed ## Run every test
	@exec $(VENV)/bin/python -m pytest -n $(JOBS) --maxprocesses 4 --dist loadscope --no-loadscope-reorder $(ARGS)

clients: $(CLIENTS)/.installed ## Set up the clients that tests/clients/ runs against a server

lint: lint-style lint-format lint-types lint-imports ## Style, formatting, types, import contracts
lint-style: $(VENV)/.installed
	$(VENV)/bin/ruff check .
lint-format: $(VENV)/.installed
	$(VENV)/bin/ruff format --check .
lint-types: $(VENV)/.installed
	$(VENV)/bin/mypy
lint-imports: $(VENV)/.installed
	$(VENV)/bin/lint-imports

format: $(VENV)/.installed ## Rewrite the sources in the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

validate: validate-images validate-compose validate-kubernetes ## Check deploy/, offline
validate-images: $(VENV)/.installed
	$(VENV)/bin/hadolint --config deploy/hadolint.yaml deploy/gateway.Dockerfile deploy/worker.Dockerfile
validate-compose: $(VENV)/.installed
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
validate-kubernetes: $(VENV)/.installed
	$(VENV)/bin/kubernetes-validate --strict --quiet deploy/kubernetes/*.yaml

loadtest: $(VENV)/.installed ## Locust against a running server (make loadtest ARGS="--host …")
	@exec $(VENV)/bin/locust -f loadtests/locustfile.py --headless $(ARGS)

bench: $(VENV)/.installed ## Throughput, latency, memory and start-up of the default model
	@exec $(VENV)/bin/python -m benchmarks.serve $(ARGS)

bench-gateway: $(VENV)/.installed ## What gateway, queue and worker process add to a request
	@exec $(VENV)/bin/python -m benchmarks.gateway $(ARGS)

lock: ## Resolve pyproject.toml anew and write requirements/lock.txt
	@set -e; $(find_python); fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	"$$python" -m venv "$$fresh"; \
	pip="$$fresh/bin/python -m pip --disable-pip-version-check"; \
	$$pip install --quiet $(TORCH); \
	$$pip install --quiet '.[$(EXTRAS)]'; \
	{ sed -n '/^#/p' requirements/lock.txt; \
	  $$pip freeze --exclude tpugate | sed 's/^\([^ ]*==[^ +]*\)+[a-z0-9.]*/\1/'; \
	} > "$$fresh/lock.txt"; \
	cp "$$fresh/lock.txt" requirements/lock.txt

clean: ## Remove the virtual environment and what builds and checks left here
	@echo "Models and compiled programs stay in $${TPUGATE_CACHE_DIR:-~/.cache/tpugate}; delete that folder to remove them too."
	rm -rf $(VENV) $(CLIENTS) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# Stamps, not phony targets: the second `make` starts at once.
$(VENV)/.requirements: requirements/lock.txt
	@if ! $(PIP) --version >/dev/null 2>&1; then $(find_python); \
	  echo "Setting up $(VENV) with $$python (once, a few minutes)" >&2; \
	  "$$python" -m venv --clear $(VENV); fi
	@$(PIP) install --quiet $(TORCH)
	@$(PIP) install --quiet --requirement requirements/lock.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements pyproject.toml
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(CLIENTS)/.installed: requirements/clients.txt
	@$(find_python); echo "Setting up $(CLIENTS) with $$python (once, a minute)" >&2; \
	  "$$python" -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	@touch $@
