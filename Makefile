# The two commands are `make train` and `make test`; both make the environment first.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Files that tell which extras are installed: .venv/installed for none, .venv/installed-test, …
INSTALLED := $(VENV)/installed
# uv, where it is there, installs several times as fast as pip. pip compiles all files, of which few are
# ever imported; Python compiles those itself.
INSTALL := $(if $(shell command -v uv),uv pip install --python $(RUN),$(RUN) -m pip install --no-compile) --quiet

# Many images of containers set it. Each process would then compile TensorFlow's Python files again,
# which takes 7 of the 9 CPU seconds of its import.
unexport PYTHONDONTWRITEBYTECODE

# The main job. On GPUs it is an epoch of ResNet-18; on CPUs LeNet, which reaches the highest accuracy
# within three minutes on slow ones. --minutes takes fewer examples where the machine is slower still.
GPUS := $(shell nvidia-smi -L 2> /dev/null)
FLAGS ?= $(if $(GPUS),--model=resnet18 --strategy=mirrored --local_batch_size=128,--model=lenet \
  --epochs=5 --minutes=2.5 --strategy=mirrored --num_devices=2 --local_batch_size=32)
# The job of "Dive into Deep Learning", section 13.6, on all GPUs; on two cores it takes hours.
RESNET18_FLAGS ?= --epochs=10 --learning_rate=0.1 --local_batch_size=256

# Such as BENCH_FLAGS="--models=resnet18 --precisions=float32,bfloat16 --save"; all: --help
BENCH_FLAGS ?=

DEBIAN_FASHION_MNIST := /usr/share/datasets/fashion-mnist

.PHONY: help env data train resnet18 test test-unit test-tensorflow test-slow test-exhaustive \
	test-older fuzz adversary keras-suite doctest lint format notebooks docs docs-test bench bench-clusters \
	bench-serving gpu constraints clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

env: $(INSTALLED) ## the environment in .venv, with what training needs, every version pinned

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@echo "installing kdist into $(VENV): about 2.5 GB, one to three minutes"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable . --constraint constraints.txt
	@$(RUN) -c "import kdist.callbacks, keras"  # shows that it works, and compiles what training imports
	@touch $@

# Tests, lint, and notebooks need more; each target names the extra that it needs.
$(INSTALLED)-%: $(INSTALLED)
	$(INSTALL) --editable '.[$*]' --constraint constraints.txt
	@touch $@

