"""Monarch's reports of failures: kept from ending the program, and read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from meshes.common.deaths import describe_signal


class FaultHook:
    """Keeps faults of this run's meshes from Monarch's hook, which ends the program; passes on others."""

    def __init__(self, handle: Callable[[str, str], bool]) -> None:
        import monarch.actor

        self._handle = handle
        self._module = monarch.actor
        self._previous = monarch.actor.unhandled_fault_hook
        self._installed = self._hook
        monarch.actor.unhandled_fault_hook = self._installed

    def _hook(self, failure: Any) -> None:
        if not self._handle(failure.mesh_name, failure.report()):
            self._previous(failure)

    def restore(self) -> None:
        """Put the hook back that was there before."""
        if self._module.unhandled_fault_hook == self._installed:
            self._module.unhandled_fault_hook = self._previous


_COORDINATE = re.compile(r"'(hosts|procs)': (\d+)/(\d+)")


def parse_fault(report: str) -> tuple[int | None, str]:
    """(rank, cause) of a Monarch failure report; rank None if it does not name one process."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, index, size in _COORDINATE.findall(report):
        sizes.setdefault(name, (int(index), int(size)))
    rank = None
    if "procs" in sizes:
        host = sizes.get("hosts", (0, 1))[0]
        rank = host * sizes["procs"][1] + sizes["procs"][0]
    killed = re.search(r"Killed\(sig=(\d+)", report)
    if killed:
        return rank, describe_signal(int(killed.group(1)))
    stopped = re.search(r"Stopped\((?:exit_code=|code=|exit=)?(\d+)", report)
    if stopped:
        return rank, f"exit code {stopped.group(1)}"
    return rank, report.strip().splitlines()[-1].strip() if report.strip() else "unknown"
