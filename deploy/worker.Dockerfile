# syntax=docker/dockerfile:1
# A worker: one replica of one model, on a TPU VM or, through the PJRT shim, on a plain CPU.
#   docker build -f deploy/worker.Dockerfile -t tpugate-worker .
# The TPU path needs no CUDA build of torch. Name an index with PyTorch's CPU builds to keep it out:
#   --build-arg PIP_EXTRA_INDEX_URL=…
FROM python:3.11-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
RUN python -m venv /opt/tpugate
# Alone and first: the largest layer stays while our own code changes.
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/tpugate/bin/pip install torch==2.13.0
COPY requirements/lock.txt requirements/lock.txt
COPY pyproject.toml README.md LICENSE ./
COPY torchtpu torchtpu
COPY models models
COPY workers workers
COPY gateway gateway
COPY cli cli
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/tpugate/bin/pip install --constraint requirements/lock.txt '.[worker]'

FROM python:3.11-slim-bookworm
# The shim for machines without a TPU is compiled at first start.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --create-home --home-dir /var/lib/tpugate tpugate
COPY --from=build /opt/tpugate /opt/tpugate
ENV PATH=/opt/tpugate/bin:$PATH PYTHONUNBUFFERED=1 \
    TPUGATE_CACHE_DIR=/var/lib/tpugate/cache TPUGATE_MODELS_DIR=/var/lib/tpugate/models
USER 10001
WORKDIR /var/lib/tpugate
# Weights and compiled programs: a second start reads both.
VOLUME ["/var/lib/tpugate"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tpugate"]
CMD ["worker", "--model", "smollm2-135m-instruct", "--device", "tpu"]
