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

from _bench import BenchError

END_S = 60.0
"""How long a run may take to end by itself once the benchmark is interrupted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One finished run.

    Attributes:
        started: Unix seconds.
        seconds: of the whole command.
        peak_pss_gib: the highest sum of PSS that was seen; None if nobody looked.
        rows: of `metrics.jsonl`.
    """

    started: float
    seconds: float
    peak_pss_gib: float | None
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

    Raises:
        BenchError: it failed; or its folder is there, and the run would resume what lies in it.
    """
    if folder.exists():
        raise BenchError(f"{folder} is there already; --keep wants a folder without the runs of another time")
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
        try:
            while process.poll() is None:
                if measure_memory:
                    peak = max(peak, tree_pss(str(folder)))
                time.sleep(1.0)
        finally:
            end(process)
    seconds = time.perf_counter() - begin
    if process.returncode != 0:
        raise BenchError(
            f"{folder.name}: the run failed with code {process.returncode}:\n{output.read_text()}"
        )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gib = peak / 2**30 if measure_memory else None
    memory = f", peak PSS {gib:.2f} GiB" if gib is not None else ""
    print(f"{folder.name}: {seconds:.1f} s{memory}", flush=True)
    return Run(started=started, seconds=seconds, peak_pss_gib=gib, rows=rows)


def end(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end that still runs, and wait: a run closes what it has started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:  # it took too long, or there was another interruption
            process.kill()
            process.wait()


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
