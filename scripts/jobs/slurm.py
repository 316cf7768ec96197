"""Nodes of one Slurm allocation: `monarch apply scripts.jobs.slurm.job`, on a machine that has `sbatch`.

NEOPROTO_MESHES: name=nodes for each cluster of the topology, separated by commas ("default=1").
NEOPROTO_GPUS_PER_NODE: GPUs of a node; none if it is not set.
NEOPROTO_PARTITION, NEOPROTO_ACCOUNT, NEOPROTO_QOS, NEOPROTO_TIME_LIMIT: Slurm's; its defaults if not set.
NEOPROTO_PORT: where the hosts listen, on every node ("22222").
NEOPROTO_BIND: the address they listen at ("0.0.0.0" is all); by default that of the node's name.
NEOPROTO_CLIENT: where this process and runs listen, "tcp://ADDRESS:0" for a free port; by default at the
address of this machine's name.
NEOPROTO_WAIT_S: how long the allocation is waited for, in seconds; for ever if not set.
"""

from __future__ import annotations

import os
import sys

from monarch.job import SlurmJob

import neoproto  # noqa: F401 - first: it finds our meshes, whatever else has the name
from meshes.monarch.workers_job import mesh_sizes, use_client_address


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    return int(text) if text else None


job = SlurmJob(
    mesh_sizes(os.environ.get("NEOPROTO_MESHES", "default=1")),
    python_exe=sys.executable,
    job_name="neoproto",
    log_dir=os.path.abspath("outputs/slurm"),
    monarch_port=_number("NEOPROTO_PORT") or 22222,
    bind_to=os.environ.get("NEOPROTO_BIND") or None,
    gpus_per_node=_number("NEOPROTO_GPUS_PER_NODE"),
    partition=os.environ.get("NEOPROTO_PARTITION") or None,
    account=os.environ.get("NEOPROTO_ACCOUNT") or None,
    qos=os.environ.get("NEOPROTO_QOS") or None,
    time_limit=os.environ.get("NEOPROTO_TIME_LIMIT") or None,
    job_start_timeout=_number("NEOPROTO_WAIT_S"),
)
use_client_address()