data: ## Fashion-MNIST from Debian's package, where apt and the rights are there
	@if [ ! -d $(DEBIAN_FASHION_MNIST) ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; \
	then apt-get install -y -qq dataset-fashion-mnist > /dev/null 2>&1 \
	  || { apt-get update -qq && apt-get install -y -qq dataset-fashion-mnist; } > /dev/null 2>&1 \
	  || echo "Debian's dataset-fashion-mnist cannot be installed; looking elsewhere"; fi

train: env data ## a model on Fashion-MNIST, two replicas, by model.fit: within three minutes
	$(RUN) -m kdist train --dataset=fashion_mnist --fallback_dataset=digits --fallback_epochs=20 $(FLAGS)

resnet18: env data ## ResNet-18 on all of Fashion-MNIST, ten epochs
	$(RUN) -m kdist train --model=resnet18 --dataset=fashion_mnist $(RESNET18_FLAGS)

# Most tests trace graphs in one thread, and slow ones often wait for the processes that they start, so
# three of them share two cores. More do not fit into 24 GB of memory.
PYTEST := $(RUN) -m pytest --numprocesses=3 --dist=worksteal --durations=40

# Two notebooks at a time take 3 GB. They follow the slow tests, since together they can fill 24 GB.
# Their processes import TensorFlow in half the time, as those of tests do.
NOTEBOOKS := PYTHONPATH=$(CURDIR)/tests/site $(RUN) -m pytest --numprocesses=2 --dist=worksteal \
  -p nbmake.pytest_plugin --nbmake --nbmake-timeout=600 --durations=0 notebooks

test: test-unit test-tensorflow ## all tests but the slow ones

test-unit: $(INSTALLED)-test ## tests that need no TensorFlow and no other process
	$(PYTEST) -m unit tests/unit

test-tensorflow: $(INSTALLED)-test ## tests that use TensorFlow, and short ones that start processes
	$(PYTEST) -m tensorflow --ignore=tests/unit tests

test-slow: $(INSTALLED)-test ## jobs of several processes, long trainings, and the notebooks
	$(PYTEST) -m "slow and not exhaustive" tests
	$(NOTEBOOKS)

test-exhaustive: $(INSTALLED)-test ## all cases of the large matrices, before a release
	$(PYTEST) -m exhaustive tests

# The lowest minors of setup.cfg; constraints.txt pins the highest. They are installed next to the
# other packages of .venv, and PYTHONPATH puts them first.
OLDER := tensorflow==2.20.0 keras==3.14.1
OLDER_FOLDER := $(CURDIR)/$(VENV)/older

$(OLDER_FOLDER): $(INSTALLED)
	rm -rf $@
	$(INSTALL) --target $@ --no-deps $(OLDER)

test-older: $(INSTALLED)-test $(OLDER_FOLDER) ## tests of interfaces and equality with the oldest TensorFlow and Keras
	PYTHONPATH=$(OLDER_FOLDER) $(PYTEST) -m tensorflow tests/compat tests/equivalence/test_features.py \
	  -k "test_keras or test_tensorflow or one_device and (EMA or custom or mixed or BatchNorm)"

# Cases that fail are printed; they belong into tests/equivalence/test_random_models.py.
CASES ?= 3000

fuzz: $(INSTALLED)-test ## random models on several devices beside one device: CASES=3000
	KDIST_FUZZ_CASES=$(CASES) KDIST_FUZZ_SHARDS=$$(nproc) $(PYTEST) -m slow --timeout=0 \
	  tests/equivalence/test_random_models.py

adversary: $(INSTALLED)-test ## random requests, mutated models, and changed texts: CASES=3000
	KDIST_FUZZ_CASES=$(CASES) $(RUN) -m pytest --timeout=0 tests/adversary

keras-suite: $(INSTALLED)-test ## Keras's own tests, with kdist's trainer
	$(INSTALL) --editable '.[keras_suite]' --constraint constraints.txt
	$(RUN) scripts/keras_suite.py

# tests/test_schedules.py runs the examples of kdist/schedules.py, which start TensorFlow.
doctest: $(INSTALLED)-test ## examples in docstrings
	$(RUN) -m pytest --quiet --doctest-modules \
	  $$(grep -rlE '^ *>>> ' --include='*.py' kdist | grep -v kdist/schedules.py)

lint: $(INSTALLED)-dev doctest ## format, lint, types, and examples in docstrings, as CI checks them
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	$(RUN) tools/house.py

format: $(INSTALLED)-dev ## mend what lint says, as far as a tool can
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

# TensorFlow's C++ log, which no level of logging hides, goes to the terminal instead of the notebooks.
notebooks: $(INSTALLED)-notebooks ## run the notebooks and keep their output
	$(VENV)/bin/jupyter nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False \
	  --ExecutePreprocessor.extra_arguments=--IPKernelApp.capture_fd_output=False notebooks/*.ipynb

# The site is in build/docs. Links between pages are checked; a warning is an error.
docs: $(INSTALLED)-docs ## the site of the documentation, without network access
	$(RUN) -m sphinx --fail-on-warning --keep-going --builder html docs build/docs

docs-test: $(INSTALLED)-test ## run the programs of all pages
	$(RUN) -m pytest --numprocesses=2 -m "not unit" tests/docs

bench: env ## kdist beside Keras, a loop by hand and PyTorch, in one session
	$(RUN) -m benchmarks.compare_training $(BENCH_FLAGS)

bench-clusters: env ## training on several processes beside its rivals; as root for the slow link
	$(INSTALL) tf-keras --constraint constraints.txt
	$(RUN) -m benchmarks.compare_clusters $(BENCH_FLAGS)

bench-serving: env ## our server beside its rivals, which get environments of their own
	$(RUN) -m benchmarks.serving_load --prepare
	$(RUN) -m benchmarks.serving_load $(BENCH_FLAGS)

# The interpreter that measures; on a machine without an index of packages, name one that imports
# TensorFlow with CUDA, such as GPU_PYTHON=python3. PyTorch and JAX bring other versions of CUDA:
# GPU_FLAGS="--torch_python=PATH --jax_python=PATH" names interpreters of other environments.
GPU_VENV := .venv-gpu
GPU_PYTHON ?= $(GPU_VENV)/bin/python
GPU_FLAGS ?=

$(GPU_VENV)/installed: setup.cfg pyproject.toml constraints.txt
	@echo "installing kdist and CUDA into $(GPU_VENV): about 7 GB"
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --editable '.[gpu,serve]' --constraint constraints.txt
	@touch $@

gpu: $(if $(filter $(GPU_VENV)/%,$(GPU_PYTHON)),$(GPU_VENV)/installed) ## what only a GPU shows, 25 minutes: GPU_FLAGS="--minutes=10 --only=train"
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU_FLAGS)

constraints: $(INSTALLED)-test $(INSTALLED)-dev $(INSTALLED)-notebooks ## write the installed versions to constraints.txt
	{ sed '/^[^#]/,$$d' constraints.txt; $(RUN) -m pip freeze --exclude-editable; } > constraints.new
	mv constraints.new constraints.txt

clean: ## remove the environment and what tools left behind; runs/ stays
	rm -rf $(VENV) $(GPU_VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
