# syntax=docker/dockerfile:1
# The gateway: HTTP, accounts, queue. No torch, no model files.
#   docker build -f deploy/gateway.Dockerfile -t tpugate-gateway .
FROM python:3.11-slim-bookworm AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
RUN python -m venv /opt/tpugate
COPY requirements/lock.txt requirements/lock.txt
COPY pyproject.toml README.md LICENSE ./
COPY torchtpu torchtpu
COPY models models
COPY workers workers
COPY gateway gateway
COPY cli cli
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/tpugate/bin/pip install --constraint requirements/lock.txt '.[postgres]'

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/tpugate tpugate
COPY --from=build /opt/tpugate /opt/tpugate
ENV PATH=/opt/tpugate/bin:$PATH PYTHONUNBUFFERED=1 TPUGATE_DATA_DIR=/var/lib/tpugate/data
USER 10001
WORKDIR /var/lib/tpugate
# The secret of the key hashes and, without PostgreSQL, the database.
VOLUME ["/var/lib/tpugate"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tpugate"]
CMD ["gateway", "--host", "0.0.0.0", "--port", "8000"]
