"""Hosts on this machine, which outlive a run.

    NEOPROTO_MESHES="default=1" monarch apply scripts.jobs.local.job

NEOPROTO_MESHES: name=hosts for each cluster of the topology, separated by commas ("default=1"). A name is the
name of a cluster; the preset topology has one, called default.
"""

from __future__ import annotations

import os

from monarch.job import ProcessJob

import neoproto  # noqa: F401 - first: it finds our meshes, whatever else has the name
from meshes.monarch.workers_job import mesh_sizes

job = ProcessJob(mesh_sizes(os.environ.get("NEOPROTO_MESHES", "default=1")))
