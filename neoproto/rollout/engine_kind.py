"""What is known of a kind of rollout engine. Imports nothing heavy: the configuration reads the entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from neoproto.choices import Choice

GIB = 1 << 30


def _no_environment(device: str, eager: bool) -> Mapping[str, str]:
    return {}


def _no_problem(config: Mapping[str, Any], device: str) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKind(Choice):
    """A rollout engine.

    Attributes:
        engine: "module:class". It is made from `EngineOptions`, in the replica's process, and is what
            `actors.rollout.engine` describes.
        in_process: it is a `StepEngine`, which a thread of the worker steps; else a `RolloutEngine`.
        devices: what it runs on.
        env: of a device ("cpu", "gpu") and whether nothing is to be compiled: environment of a replica's
            process, beside what all replicas have. It is set before any import there.
        modules: what it imports, on a CPU, when an engine is made: a warm parent imports it beforehand.
        model_problem: of a model's `config.json` and a device: why the engine cannot serve it, or None.
        library_bytes: resident memory of a process that has only imported it, on a CPU.
        options: fields of `actor_rollout_ref.rollout` that are this engine's alone.
    """

    engine: str
    in_process: bool = True
    devices: tuple[str, ...] = ("cpu", "gpu")
    env: Callable[[str, bool], Mapping[str, str]] = field(default=_no_environment)
    modules: tuple[str, ...] = ()
    model_problem: Callable[[Mapping[str, Any], str], str | None] = field(default=_no_problem)
    library_bytes: float
    options: tuple[str, ...] = ()

    @property
    def help(self) -> str:
        """What it is, where it runs, and its own options."""
        where = "" if "gpu" in self.devices else " (CPUs only)"
        own = f", with options of its own: {', '.join(self.options)}" if self.options else ""
        return f"{self.about}{where}{own}"
