"""A job as a person applies it, in a folder; and what becomes of its hosts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshes.common import procs

ROOT = Path(__file__).resolve().parents[2]
MONARCH = Path(sys.executable).parent / "monarch"


class AppliedJob:
    """One applied job of `scripts.jobs`; `hosts` are the processes of a local one."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self._env = folder, env
        self.hosts: list[int] = []

    def monarch(self, *words: str) -> str:
        """Type a `monarch` command in the job's folder."""
        done = subprocess.run(
            [MONARCH, *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **self._env},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def living(self) -> list[int]:
        """The hosts that live."""
        return [pid for pid in self.hosts if procs.lives(pid)]


@contextlib.contextmanager
def applied(folder: Path, job: str = "local", **env: str) -> Iterator[AppliedJob]:
    """Apply a job of `scripts.jobs` in a folder, and kill that job at the end."""
    folder.mkdir(exist_ok=True)
    one = AppliedJob(folder, env)
    try:
        one.monarch("apply", f"scripts.jobs.{job}.job")
        from monarch.job import job_load

        saved = job_load(str(folder / ".monarch" / "job_state.pkl"))
        one.hosts = [host.pid for host in getattr(saved, "_host_to_pid", {}).values()]
        yield one
    finally:
        if (folder / ".monarch" / "job_state.pkl").exists():
            one.monarch("kill")
