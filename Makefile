# `make help` lists the targets. Each does all its own set-up on a fresh machine: a virtual environment with the pinned
# versions, then the work.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
# As many processes as there are processors, and no more than memory is likely to hold.
PYTEST := $(VENV)/bin/python -m pytest -n logical --maxprocesses 8 --dist worksteal

.PHONY: help demo page test test-slow test-all test-oldest lint docs package sanitize sanitize-short benchmark format clean
.PHONY: environment tools

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{ printf "  make %-15s %s\n", $$1, $$2 }'

demo: environment ## half a minute: GTP, ToMe and GTP+ on a small model in the package, a table and a page
	@$(VENV)/bin/gtp-vit tour --output build/demo

# For a real model: make page PAGE="vit_tiny_patch16_224 --pretrained"
PAGE :=
page: tools ## a web page to play with, on this machine only; Ctrl+C ends it
	$(VENV)/bin/gtp-vit demo $(PAGE)

test: lint ## format, lint, types, and the tests that are not marked slow: 5 to 8 minutes on two cores
	$(PYTEST) -m "not slow"

test-slow: tools ## the tests that `make test` leaves out
	$(PYTEST) -m slow

test-all: lint ## format, lint, types and all tests
	$(PYTEST)

lint: tools ## format, lint and types only
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: tools ## correct format and simple lint findings
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: tools ## the documentation as a site, build/site/index.html; a broken link ends the build
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

test-oldest: ## all tests on the oldest versions that pyproject.toml admits
	@$(PYTHON) .ci/environment.py $(OLDEST) constraints-oldest.txt dev
	$(OLDEST)/bin/python -m pytest -n logical --maxprocesses 8 --dist worksteal

package: tools ## source distribution and wheel, each installed into an empty environment and tried there
	.ci/package $(VENV)

# The native kernels on builds that find wrong memory accesses and undefined behaviour. The short one runs every kernel
# of every instruction set once, for CI; the long one runs their property tests as well.
# What the native libraries are built from.
NATIVE := setup.py src/gtp_vit/kernels/sources.py $(wildcard src/gtp_vit/kernels/cpp/*)
SANITIZED := build/sanitize
SANITIZERS := LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16
NAME_OF := $(VENV)/bin/python src/gtp_vit/kernels/sources.py
$(SANITIZED)/built: $(NATIVE) | tools
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	for set in avx512:"-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma" avx2:"-mavx2 -mfma" portable:""; do \
	  g++ -g -O1 -std=c++17 -ffp-contract=fast -fPIC -shared -Wall -Wextra -Werror -Wno-psabi -fno-omit-frame-pointer \
	    -fsanitize=address,undefined -fno-sanitize-recover=all $${set#*:} \
	    src/gtp_vit/kernels/cpp/api.cpp -o $(SANITIZED)/$$($(NAME_OF) $${set%%:*}) || exit 1; \
	done
	touch $@

sanitize-short: $(SANITIZED)/built ## every kernel of every instruction set once, on a build that finds wrong memory accesses
	@if $(SANITIZERS) $(VENV)/bin/python tests/kernels/overrun.py $(SANITIZED) 2>$(SANITIZED)/overrun.log || \
	  ! grep -q heap-buffer-overflow $(SANITIZED)/overrun.log; then \
	  cat $(SANITIZED)/overrun.log; echo "the sanitizer does not see an overrun: it proves nothing"; exit 1; fi
	$(SANITIZERS) $(VENV)/bin/python -m pytest tests/kernels/test_builds.py tests/kernels/test_native_checks.py -p no:cacheprovider \
	  --native-folder $(SANITIZED) -k "every_instruction_set or outside_the_grid"

sanitize: sanitize-short ## the same, with the kernels' property tests
	for capability in avx512 avx2 default; do \
	  ATEN_CPU_CAPABILITY=$$capability $(SANITIZERS) \
	  $(VENV)/bin/python -m pytest tests/kernels/test_kernels.py tests/methods/test_gtp_plus.py -p no:cacheprovider \
	    --native-folder $(SANITIZED) -k "twin or exact or same_entries or misleading or nan or bfloat16 or many_tokens" || exit 1; \
	done

benchmark: tools ## how close to the price of slicing? A quarter of an hour
	$(VENV)/bin/python benchmarks/speed.py --memory --json build/speed.json

clean: ## remove the environments
	rm -rf $(VENV) $(OLDEST)

environment:
	@$(PYTHON) .ci/environment.py $(VENV) constraints.txt

tools:
	@$(PYTHON) .ci/environment.py $(VENV) constraints.txt dev
