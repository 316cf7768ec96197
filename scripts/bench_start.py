"""Start, restart and end of a run beside those of another checkout: seconds, CPU and memory by process.

    python scripts/bench_start.py [--beside CHECKOUT] [--repeats 5] [--only start,restart] [key=value …]

Each turn is one run of each checkout in a fresh process, `ppo_monarch +smoke=tiny` unless other overrides are
given; the other checkout runs in its own environment, `CHECKOUT/.venv`. A first run of each is not counted:
it makes the model and fills the caches. `start` is a run from its command to its end. In `restart` a rollout
replica is killed after the first step, and serves again. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench import BenchError, Figure, Measurements, positive
from _runs import end

PARTS = ("start", "restart")
OVERRIDES = ("+smoke=tiny",)
LONG = ("trainer.total_training_steps=100000", "trainer.save_freq=-1", "trainer.test_freq=-1")
"""Of a run that is ended once its replica serves again."""
MARK = "NEOPROTO_BENCH_RUN"
"""Environment variable of a run's command. All its processes inherit it."""
FIRST_STEP = re.compile(r"step 1/")
CLOSING = re.compile(r"closing …")
SERVES_AGAIN = re.compile(r"replica \S+ .* again on weights")
"""What the command prints, in the words of both checkouts."""
LOOK_S, MEMORY_S = 0.1, 1.0
"""Between two looks at the processes, and at their memory, which takes milliseconds each."""
RUN_LIMIT_S = 900.0
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
SCRIPTS = {"guardian.py": "guardians", "warm_stub.py": "stubs of warm workers"}
MODULES = {"warm": "warm parent"}
TRACKER = "multiprocessing.resource_tracker"
HOSTS = "run_worker_loop_forever"


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One checkout of the project.

    Attributes:
        name: "here" or "beside", for folders and figures.
        root: where it lies.
        python: the interpreter of its environment.
    """

    name: str
    root: Path
    python: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one run showed.

    Attributes:
        first_step: seconds from the command to the end of its first step.
        closing: seconds from the last word before everything is closed to the end of the command.
        cpu: CPU seconds to the end of the first step, by process.
        memory: bytes of PSS by process, when their sum was highest.
    """

    first_step: float
    closing: float
    cpu: Mapping[str, float]
    memory: Mapping[str, int]


