# Trains the spleen app, on a GPU where the container is given one (docker run --gpus all), else on the CPU:
#   docker build -t medspeed .
#   mkdir -p runs store && docker run --rm --gpus all --ipc host --user "$(id -u):$(id -g)" -e HOME=/tmp \
#     -v "$PWD/runs:/app/runs" -v "$PWD/store:/store" -v "$PWD/data:/app/data:ro" medspeed \
#     --store /store --data data/Task09_Spleen
ARG BASE_IMAGE=python:3.12-slim-bookworm
FROM ${BASE_IMAGE}

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY apps apps
COPY benchmarks benchmarks
COPY common common
COPY data_scripts data_scripts
COPY models models
RUN python3 -m venv /venv \
    && /venv/bin/pip install --no-cache-dir -c constraints.txt -e '.[rtx]' \
    && /venv/bin/pip install --no-cache-dir --no-deps -c constraints.txt cucim-cu13 click lazy-loader \
    && useradd --create-home medspeed \
    && install -d -o medspeed /app/runs

ENV PATH=/venv/bin:$PATH
USER medspeed
ENTRYPOINT ["python", "apps/spleen/train.py"]
