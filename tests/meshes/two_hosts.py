"""A run on two hosts, as a program: `python -m tests.meshes.two_hosts MODE DIR [JOB_MODE]`.

By default it runs where a job is applied. Prints one line of JSON once everything has been tried, then does
what MODE says: "close" or "wait".
"""

from __future__ import annotations

import ipaddress
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from neoproto.runtime import ClassWithInitArgs, Runtime, get, put
from tests.meshes.workers import Probe

TOPOLOGY = {
    "clusters": [{"name": "default", "nnodes": 2, "n_gpus_per_node": 1, "device_type": "cpu"}],
    "device_pools": [{"name": "all", "cluster": "default", "nnodes": 2, "n_gpus_per_node": 1}],
    "models": [{"name": "w", "worker": "w", "resource_pool": "all"}],
}


class Far(Probe):
    """What crosses from one host to the other."""

    def make(self) -> object:
        return put(torch.full((1000, 4), float(self.rank)))

    def sum_of(self, ref: Any) -> float:
        return float(get(ref, rows=np.arange(10)).sum())

    def place(self) -> dict[str, str]:
        return {"host": os.uname().nodename, "temporary": os.environ["TMPDIR"]}


def listening() -> list[str]:
    """The addresses at which programs of this network namespace take TCP connections."""
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = row.split()
            words = bytes.fromhex(local.partition(":")[0])
            if state == "0A":  # each word is in this machine's order
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add(str(ipaddress.ip_address(address)))
    return sorted(found)


def main(mode: str, run_dir: str, job_mode: str = "current") -> None:
    config = {"runtime": {"run_dir": run_dir, "monarch": {"job_mode": job_mode}}, "topology": TOPOLOGY}
    with Runtime.from_config(config) as runtime:
        pool = runtime.model_resource_pool("w")
        group = runtime.create_worker_group(ClassWithInitArgs(Far), on=pool, name="w")
        beside = runtime.create_worker_group(
            ClassWithInitArgs(Far), on=runtime.create_resource_pool(on="controller"), name="beside"
        )
        refs = group.make()
        told = {
            "run_id": runtime.run_id,
            "places": group.place(),
            "beside": beside.place()[0]["host"],
            "sums": [group.sum_of(ref) for ref in refs] + [beside.sum_of(refs[1])],
            "reduced": group.submit("all_reduce", timeout=120).result(),
            "here": float(get(refs[1]).sum()),
            "listens": listening(),
        }
        print(json.dumps(told), flush=True)
        if mode == "wait":
            group.submit("sleep", (300.0,))
            time.sleep(300)
    print("closed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
