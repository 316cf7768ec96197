"""Whole training runs, as benchmarks start them: the command in a fresh process, and what it left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One finished run: its metric rows, wall seconds, and the highest sum of PSS that was seen."""

    started: float
    seconds: float
    peak_pss_gib: float
    rows: list[dict[str, Any]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "actor/pg_loss" in row]

    def validation(self, last: bool, label: str) -> float:
        rows = [row for row in self.rows if any(name.startswith("val-core/") for name in row)]
        row = rows[-1 if last else 0]
        return float(next(v for name, v in row.items() if re.fullmatch(rf"val-core/.*/acc/{label}", name)))


def run(
    folder: Path,
    cache: Path,
    *overrides: str,
    config: str = "ppo_monarch",
    prefix: Sequence[str] = (),
    measure_memory: bool = True,
) -> Run:
    """Run the command to its end, sampling the memory of its process tree if asked to.

    Args:
        prefix: what the command is started with, `taskset -c 0,1` say.
    """
    command = [
        *prefix,
        sys.executable,
        "-m",
        "neoproto.run",
        "--config-name",
        config,
        f"runtime.run_dir={folder}",
    ]
    started, begin, peak = time.time(), time.perf_counter(), 0
    output = folder.with_suffix(".out")
    with output.open("w") as sink:
        process = subprocess.Popen(
            [*command, *overrides],
            env={**os.environ, "NEOPROTO_CACHE": str(cache)},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None:
            if measure_memory:
                peak = max(peak, tree_pss(str(folder)))
            time.sleep(1.0)
    seconds = time.perf_counter() - begin
    if process.returncode != 0:
        raise SystemExit(f"the run failed with code {process.returncode}:\n{output.read_text()}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    print(f"{folder.name}: {seconds:.1f} s, peak PSS {peak / 2**30:.2f} GiB", flush=True)
    return Run(started=started, seconds=seconds, peak_pss_gib=peak / 2**30, rows=rows)


def tree_pss(marker: str) -> int:
    """Bytes of proportional set size of all processes whose environment or command line has `marker`."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            mine = marker.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            if mine:
                rollup = (entry / "smaps_rollup").read_text()
                total += 1024 * int(re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[1])  # type: ignore[index]
        except (OSError, TypeError):
            continue  # it ended between the listing and the reading
    return total
