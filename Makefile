# Everything a person does with a checkout. `make demo` needs Python >= 3.11, make and a package
# index, nothing else: it makes .venv, installs into it once, and runs.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
# Python to build .venv from: `make demo PYTHON=/path/to/python3.13`. Empty: the first that is new enough.
PYTHON ?=
# What to pass on: `make test ARGS="-k layering"`, `make demo ARGS=--help`.
ARGS ?=

ROOMS := engine metal scheduler service proto/selfdraft tests

.PHONY: help demo test lint types stubs proto-check proto-accept check install install-dev clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: install ## install if needed, then run the service and a client on the bundled model
	@$(VENV)/bin/selfdraft demo $(ARGS)

test: install-dev ## install if needed, then run the tests
	@$(PY) -m pytest $(ARGS)

lint: install-dev ## ruff: rules and formatting
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: install-dev ## mypy --strict over every room and the tests
	@$(PY) -m mypy --strict $(ROOMS)

stubs: install-dev ## regenerate the protobuf stubs under proto/selfdraft/v1
	@$(PY) proto/generate.py

# Comments are left out of the image: they may change, and a diff of it then means something.
proto-check: install-dev ## buf: the .proto files keep its rules and break nothing in proto/api.binpb
	@$(VENV)/bin/buf lint proto
	@$(VENV)/bin/buf breaking proto --against proto/api.binpb

proto-accept: install-dev ## take the .proto files as they are for what later ones must not break
	@$(VENV)/bin/buf build proto --exclude-source-info -o proto/api.binpb

check: lint types proto-check test ## all of the above, as CI runs it

install: $(VENV)/.installed ## make .venv and install the service
install-dev: $(VENV)/.installed-dev ## the same, with what the tests and linters need

clean: ## remove .venv and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps live inside .venv, so removing .venv is enough to start over; they are as old as the
# last install, so only a change to pyproject.toml installs again.
$(VENV)/.installed: pyproject.toml
	@$(make_venv)
	@echo "installing selfdraft into $(VENV) (once; roughly 100 MB to fetch)"
	@$(call install_into_venv,.)
	@$(openblas_hint)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need into $(VENV)"
	@$(call install_into_venv,'.[dev]')
	@touch $@

# A .venv whose interpreter no longer runs (the system's Python was upgraded) is made anew. uv, where
# there is one, brings a Python along when the machine has none that is new enough.
define make_venv
set -eu; \
if $(PY) -c '' 2>/dev/null; then exit 0; fi; \
rm -rf $(VENV); \
for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python; do \
  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
    found=$$python; break; \
  fi; \
done; \
if [ -n "$(PYTHON)" ] && [ "$${found:-}" != "$(PYTHON)" ]; then \
  echo "PYTHON=$(PYTHON) is not a Python >= 3.11 that runs" >&2; exit 1; \
fi; \
if [ "$$(uname -s)" = Darwin ] && [ -n "$${found:-}" ] \
   && [ "$$("$$found" -c 'import platform; print(platform.machine())')" != arm64 ]; then \
  echo "MLX needs Apple Silicon and an arm64 Python; $$found is not one (Intel Mac or Rosetta)" >&2; \
  exit 1; \
fi; \
if command -v uv >/dev/null 2>&1; then \
  echo "making $(VENV) with uv"; \
  if uv venv --quiet --seed --python "$${found:->=3.11}" $(VENV); then exit 0; fi; \
fi; \
if [ -z "$${found:-}" ]; then \
  echo "selfdraft needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || true)" >&2; \
  echo "  Debian, Ubuntu:  apt-get install python3 python3-venv" >&2; \
  echo "  macOS:           brew install python" >&2; \
  echo "then run make again, or name one: make demo PYTHON=/path/to/python3" >&2; exit 1; \
fi; \
echo "making $(VENV) with $$("$$found" --version)"; \
if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
  echo "$$found has no venv module (Debian and Ubuntu package it apart)" >&2; \
  echo "  apt-get install python3-venv" >&2; exit 1; \
fi; \
"$$found" -m venv $(VENV)
endef

# uv reads its own configuration, not pip's: where only pip knows the way to an index, pip is asked.
# pip says nothing for minutes when quiet and a page when not, so the names it collects are shown.
define install_into_venv
set -eu; rm -f $(VENV)/.done; \
if command -v uv >/dev/null 2>&1 && uv pip install --python $(PY) -e $(1); then exit 0; fi; \
{ $(PY) -m pip install --disable-pip-version-check -e $(1) && touch $(VENV)/.done; } | \
while read -r verb name rest; do \
  if [ "$$verb" = Collecting ]; then printf ' %s' "$${name%%[<>=!~;[]*}"; fi; \
done; echo; \
test -e $(VENV)/.done
endef

# MLX's Linux wheel brings the reference BLAS, which is many times slower than OpenBLAS on a CPU;
# installing one needs root, so that is left to the person.
define openblas_hint
if [ "$$(uname -s)" = Linux ] \
   && ! $(PY) -c 'import ctypes; ctypes.CDLL("libopenblas.so.0")' 2>/dev/null; then \
  echo "hint: no OpenBLAS here, the CPU will be slow (Debian: apt-get install libopenblas0-pthread)"; \
fi
endef
