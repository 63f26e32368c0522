# make train   set up the environment and run spleen segmentation from raw volumes to a checked engine
# make doctor  look at the machine; ARGS="--app spleen" says what bounds a training
# make ladder APP=spleen   what each technique is worth, from the baseline to fast; brats and pathology too
# make record APP=spleen   measure the guide against fast, and put the table into the README
# make image-test   build the container image, and train, infer and export in it (docker, podman or buildah)
# make test    checks and tests (8 minutes at most on two cores); make test-all adds the slow ones (30)
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n logical --dist loadfile
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train doctor ladder record image-test setup setup-dev check test test-all clean
.DEFAULT_GOAL := train

train: setup
	$(BIN)/python apps/spleen/train.py $(ARGS)

doctor: setup
	$(BIN)/python apps/doctor.py $(ARGS)

ladder: setup-dev
	$(BIN)/python benchmarks/ladder.py $(APP) $(ARGS)

record: setup-dev
	$(BIN)/python benchmarks/record.py $(APP) $(ARGS)

image-test:
	tests/image_test.sh

setup: .venv/installed
setup-dev: .venv/installed-dev

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	@echo "setting up .venv (about a minute, once)"
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[rtx]'
	@# cuCIM reads slides without a GPU, but asks for 2 GB of CUDA packages; with a GPU: pip install -e '.[gpu]'
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
