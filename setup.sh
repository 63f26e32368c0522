#!/usr/bin/env bash
# setup.sh [EXTRAS]: create .venv and install the project into it (default extras: rtx), with uv if it is installed,
# else with pip. A machine without an NVIDIA GPU gets the CPU build of PyTorch from PyTorch's own index, unless pip is
# configured to use another index, or PyTorch's cannot be reached: then the build is the one that pip finds.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3} extras=${1:-rtx} cpu=https://download.pytorch.org/whl/cpu

reachable() {
    "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$1" 2>/dev/null
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11, 4) and "Python 3.11.4 or newer is needed: make PYTHON=python3.12")'
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv
configured=$(.venv/bin/python -m pip config list | grep -E 'index|find-links' || true)
build="the build of PyTorch that pip finds, 2.1 GB of disk for CPUs, 5.4 GB with CUDA"
if nvidia-smi >/dev/null 2>&1; then
    build="the CUDA build of PyTorch, 5.4 GB of disk"
elif [ -z "$configured" ] && reachable "$cpu/torch/"; then
    build="no NVIDIA GPU found: the CPU build of PyTorch, 2.1 GB of disk"
    export PIP_EXTRA_INDEX_URL=$cpu UV_TORCH_BACKEND=cpu
fi
echo "setting up .venv [$extras], once, in one to a few minutes: $build"
install() {  # with uv, but it does not read how pip is configured
    if [ -z "$configured" ] && command -v uv >/dev/null; then
        uv pip install --quiet --python .venv/bin/python -c constraints.txt "$@" && return
        echo "uv failed; trying pip"
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"
}

install -e ".[$extras]"
# cuCIM reads slides without a GPU, but its dependencies are 2 GB of CUDA packages; with a GPU: pip install -e '.[gpu]'
if [ "$(uname -s)" = Linux ]; then install --no-deps cucim-cu13 click lazy-loader; fi
