# syntax=docker/dockerfile:1
# Builds for linux/amd64 and linux/arm64, from wheels only: nothing is compiled, and pip stays behind.
#   docker buildx build --platform linux/amd64,linux/arm64 -t registry.example.com/fairlead:0.1.0 --push .
# For a base image that cannot change under its name: --build-arg BASE=python@sha256:…
ARG PYTHON=3.13
ARG BASE=python:${PYTHON}-slim

FROM ${BASE} AS build
WORKDIR /src
RUN python -m venv /opt/build && python -m venv --without-pip /opt/fairlead
# What is needed changes less often than the sources: layers of their own. Every file is one whose hash is in the lock.
COPY deploy/locks ./locks
RUN /opt/build/bin/pip install --no-cache-dir --only-binary :all: --require-hashes -r locks/build.txt
# With the extras `tracing` and `replicas`, each loaded only where it is configured.
RUN /opt/build/bin/pip --python /opt/fairlead/bin/python install --no-cache-dir --only-binary :all: --require-hashes -r locks/image.txt
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# The dashboard shows it; src has a link to it.
COPY docs/runbook.md ./docs/runbook.md
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir dist .
RUN /opt/build/bin/pip --python /opt/fairlead/bin/python install --no-cache-dir --no-deps dist/fairlead-*.whl
RUN /opt/fairlead/bin/python -m compileall -q /opt/fairlead/lib

FROM ${BASE}
LABEL org.opencontainers.image.title=fairlead org.opencontainers.image.licenses=Apache-2.0
COPY --from=build /opt/fairlead /opt/fairlead
COPY deploy/entrypoint.sh /opt/fairlead/bin/entrypoint
# Makes the certificate of `fairlead epp` where none is given.
RUN openssl version
ENV PATH=/opt/fairlead/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --system --uid 65532 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin fairlead
USER 65532:65532
WORKDIR /tmp
# Gateway, endpoint picker, its health, metrics.
EXPOSE 8080 9002 9003 9090
ENTRYPOINT ["/opt/fairlead/bin/entrypoint"]
CMD ["--help"]
