# Two commands: `make conformance` judges the bundled engines, `make test` tests the project itself.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# A world per size; 3 for shards of unequal size, 4 for two replicas of two shards.
WORLDS := threads:1 threads:2 threads:3 threads:4 processes:2

.PHONY: setup conformance conformance-all catalogue handwritten test twins versions models engines upstream lint docs clean

setup: $(STAMP)

# Without a GPU torch's CPU build, some 200 MB instead of several GB. `make setup TORCH_INDEX=` takes the default build.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

$(STAMP): pyproject.toml constraints.txt
	@echo "setup: a virtual environment in $(VENV); torch $(if $(TORCH_INDEX),for the CPU,with its default build); the packages of pyproject.toml"
	$(PYTHON) -m venv $(VENV)
	@$(if $(TORCH_INDEX),$(BIN)/pip install --quiet --retries 0 --timeout 10 --index-url $(TORCH_INDEX) \
		"$$(grep '^torch==' constraints.txt)" || echo "setup: no CPU build from $(TORCH_INDEX); taking the default build")
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# The cases that tell most, on all bundled engines, as threads and as processes: a minute and a half on two cores.
conformance: $(STAMP)
	$(BIN)/shardproof run --within 65s --world threads:2 --world threads:4 --world processes:2 -n 2

# Two suites whole, in five worlds.
conformance-all: $(STAMP)
	$(BIN)/shardproof run --suite smoke --suite parity $(foreach world,$(WORLDS),--world $(world)) -n 2

# Every case on two ranks, under all watches that a CPU has: some twenty minutes for each bundled engine on two cores.
catalogue: $(STAMP)
	$(BIN)/shardproof run --world threads:2 --thorough -n 2

# Three workers keep two cores busy, because many tests wait for processes. One that dies is not replaced: the run would
# never end (pytest-xdist#1378, released in no version yet), and would not say which test it died in.
test: $(STAMP)
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m "not twin"

# What is not of combinations, on two ranks and on four: after each change of a law, of the training loop or of an engine,
# because `test` judges a sample. Some twenty-five minutes for each bundled engine on two cores.
handwritten: $(STAMP)
	$(BIN)/shardproof run --world threads:2 --world threads:4 -k "not combinations" -n 2

# What the reference engine's tests say of torch's own engine behind the same interface.
twins: $(STAMP)
	$(BIN)/pytest tests/reference -n 2 --dist loadfile --max-worker-restart 0 -m twin

# The catalogue on each release of torch: an environment each, several gigabytes, an hour and a half.
versions: $(STAMP)
	$(BIN)/python -m campaigns.torch_versions

# Real models at tiny sizes, in an environment of their own with transformers and timm: about half an hour.
models: $(STAMP)
	$(BIN)/python -m campaigns.real_models

# Engines of other packages beside the bundled ones, an environment for each family: some three hours.
engines: $(STAMP)
	$(BIN)/python -m campaigns.engines $(ENGINES)

# Torch's own tests, which FOLDER has, on its engines and on the reference engine: half an hour for torch 2.13's.
upstream: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m campaigns.upstream_tests $(FOLDER)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages of docs/ and the API as a site that can be read from its files: build/site/index.html.
docs: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	SITE_NAME="Shardproof $$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .venvs conformance build *.egg-info
