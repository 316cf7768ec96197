"""What is looked at on every host of an applied job before anything of the run is started there."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from monarch.actor import Actor, context, endpoint

from meshes.common.guards import GuardAddress, new_folder, start_guardian
from meshes.common.machine import inductor_cache, machine_id, unmade_folder, versions, visible_gpus

PACKAGES = ("torch", "torchmonarch", "torchstore")
"""Distributions that all processes of a run must have in the same version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSpec:
    """What to look for: the run, its mesh of hosts, its folder, and where its guardians connect."""

    run_id: str
    mesh: str
    run_dir: str
    guard: GuardAddress


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """What was found.

    Attributes:
        node: the host's number in its mesh.
        host, machine: its name, and what its process ids belong to.
        versions: by package.
        gpus: what `CUDA_VISIBLE_DEVICES` calls its GPUs.
        tmp_dir: a folder for the run's temporary files there.
        cache_dir: where torch keeps what it compiled.
        sees_run_dir: the run's folder is there too.
        unguarded: why there is no guardian; None if there is one.
    """

    node: int
    host: str
    machine: str
    versions: dict[str, str]
    gpus: tuple[str, ...]
    tmp_dir: str
    cache_dir: str
    sees_run_dir: bool
    unguarded: str | None


class HostProbe(Actor):  # type: ignore[misc] # Monarch is not typed
    """One on each host, for a moment."""

    @endpoint
    async def look(self, spec: ProbeSpec) -> HostReport:
        """Look at this host, leave a guardian behind if possible, and make the folder it removes."""
        node = context().actor_instance.rank.rank
        tmp_dir, unguarded = unmade_folder(f"np-{spec.run_id}-"), None
        folder = new_folder(tmp_dir)
        try:
            start_guardian(spec.guard, spec.run_id, guard_name(spec.mesh, node), folder)
        except OSError as error:
            unguarded = f"{spec.guard.host}:{spec.guard.port}: {error}"
        folder.make()
        return HostReport(
            node=node,
            host=socket.gethostname(),
            machine=machine_id(),
            versions=versions(PACKAGES),
            gpus=visible_gpus(),
            cache_dir=inductor_cache(),
            tmp_dir=tmp_dir,
            sees_run_dir=_is_folder(spec.run_dir),
            unguarded=unguarded,
        )


def _is_folder(path: str) -> bool:
    return os.path.isdir(path)


def guard_name(mesh: str, node: int) -> str:
    """What a host is called, to people too."""
    return f"{mesh}[{node}]"
