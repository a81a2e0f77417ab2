# Each target does all its own set-up on a fresh machine: a virtual environment with the pinned versions, then the work.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest

.PHONY: demo test test-oldest format clean

demo: $(VENV)/ready
	$(VENV)/bin/gtp-vit benchmark deit_small_patch16_224 --propagate 8 --batch-size 8

test: $(VENV)/ready
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest

# The oldest versions that pyproject.toml admits.
test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest

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
