# Each target does all its own set-up on a fresh machine: a virtual environment with the pinned versions, then the work.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest

.PHONY: demo page test docs test-oldest package sanitize sanitize-short benchmark format clean

# All methods on the small model inside the package. For a real one:
#   make demo DEMO="--model deit_small_patch16_224 --pretrained --data-dir imagenet/val"
DEMO :=
demo: $(VENV)/ready
	$(VENV)/bin/gtp-vit compare $(DEMO) --output build/demo

# A web page to play with, on this machine only; Ctrl+C ends it. For a real model: make page PAGE="vit_tiny_patch16_224 --pretrained"
PAGE :=
page: $(VENV)/ready
	$(VENV)/bin/gtp-vit demo $(PAGE)

test: $(VENV)/ready
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

# The documentation as a site: open build/site/index.html. A broken link ends the build.
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

# The oldest versions that pyproject.toml admits.
test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal

# Source distribution and wheel, each installed into an empty environment and tried there.
package: $(VENV)/ready
	.ci/package $(VENV)

# The native kernels on builds that find wrong memory accesses and undefined behaviour. The short one runs every kernel
# of every instruction set once, for CI; the long one runs their property tests as well.
SANITIZED := build/sanitize
SANITIZERS := LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16
NAME_OF := $(VENV)/bin/python src/gtp_vit/kernels/sources.py
$(SANITIZED)/built: $(VENV)/ready
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	for set in avx512:"-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma" avx2:"-mavx2 -mfma" portable:""; do \
	  g++ -g -O1 -std=c++17 -ffp-contract=fast -fPIC -shared -Wall -Wextra -Werror -Wno-psabi -fno-omit-frame-pointer \
	    -fsanitize=address,undefined -fno-sanitize-recover=all $${set#*:} \
	    src/gtp_vit/kernels/cpp/api.cpp -o $(SANITIZED)/$$($(NAME_OF) $${set%%:*}) || exit 1; \
	done
	touch $@

sanitize-short: $(SANITIZED)/built
	@if $(SANITIZERS) $(VENV)/bin/python tests/overrun.py $(SANITIZED) 2>$(SANITIZED)/overrun.log || \
	  ! grep -q heap-buffer-overflow $(SANITIZED)/overrun.log; then \
	  cat $(SANITIZED)/overrun.log; echo "the sanitizer does not see an overrun: it proves nothing"; exit 1; fi
	$(SANITIZERS) $(VENV)/bin/python -m pytest tests/test_builds.py tests/test_native_checks.py -p no:cacheprovider \
	  --native-folder $(SANITIZED) -k "every_instruction_set or outside_the_grid"

sanitize: sanitize-short
	for capability in avx512 avx2 default; do \
	  ATEN_CPU_CAPABILITY=$$capability $(SANITIZERS) \
	  $(VENV)/bin/python -m pytest tests/test_kernels.py tests/test_gtp_plus.py -p no:cacheprovider \
	    --native-folder $(SANITIZED) -k "twin or exact or same_entries or misleading or nan or bfloat16 or many_tokens" || exit 1; \
	done

# How close to the price of slicing? Takes a quarter of an hour.
benchmark: $(VENV)/ready
	$(VENV)/bin/python benchmarks/speed.py --memory --json build/speed.json

format: $(VENV)/ready
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) $(OLDEST)

# What the native libraries are built from: a change of it installs the package again.
NATIVE := setup.py src/gtp_vit/kernels/sources.py $(wildcard src/gtp_vit/kernels/cpp/*)

$(VENV)/ready: pyproject.toml constraints.txt $(NATIVE)
	$(call install,$(VENV),constraints.txt)

$(OLDEST)/ready: pyproject.toml constraints-oldest.txt $(NATIVE)
	$(call install,$(OLDEST),constraints-oldest.txt)

define install
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(1)/bin/pip install --quiet --constraint $(2) --group dev --editable .
	touch $@
endef
