"""The peer's own Python environment, made once and kept in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("trl==1.16.*", "accelerate", "datasets")
_MINUTES = 20
_SHOWN_LINES = 12


def wanted() -> tuple[str, ...]:
    """What is installed: the peer, and the torch that this environment has."""
    return (f"torch=={importlib.metadata.version('torch')}", *PACKAGES)


def peer_python(cache: Path) -> Path:
    """The interpreter of an environment with `wanted()`, made if `cache` does not have it.

    Raises:
        SystemExit: it cannot be made; says what failed, where the log is, and what usually helps.
    """
    packages = wanted()
    key = hashlib.sha256(json.dumps([sys.version, packages]).encode()).hexdigest()[:12]
    folder = cache / "peers" / f"trl-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, complete = folder / "bin" / "python", folder / "complete"
    with _locked(folder.with_suffix(".lock")):
        if complete.exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        log = folder.with_suffix(".log")
        print(f"making an environment for the peer ({', '.join(packages)}); log: {log}", flush=True)
        with log.open("w", encoding="utf-8") as sink:
            _run([sys.executable, "-m", "venv", str(folder)], sink.fileno(), log)
            _run(
                [str(python), "-m", "pip", "install", "--progress-bar", "off", *packages], sink.fileno(), log
            )
            _run(
                [str(python), "-c", "import datasets, trl; trl.GRPOTrainer, trl.RLOOTrainer"],
                sink.fileno(),
                log,
            )
        complete.touch()
    return python


def failure(command: Sequence[str], log: str) -> str:
    """What to tell a person whose environment could not be made."""
    lines = [
        f"the peer's environment could not be made: {' '.join(command)}",
        *log.splitlines()[-_SHOWN_LINES:],
    ]
    if "No matching distribution found for torch" in log:
        lines.append(
            "the package index has no CPU build of torch; name PyTorch's CPU wheels as well: "
            "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
        )
    elif "No matching distribution found" in log or "Temporary failure in name resolution" in log:
        lines.append(
            "TRL comes from the package index, which has to be reached once; later runs find it in the cache"
        )
    return "\n".join(lines)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Of two benchmarks at once, one makes it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str], sink: int, log: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        ended = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            timeout=60 * _MINUTES,
        )
        code: int | str = ended.returncode
    except subprocess.TimeoutExpired:
        code = f"no end in {_MINUTES} minutes"
    except OSError as error:
        code = str(error)
    if code != 0:
        raise SystemExit(f"{failure(command, log.read_text(encoding='utf-8', errors='replace'))}\n({code})")
