"""Hosts that somebody has started, each by `python -m scripts.jobs.serve ADDRESS`.

    NEOPROTO_WORKERS="tcp://10.0.0.1:26600 tcp://10.0.0.2:26600" monarch apply scripts.jobs.workers.job

NEOPROTO_WORKERS: addresses of the hosts of one mesh, called default; or name=addresses,name=addresses.
NEOPROTO_CLIENT: where this process and runs listen, tcp://HOST:PORT; by default a free port (0) at the
address from which this machine reaches the first worker.
"""

from __future__ import annotations

import os

import neoproto  # noqa: F401 - first: it finds our meshes, whatever else has the name
from meshes.monarch.workers_job import WorkersJob, mesh_addresses

job = WorkersJob(mesh_addresses(os.environ.get("NEOPROTO_WORKERS", "tcp://127.0.0.1:26600")))
