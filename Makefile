# `make` or `make help` lists what can be made. Everything runs in .venv, which is made on first use;
# with TORCH=2.11.0, for instance, in an environment of its own with that release of torch.

PYTHON ?= python3
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TYPES := build/types

.DEFAULT_GOAL := help
.PHONY: help venv train findings test table1 table2 table3 table4 gpu wheel lint format types check clean

help: ## show this list
	@grep -E '^[a-z0-9 ]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9 ]+):.*## (.*)/  make \1\t\2/' | expand -t 16

venv: $(INSTALLED) ## install the tool and what its development needs into .venv

# PYTHONWARNINGS=ignore hides the long warning that setuptools prints for every editable installation.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than 3.10: make venv PYTHON=python3.12 (or any from 3.10)"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) # --clear: an earlier attempt may have been interrupted
	@echo "installing into $(VENV) (a few minutes the first time: torch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' $(if $(TORCH),torch==$(TORCH))
	@touch $@

# Trades memory, plentiful here, for time: nothing is recomputed, and zero_bubble fills half of the bubble.
train: $(INSTALLED) ## run the main job: 102 languages into English, cut into 16 cells
	$(BIN)/gpipe-train model=transformer pipeline.K=16 pipeline.remat=never pipeline.schedule=zero_bubble

# One core. Interrupt it when you like: what is done stays done.
findings: $(INSTALLED) ## find the paper's findings in small, piece by piece: what docs/measurements/findings.md lacks
	$(BIN)/python -m benchmarks.findings

PYTEST := $(BIN)/python -m pytest $(if $(SLOW),--slow) $(if $(filter 2,$(SLOW)),--slow)
test: $(INSTALLED) ## run the tests on two cores; SLOW=1: the slow ones too; SLOW=2: all (tests/README.md)
	$(PYTEST) -n 2 --dist worksteal

table1 table2 table3 table4: $(INSTALLED) ## measure one of the paper's tables on this machine, into bench/
	$(BIN)/gpipe-bench table=$(@:table%=%)

gpu: ## prove and measure everything on this machine's GPUs, in at most eight minutes (docs/gpu.md)
	$(PYTHON) -m benchmarks.gpu

# In a small environment of its own, which needs no torch.
wheel: ## build the wheel into dist/
	@rm -rf build/lib build/wheel dist # files of an earlier build would go in
	@$(PYTHON) -m venv build/wheel && build/wheel/bin/python -m pip install --quiet --disable-pip-version-check build 'setuptools>=77,<90'
	@PYTHONWARNINGS=ignore build/wheel/bin/python -m build --wheel --no-isolation > build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	@ls dist/*.whl

lint: $(INSTALLED) ## check the style and the format of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# conf/, models/, data/ and benchmarks/tables/ belong to the package but lie beside it; links in one folder show mypy the whole package.
types: $(INSTALLED) ## check the types
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/gpipe_cli/benchmarks
	@ln -s $(CURDIR)/gpipe_cli/* $(CURDIR)/conf $(CURDIR)/models $(CURDIR)/data $(TYPES)/gpipe_cli/
	@ln -s $(CURDIR)/benchmarks/tables $(TYPES)/gpipe_cli/benchmarks/
	MYPYPATH=$(TYPES) $(BIN)/mypy -p gpipe_cli -p benchmarks

check: lint types test ## lint, types and tests

clean: ## remove build products; .venv and runs stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
