# Each target does all its own set-up on a fresh machine: a virtual environment with the pinned versions, then the work.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest

.PHONY: demo test test-oldest package sanitize benchmark format clean

# All methods on the small model inside the package. For a real one:
#   make demo DEMO="--model deit_small_patch16_224 --pretrained --data-dir imagenet/val"
DEMO :=
demo: $(VENV)/ready
	$(VENV)/bin/gtp-vit compare $(DEMO) --output build/demo

test: $(VENV)/ready
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

# The oldest versions that pyproject.toml admits.
test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal

# Source distribution and wheel, each installed into an empty environment and tried there.
package: $(VENV)/ready
	.ci/package $(VENV)

# The kernels' property tests on a build that finds wrong memory accesses and undefined behaviour.
SANITIZED := build/sanitize
sanitize: $(VENV)/ready
	mkdir -p $(SANITIZED)
	for set in avx512:"-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma" avx2:"-mavx2 -mfma" portable:""; do \
	  g++ -g -O1 -std=c++17 -ffp-contract=fast -fPIC -shared -Wall -Wextra -Werror -Wno-psabi -fno-omit-frame-pointer \
	    -fsanitize=address,undefined -fno-sanitize-recover=all $${set#*:} \
	    src/gtp_vit/kernels/cpp/api.cpp -o $(SANITIZED)/_$${set%%:*}.so || exit 1; \
	done
	for capability in avx512 avx2 default; do \
	  ATEN_CPU_CAPABILITY=$$capability LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 $(VENV)/bin/python -m pytest tests/test_kernels.py tests/test_gtp_plus.py -p no:cacheprovider \
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

$(VENV)/ready: pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt)

$(OLDEST)/ready: pyproject.toml constraints-oldest.txt
	$(call install,$(OLDEST),constraints-oldest.txt)

define install
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(1)/bin/pip install --quiet --constraint $(2) --group dev --editable .
	touch $@
endef
