# The service as an image. Targets: `cpu`, and `gpu`, which has only been linted: no GPU and no registry was at hand.
#
#   docker build --target cpu --tag batchserve:cpu .
#
# Two build secrets, both optional, for those who reach packages through a mirror (docs/deployment.md): `pip.conf` is pip's
# configuration, `ca.crt` a bundle of certificates, which a pip.conf names as /run/secrets/ca.crt.

ARG BASE=python:3.11-slim-bookworm

# --- what builds: none of these stages is in an image ----------------------------------------------------------------

# pip in an environment of its own installs into /opt/venv, which so never has it.
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/venv
ENV PATH=/opt/pip/bin:$PATH PIP_PYTHON=/opt/venv/bin/python
WORKDIR /build

# Packages before the project, so that a change in app/ installs none of them again. torch comes alone and first: PyPI
# does not have its CPU build. --no-deps as in scripts/setup: the lock says all there is to install.
FROM build AS packages-cpu
COPY requirements/cpu.lock ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    grep '^torch==' cpu.lock >torch.lock \
    && { pip install --no-deps -r torch.lock \
         || pip install --no-deps --index-url https://download.pytorch.org/whl/cpu -r torch.lock; } \
    && pip install --no-deps -r cpu.lock

FROM build AS packages-gpu
COPY requirements/gpu.lock ./
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    pip install --no-deps -r gpu.lock

# The project's own files alone, below /out: a small layer over the large one of the packages.
FROM build AS project
COPY pyproject.toml README.md LICENSE ./
COPY app app
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt \
    pip install --no-deps --root /out . && install -D --mode=644 LICENSE /out/licenses/LICENSE

# --- what runs -------------------------------------------------------------------------------------------------------

FROM ${BASE} AS runtime
# tini is process 1: it hands signals on to the service and reaps whom the engine orphans. The base's own pip goes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 libnuma1 tini \
    && rm -rf /var/lib/apt/lists/* \
    && if python3 -c 'import pip' 2>/dev/null; then python3 -m pip uninstall --yes pip setuptools wheel; fi
# /models: where to mount model folders, read-only. /cache: what can be made again. Any user may write there, so that the
# container works under any user id; HOME is there, and USER has a value, since such a user has no entry in /etc/passwd.
RUN useradd --uid 10001 --gid 0 --no-create-home --home-dir /cache --shell /usr/sbin/nologin batchserve \
    && mkdir /models && install --directory --mode=1777 /cache
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/cache \
    USER=batchserve \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    BATCHSERVE_HOST=0.0.0.0
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# Unready while the model loads is no fault, so the start period is long; one success ends it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["python", "-I", "-c", "\
import http.client, os, sys; \
service = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('BATCHSERVE_PORT') or 8000), timeout=4); \
service.request('GET', '/readyz'); \
sys.exit(service.getresponse().status != 200)"]
ENTRYPOINT ["tini", "--", "batchserve"]
CMD ["serve"]

FROM runtime AS cpu
COPY --from=packages-cpu /opt/venv /opt/venv
COPY --from=project /out /
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="batchserve" \
      org.opencontainers.image.description="Offline batch inference with vLLM over HTTP, on a CPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001

# Triton compiles launchers in C while the service runs, so the compiler and libc's headers stay; Python's come with the
# base. torch's packages bring CUDA; the driver comes from the host, through NVIDIA's container runtime.
FROM runtime AS gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=packages-gpu /opt/venv /opt/venv
COPY --from=project /out /
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="batchserve" \
      org.opencontainers.image.description="Offline batch inference with vLLM over HTTP, on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001