class Processes:
    """CPU time and memory of all processes of a run, by what they are.

    A process that has ended counts as it was when it was last seen.

    Args:
        mark: the value of `MARK` in their environment.
        folder: of the run, whose `processes.json` says which worker is which.
    """

    def __init__(self, mark: str, folder: Path) -> None:
        self._entry, self._file = f"{MARK}={mark}".encode(), folder / "processes.json"
        self._strangers: set[int] = set()
        self._groups: dict[int, str] = {}
        self._commands: dict[int, str] = {}
        self._cpu: dict[int, float] = {}
        self.highest: Mapping[str, int] = {}

    def look(self, *, memory: bool = False) -> None:
        """See what has come, what each has used, and with `memory` what they hold together."""
        self._read_groups()
        pss: dict[int, int] = {}
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            if pid in self._strangers:
                continue
            with contextlib.suppress(OSError):  # it has ended between the listing and the reading
                if self._entry not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if pid not in self._cpu:
                        self._strangers.add(pid)
                    continue
                self._cpu[pid] = cpu_seconds(pid)
                self._commands[pid] = Path(f"/proc/{pid}/cmdline").read_text()
                if memory:
                    pss[pid] = pss_bytes(pid)
        if sum(pss.values()) > sum(self.highest.values()):
            self.highest = {name: int(value) for name, value in self._by_name(pss).items()}

    def cpu(self) -> dict[str, float]:
        """CPU seconds by what the processes are, ended ones included."""
        return self._by_name(self._cpu)

    def rollout(self) -> int:
        """The process of the first rollout replica.

        Raises:
            BenchError: there is none.
        """
        for pid, group in self._groups.items():
            if group == "rollout":
                return pid
        raise BenchError(f"{self._file} names no process of rollout")

    def _read_groups(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for row in json.loads(self._file.read_text()):
                # Replicas are groups of one, called rollout-0, and rollout-0-2 at the second start.
                self._groups[row["pid"]] = re.sub(r"(-\d+)+$", "", row["group"])

    def _by_name(self, values: Mapping[int, float]) -> dict[str, float]:
        total: defaultdict[str, float] = defaultdict(float)
        for pid, value in values.items():
            total[self._groups.get(pid) or program(self._commands.get(pid, ""))] += value
        return dict(total)


def program(command: str) -> str:
    """What a process is by its command line (arguments end with NUL): for those that no run folder names."""
    words = command.split("\0")
    for word in words:
        if name := SCRIPTS.get(os.path.basename(word)):
            return name
        if TRACKER in word:
            return "resource trackers"
        if HOSTS in word:
            return "hosts"
    if "neoproto" in words:
        module = words[words.index("neoproto") + 1].rpartition(".")[2]
        return MODULES.get(module, module)
    return os.path.basename(words[0]) or "others"


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def pss_bytes(pid: int) -> int:
    """Its memory; what processes share counts in parts."""
    found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


class Command:
    """One run of a checkout under watch: its lines as they come, its processes between them."""

    def __init__(self, side: Side, folder: Path, cache: Path, overrides: Sequence[str]) -> None:
        self.processes = Processes(folder.name, folder)
        self._name, self._output = folder.name, folder.with_suffix(".out")
        words = [side.python, "-m", "neoproto.run", "--config-name", "ppo_monarch"]
        environment = {**os.environ, "NEOPROTO_CACHE": str(cache), MARK: folder.name}
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            [*map(str, words), f"runtime.run_dir={folder}", *overrides],
            cwd=side.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def lines(self) -> Iterator[tuple[float, str]]:
        """Each line that it prints, with the seconds since the command, until it closes its output.

        Raises:
            BenchError: it takes longer than any run may.
        """
        assert self.process.stdout is not None
        number, rest, memory_at = self.process.stdout.fileno(), b"", 0.0
        with selectors.DefaultSelector() as selector, self._output.open("wb") as kept:
            selector.register(number, selectors.EVENT_READ)
            while (now := time.perf_counter()) < self.began + RUN_LIMIT_S:
                if not selector.select(LOOK_S):
                    self.processes.look(memory=now >= memory_at)
                    memory_at = now + MEMORY_S if now >= memory_at else memory_at
                    continue
                if not (data := os.read(number, 1 << 16)):
                    return
                seconds = time.perf_counter() - self.began
                kept.write(data)
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    yield seconds, line.decode(errors="replace")
        raise BenchError(f"{self._name} did not end within {RUN_LIMIT_S:g} s: {self._output}")

    def close(self) -> None:
        """End it if it still runs."""
        end(self.process)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait(self, code: int) -> float:
        """Wait for its end, `code` being the exit code that it has to have; seconds since the command.

        Raises:
            BenchError: it has another one.
        """
        found = self.process.wait(RUN_LIMIT_S)
        seconds = time.perf_counter() - self.began
        if found != code:
            raise BenchError(f"{self._name}: the run ended with code {found}:\n{self._output.read_text()}")
        return seconds


def started(side: Side, folder: Path, cache: Path, overrides: Sequence[str]) -> Turn:
    """A run from its command to its end.

    Raises:
        BenchError: it failed, or did not say what is waited for.
    """
    first = closing = None
    cpu: Mapping[str, float] = {}
    with contextlib.closing(Command(side, folder, cache, overrides)) as command:
        for seconds, line in command.lines():
            if first is None and FIRST_STEP.match(line):
                command.processes.look(memory=True)
                first, cpu = seconds, command.processes.cpu()
            elif CLOSING.match(line):
                closing = seconds
        ended = command.wait(0)
    if first is None or closing is None:
        raise BenchError(f"{folder.name}: no line says where the first step ends, or where closing begins")
    print(f"{folder.name}: first step {first:.1f} s, closing {ended - closing:.1f} s", flush=True)
    return Turn(first_step=first, closing=ended - closing, cpu=cpu, memory=command.processes.highest)


def restarted(side: Side, folder: Path, cache: Path, overrides: Sequence[str]) -> float:
    """Seconds from the SIGKILL of a rollout replica to the line that it serves again.

    Raises:
        BenchError: it does not.
    """
    killed = back = None
    with contextlib.closing(Command(side, folder, cache, [*overrides, *LONG])) as command:
        for seconds, line in command.lines():
            if killed is None and FIRST_STEP.match(line):
                command.processes.look()
                os.kill(command.processes.rollout(), signal.SIGKILL)
                killed = time.perf_counter() - command.began
            elif back is None and SERVES_AGAIN.match(line):
                back = seconds
                command.process.terminate()
        command.wait(128 + signal.SIGTERM)
    if killed is None or back is None:
        raise BenchError(f"{folder.name}: no line says that the replica serves again")
    print(f"{folder.name}: the replica serves again after {back - killed:.1f} s", flush=True)
    return back - killed


def compared(
    name: str, unit: str, values: Mapping[str, Sequence[float]], goal: str | None = None
) -> Iterator[Figure]:
    """A figure of this checkout, and its ratio to the other's: the median over the turns of each."""
    here, beside = values["here"], values.get("beside")
    detail = {"all": [*here]} | ({"beside": [*beside]} if beside else {})
    yield Figure(name=name, value=statistics.median(here), unit=unit, detail=detail)
    if beside:
        ratios = [ours / theirs for ours, theirs in zip(here, beside, strict=True)]
        yield Figure(
            name=f"{name}_vs_beside",
            value=statistics.median(ratios),
            unit="ratio",
            goal=goal,
            detail={"all": ratios},
        )


def start_figures(turns: Mapping[str, Sequence[Turn]]) -> Iterator[Figure]:
    """Of whole runs: start, CPU, memory, closing; then CPU and memory by process."""

    def of(value: Callable[[Turn], float]) -> dict[str, list[float]]:
        return {name: [value(turn) for turn in some] for name, some in turns.items()}

    yield from compared("first_step", "s", of(lambda turn: turn.first_step), "<= 0.5")
    yield from compared("cpu_to_first_step", "s", of(lambda turn: sum(turn.cpu.values())), "<= 0.5")
    yield from compared("closing", "s", of(lambda turn: turn.closing), "<= 0.5")
    yield from compared("peak_pss", "GiB", of(lambda turn: sum(turn.memory.values()) / 2**30))
    yield from by_process("cpu", "s", {name: [one.cpu for one in some] for name, some in turns.items()})
    memory = {
        name: [{group: value / 2**20 for group, value in one.memory.items()} for one in some]
        for name, some in turns.items()
    }
    yield from by_process("pss", "MiB", memory)


def by_process(what: str, unit: str, found: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[Figure]:
    """One figure for each kind of process, the largest first; the other checkout's is its detail."""
    medians = {
        side: {
            name: statistics.median(one.get(name, 0.0) for one in turns)
            for name in {name for one in turns for name in one}
        }
        for side, turns in found.items()
    }
    here, beside = medians["here"], medians.get("beside", {})
    for name in sorted(
        {*here, *beside}, key=lambda name: (-max(here.get(name, 0), beside.get(name, 0)), name)
    ):
        detail = {"beside": beside.get(name, 0.0)} if "beside" in medians else {}
        yield Figure(
            name=f"{what}_{name.replace(' ', '_')}", value=here.get(name, 0.0), unit=unit, detail=detail
        )


def sides(beside: Path | None) -> list[Side]:
    """This checkout, and the other one.

    Raises:
        BenchError: it is none, or has no environment.
    """
    found = [Side(name="here", root=Path(__file__).resolve().parents[1], python=Path(sys.executable))]
    if beside is not None:
        root = beside.absolute()
        python = root / ".venv" / "bin" / "python"
        if not (root / "neoproto").is_dir() or not python.exists():
            raise BenchError(f"--beside {beside}: a checkout with its environment in .venv is needed")
        found.append(Side(name="beside", root=root, python=python))
    return found


def parts(text: str) -> tuple[str, ...]:
    """Of `--only`.

    Raises:
        argparse.ArgumentTypeError: there is no such part.
    """
    found = tuple(text.split(","))
    if unknown := [name for name in found if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(PARTS)}")
    return found


def measure(options: argparse.Namespace, folder: Path, measured: Measurements) -> None:
    """Warm up, take the turns, make the figures."""
    both, overrides = sides(options.beside), options.overrides or OVERRIDES
    caches = {side.name: folder / f"cache_{side.name}" for side in both}
    for side in both:
        started(side, folder / f"warm_{side.name}", caches[side.name], overrides)
    if "start" in options.only:
        turns: dict[str, list[Turn]] = {side.name: [] for side in both}

        def start(number: int) -> None:
            # Whoever runs second finds the machine as the other has left it: they take turns in that too.
            for side in both if number % 2 == 0 else both[::-1]:
                run = folder / f"start_{number}_{side.name}"
                turns[side.name].append(started(side, run, caches[side.name], overrides))

        count = measured.repeat(options.repeats, start)
        measured.add(start_figures({name: some[:count] for name, some in turns.items()}))
    if "restart" in options.only:
        waits: dict[str, list[float]] = {side.name: [] for side in both}

        def restart(number: int) -> None:
            for side in both if number % 2 == 0 else both[::-1]:
                run = folder / f"restart_{number}_{side.name}"
                waits[side.name].append(restarted(side, run, caches[side.name], overrides))

        count = measured.repeat(options.repeats, restart)
        first = {name: some[:count] for name, some in waits.items()}
        measured.add(compared("replica_serves_again", "s", first, "<= 0.3"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="another checkout, with an environment in its .venv")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--only", type=parts, default=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: temporary, removed)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"instead of {OVERRIDES[0]}")
    options = parser.parse_args(arguments)
    folder = Path(options.keep or tempfile.mkdtemp(prefix="bench_start_")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Measurements("start", options.repeats) as measured:
            measure(options, folder, measured)
    finally:
        if options.keep is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
