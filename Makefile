# The two commands are `make train` and `make test`; both make the environment first.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/installed

# The main job: as small a part of an epoch as ends within five minutes, on two CPU cores as well.
# For a full epoch: make train EXAMPLES=60000 MINUTES=60. On GPUs: make train FLAGS="--strategy=auto"
EXAMPLES ?= 10000
MINUTES ?= 4
FLAGS ?= --strategy=mirrored --num_devices=2 --local_batch_size=32

# Such as BENCH_FLAGS="--models=resnet18 --precisions=float32,bfloat16 --save"; all: --help
BENCH_FLAGS ?=

DEBIAN_FASHION_MNIST := /usr/share/datasets/fashion-mnist

.PHONY: help env data train test test-slow keras-suite lint format notebooks bench bench-clusters \
	bench-serving constraints clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

env: $(INSTALLED) ## the environment in .venv, with every version pinned

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[test,dev,notebooks]' --constraint constraints.txt
	@touch $@

data: ## Fashion-MNIST from Debian's package, where apt and the rights are there
	@if [ ! -d $(DEBIAN_FASHION_MNIST) ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; \
	then apt-get install -y -qq dataset-fashion-mnist > /dev/null 2>&1 \
	  || { apt-get update -qq && apt-get install -y -qq dataset-fashion-mnist; } > /dev/null 2>&1 \
	  || echo "Debian's dataset-fashion-mnist cannot be installed; looking elsewhere"; fi

train: env data ## ResNet-18 on Fashion-MNIST, two replicas, by model.fit
	$(RUN) scripts/train.py --model=resnet18 --dataset=fashion_mnist --fallback_dataset=digits \
	  --examples=$(EXAMPLES) --minutes=$(MINUTES) $(FLAGS)

# Most of a test is one thread that traces graphs: on two cores two processes end sooner.
PYTEST := $(RUN) -m pytest --nbmake --nbmake-timeout=600 \
  --numprocesses=logical --maxprocesses=4 --dist=worksteal --durations=25

test: env ## all tests but the slow ones
	$(PYTEST) -m "not slow" tests

test-slow: env ## the slow tests: jobs of several processes in all ways, and the notebooks
	$(PYTEST) -m slow tests
	$(PYTEST) --numprocesses=0 notebooks

keras-suite: env ## Keras's own tests of training, with kdist's trainer in the place of Keras's
	$(RUN) -m pip install --quiet --editable '.[keras_suite]' --constraint constraints.txt
	$(RUN) scripts/keras_suite.py

lint: env ## format, lint and types, as CI checks them
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: env ## mend what lint says, as far as a tool can
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

notebooks: env ## run the notebooks and keep their output
	$(VENV)/bin/jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb

bench: env ## kdist beside Keras, a loop by hand and PyTorch, in one session
	$(RUN) -m benchmarks.compare_training $(BENCH_FLAGS)

bench-clusters: env ## training on several processes beside its rivals; as root for the slow link
	$(RUN) -m pip install --quiet tf-keras --constraint constraints.txt
	$(RUN) -m benchmarks.compare_clusters $(BENCH_FLAGS)

bench-serving: env ## our server beside its rivals, which get environments of their own
	$(RUN) -m benchmarks.serving_load --prepare
	$(RUN) -m benchmarks.serving_load $(BENCH_FLAGS)

constraints: env ## write the installed versions to constraints.txt
	{ sed '/^[^#]/,$$d' constraints.txt; $(RUN) -m pip freeze --exclude-editable; } > constraints.new
	mv constraints.new constraints.txt

clean: ## remove the environment and what tools left behind; runs/ stays
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
