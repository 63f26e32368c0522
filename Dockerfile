# All apps, on a GPU where the container is given one, else on the CPU; docs/own_data.md has the commands.
#   docker build -t medspeed .                                                                        # GPU
#   docker build -t medspeed --build-arg EXTRAS=trt .                                                 # H100, H200: full TensorRT
#   docker build -t medspeed:cpu --build-arg BASE_IMAGE=python:3.12-slim-bookworm .                   # CPU
#   docker run --rm --gpus all medspeed apps/spleen/train.py --help
# A release names its base by digest, as SECURITY.md tells: --build-arg BASE_IMAGE=nvidia/cuda@sha256:...
# Only the driver's side comes from the base: the packages bring CUDA, cuDNN and TensorRT themselves.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04
FROM ${BASE_IMAGE}

# Python's release is the base's choice, so that no version of the package can be named here.
# Triton compiles what launches a kernel when that is first used: hence gcc and the headers.
# hadolint ignore=DL3008
RUN if ! python3 -c "import ensurepip, venv"; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3-dev python3-venv \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --uid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin medspeed \
    && install -d -m 1777 /cache /app/runs

# The dependencies are a layer of their own: it is built again only when one of these two files has changed.
# Where there is no internet, say which index or folder of wheels to take; a build argument stays in the image's
# history, so it is no place for a password.
ARG EXTRAS=rtx
# All packages by their digests. Empty (--build-arg LOCK=) takes constraints.txt, for an index with other builds of torch;
# so does EXTRAS=trt, whose packages fetch their libraries themselves while they are installed.
ARG LOCK=requirements.lock
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
WORKDIR /app
COPY pyproject.toml constraints.txt requirements.lock LICENSE ./
RUN mkdir medspeed \
    && touch README.md medspeed/__init__.py \
    && python3 -m venv /venv \
    && if [ "${EXTRAS}" = rtx ] && [ -n "${LOCK}" ]; then \
        sed -n '/^setuptools==/,/[^\\]$/p' "${LOCK}" >build.lock \
        && /venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r build.lock \
        && rm build.lock \
        && /venv/bin/pip install --no-cache-dir --no-deps --require-hashes --no-build-isolation --use-pep517 -r "${LOCK}" \
        && /venv/bin/pip install --no-cache-dir --no-deps --no-index --no-build-isolation --editable .; \
    else \
        /venv/bin/pip install --no-cache-dir -c constraints.txt --editable ".[${EXTRAS}]" \
        && /venv/bin/pip install --no-cache-dir --no-deps -c constraints.txt cucim-cu13 click lazy-loader; \
    fi

COPY apps apps
COPY benchmarks benchmarks
COPY common common
COPY data_scripts data_scripts
COPY medspeed medspeed
COPY models models
RUN /venv/bin/python apps/sbom.py >sbom.json

# What is kept goes below /cache and /app/runs, what is not below /tmp: the rest may be read-only, and any --user will do.
# A user without an entry in /etc/passwd has no name, and torch asks for one.
ENV PATH=/venv/bin:$PATH \
    HOME=/cache \
    USER=medspeed \
    XDG_CACHE_HOME=/cache/.cache \
    MPLCONFIGDIR=/cache/matplotlib \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    CUPY_CACHE_DIR=/cache/cupy \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
VOLUME ["/cache", "/app/runs"]

ARG BASE_IMAGE
ARG REVISION=unknown
LABEL org.opencontainers.image.title="medspeed" \
      org.opencontainers.image.description="Medical image segmentation from raw scan to TensorRT engine; not for clinical use" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.revision="${REVISION}"

USER 10001:10001
ENTRYPOINT ["python"]
CMD ["apps/spleen/train.py"]
