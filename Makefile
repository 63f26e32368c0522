# make train                  set up .venv, train on synthetic CT, and export to ONNX and TensorRT
# make test                   run the checks and the quick tests (8 minutes on two cores)
# make test-all               run all tests, as CI does (30 minutes)
# make doctor                 check this machine; ARGS="--app spleen" also finds what limits a training
# make docs                   build the documentation into site/
# make ladder APP=spleen      measure each technique, from MONAI's baseline to the default recipe (20 minutes; brats, pathology too)
# make record APP=spleen      measure MONAI's guide against the default recipe, and update docs/benchmarks.md
# make image-test             build the container image, and train, infer and export in it (docker, podman or buildah)
# make clean                  delete .venv and caches
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n logical --dist loadfile
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help train docs doctor ladder record image-test setup setup-dev check test test-all clean
.DEFAULT_GOAL := train

help:
	@sed -n 's/^# make/make/p' Makefile

train: setup
	$(BIN)/python apps/spleen/train.py $(ARGS)

doctor: setup
	$(BIN)/python apps/doctor.py $(ARGS)

docs: setup-dev
	$(BIN)/mkdocs build --strict

ladder: setup-dev
	$(BIN)/python benchmarks/ladder.py $(APP) $(ARGS)

record: setup-dev
	$(BIN)/python benchmarks/record.py $(APP) $(ARGS)

image-test:
	tests/image_test.sh

setup: .venv/installed
setup-dev: .venv/installed-dev

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4) and "Python 3.11.4 or newer is needed: make PYTHON=python3.12")'
	@echo "setting up .venv once: one to a few minutes, 2 GB of disk (5.4 GB with the CUDA build of PyTorch)"
	@command -v nvidia-smi >/dev/null || [ -n "$$PIP_EXTRA_INDEX_URL$$PIP_INDEX_URL" ] || \
		echo "no NVIDIA GPU found; for the small build: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make train"
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[rtx]'
	@# cuCIM reads slides without a GPU, but its dependencies are 2 GB of CUDA packages; with a GPU: pip install -e '.[gpu]'
	@if [ "$$(uname -s)" = Linux ]; then $(INSTALL) --no-deps cucim-cu13 click lazy-loader; fi
	@touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) -e '.[dev,rtx]'
	@touch $@

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(PYTEST) -m "not slow"

test-all: check
	$(PYTEST)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
