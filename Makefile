# make train                  set up .venv, train on synthetic CT, and export to ONNX and TensorRT
# make test                   run the checks and the quick tests (8 minutes on two cores)
# make test-all               run all tests, as CI does (30 minutes)
# make doctor                 check this machine; ARGS="--app spleen" also finds what limits a training
# make docs                   build the documentation into site/
# make ladder APP=spleen      measure each technique, from MONAI's baseline to the default recipe (20 minutes; brats, pathology too)
# make record APP=spleen      measure MONAI's guide against the default recipe, and print the table for docs/benchmarks.md
# make image-test             build the container image, and train, infer and export in it (docker, podman or buildah)
# make clean                  delete .venv and caches
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n logical --dist loadfile

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
	$(BIN)/python benchmarks/compare.py $(APP) --output benchmarks/records $(ARGS)

image-test:
	tests/image_test.sh

setup: .venv/installed
setup-dev: .venv/installed-dev

.venv/installed: pyproject.toml constraints.txt setup.sh
	@PYTHON=$(PYTHON) ./setup.sh
	@touch $@

.venv/installed-dev: .venv/installed
	@PYTHON=$(PYTHON) ./setup.sh dev,rtx
	@touch $@

check: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPY_NUM_WORKERS=auto $(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(PYTEST) -m "not slow"

test-all: check
	$(PYTEST)

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
