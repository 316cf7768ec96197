# NeoProto with its pinned CPU stack, as scripts/setup installs it. From a checkout:
#
#   docker build -t neoproto .
#   docker run --rm --shm-size=2g neoproto                       # three small steps: does it work here?
#
# /dev/shm holds batches and weights: 64 MB, docker's default, is too little for a model of your own.
FROM python:3.11-slim-bookworm

RUN apt-get update && \
    apt-get install -y --no-install-recommends gcc libc6-dev libnuma1 && \
    rm -rf /var/lib/apt/lists/*

WORKDIR /neoproto
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY scripts scripts
COPY neoproto neoproto
COPY meshes meshes
COPY actors actors
COPY configs configs
# Torch's wheels for CPUs; a mirror that has them is named by PIP_INDEX_URL.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN scripts/setup

ENV PATH=/neoproto/.venv/bin:$PATH
# Runs write below the folder they are started in.
WORKDIR /work
CMD ["python", "-m", "neoproto.run", "--config-name", "ppo_monarch", "+smoke=tiny"]
