"""What the control plane costs: calls beside raw Monarch calls on the same processes, many calls, start.

    python scripts/bench_runtime.py [--repeats 7] [--calls 200] [--rounds 20] [--only NAME,…]

Ours and the raw calls take turns, so that both see the same machine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _bench import Figure, Measurements, positive

import neoproto  # noqa: F401 - first: it finds our packages, whatever else has their names
from meshes.common.topology import compile_topology
from meshes.monarch import sdk
from neoproto.runtime import ClassWithInitArgs, RemoteCall, Runtime, Worker, WorkerGroup

PARTS = ("calls", "pipelined", "many", "topology", "rounds")
CALL_COUNTS = (1000, 2000, 4000, 8000)


class Ours(Worker):
    """The smallest methods there are."""

    def sync(self, value: int) -> int:
        return value

    async def on_loop(self, value: int) -> int:
        return value


def median_ms(body: Callable[[], object], calls: int) -> float:
    """Median milliseconds of one `body()`."""
    seconds = []
    for _ in range(calls):
        begin = time.perf_counter()
        body()
        seconds.append(time.perf_counter() - begin)
    return 1000 * statistics.median(seconds)


def side_by_side(
    name: str,
    goal: float,
    ours: Callable[[], float],
    raw: Callable[[], float],
    repeats: int,
    measured: Measurements,
) -> list[Figure]:
    """Ours and raw in turns; the ratio of their medians."""
    pairs: list[tuple[float, float]] = []
    measured.repeat(repeats, lambda _: pairs.append((ours(), raw())))
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{name}: ours {mine:.3f} ms, raw {theirs:.3f} ms", flush=True)
    detail = {
        "ours_ms": [round(pair[0], 4) for pair in pairs],
        "raw_ms": [round(pair[1], 4) for pair in pairs],
    }
    return [
        Figure(name=f"{name}_ours", value=mine, unit="ms"),
        Figure(name=f"{name}_raw", value=theirs, unit="ms"),
        Figure(name=f"{name}_ratio", value=mine / theirs, unit="ratio", goal=f"<= {goal}", detail=detail),
    ]


def call_figures(
    group: WorkerGroup, repeats: int, calls: int, pipelined: bool, measured: Measurements
) -> Iterator[Figure]:
    """Blocking calls to one rank and to all, and many calls under way at once."""
    from _raw_actors import RawAsync, RawSync  # imports Monarch, whose environment is set by now

    procs = group.actor_mesh._proc_mesh
    raw_sync, raw_async = procs.spawn("raw_sync", RawSync), procs.spawn("raw_async", RawAsync)
    kinds = {"sync": raw_sync.sync, "async": raw_async.on_loop}
    names = {"sync": "sync", "async": "on_loop"}
    first = dict.fromkeys(raw_sync.extent, 0)
    one_sync, one_async = raw_sync.slice(**first), raw_async.slice(**first)
    one = {"sync": one_sync.sync, "async": one_async.on_loop}
    rank = group.rank(0)
    for kind, method in names.items():
        for target, raw, where in (
            (rank, lambda kind=kind: one[kind].call_one(1).get(), "one_rank"),
            (group, lambda kind=kind: kinds[kind].call(1).get(), f"{group.world_size}_ranks"),
        ):

            def ours(target: Any = target, method: str = method) -> object:
                return target.submit(method, (1,), timeout=60, blocking=True)

            ours()
            raw()  # type: ignore[no-untyped-call]
            yield from side_by_side(
                f"call_{where}_{kind}",
                1.25,
                lambda ours=ours: median_ms(ours, calls),  # type: ignore[misc]
                lambda raw=raw: median_ms(raw, calls),  # type: ignore[misc]
                repeats,
                measured,
            )
        if pipelined:
            yield from pipelined_figures(rank, kind, method, one[kind], repeats, measured)


def pipelined_figures(
    rank: Any, kind: str, method: str, raw: Any, repeats: int, measured: Measurements
) -> list[Figure]:
    """500 calls submitted before the first is waited for."""

    def ours() -> float:
        begin = time.perf_counter()
        RemoteCall.gather([rank.submit(method, (1,), timeout=60) for _ in range(500)]).result()
        return 1000 * (time.perf_counter() - begin)

    def theirs() -> float:
        begin = time.perf_counter()
        for future in [raw.call_one(1) for _ in range(500)]:
            future.get()
        return 1000 * (time.perf_counter() - begin)

    ours(), theirs()
    return side_by_side(f"pipelined_500_{kind}", 1.5, ours, theirs, repeats, measured)


def many_figures(repeats: int, measured: Measurements) -> Iterator[Figure]:
    """`gather` and `wait` over growing numbers of calls: the power of that number their cost grows with.

    1 is linear, 2 quadratic; the slope of log(seconds) over log(calls). Python's cyclic collector is off, as
    its pauses grow with everything else that the process holds.
    """
    for name, run in (("gather", gather_all), ("wait_first", wait_first)):
        seconds: dict[int, list[float]] = {count: [] for count in CALL_COUNTS}

        def turn(_: int, seconds: Any = seconds, run: Callable[[int], float] = run) -> None:
            for count in CALL_COUNTS:
                seconds[count].append(run(count))

        gc.disable()
        done = measured.repeat(repeats, turn)
        gc.enable()
        medians = [statistics.median(seconds[count][:done]) for count in CALL_COUNTS]
        slope = statistics.linear_regression(
            list(map(math.log, CALL_COUNTS)), list(map(math.log, medians))
        ).slope
        detail = {"ms": {count: 1000 * value for count, value in zip(CALL_COUNTS, medians, strict=True)}}
        yield Figure(name=f"{name}_{CALL_COUNTS[0]}", value=1000 * medians[0], unit="ms")
        yield Figure(name=f"{name}_growth", value=slope, unit="power", goal="<= 1.15", detail=detail)


def gather_all(count: int) -> float:
    """Seconds to gather `count` calls and settle them all."""
    calls: list[RemoteCall[int]] = [RemoteCall() for _ in range(count)]
    begin = time.perf_counter()
    together = RemoteCall.gather(calls)
    for number, call in enumerate(calls):
        call._settle(number)
    assert len(together.result()) == count
    return time.perf_counter() - begin


def wait_first(count: int) -> float:
    """Seconds to wait for the first of `count` pending calls."""
    calls: list[RemoteCall[int]] = [RemoteCall() for _ in range(count)]
    begin = time.perf_counter()
    waiting = RemoteCall.wait(calls, count=1)
    calls[count // 2]._settle(1)
    completed, pending = waiting.result()
    assert (len(completed), len(pending)) == (1, count - 1)
    return time.perf_counter() - begin


def topology_figures(repeats: int, measured: Measurements) -> list[Figure]:
    """A topology of 1,024 nodes × 8 devices and 64 models."""
    pools = [{"name": f"pool{i}", "cluster": "c", "nnodes": 16, "n_gpus_per_node": 8} for i in range(64)]
    topology = {
        "clusters": [{"name": "c", "nnodes": 1024, "n_gpus_per_node": 8, "device_type": "gpu"}],
        "device_pools": pools,
        "models": [
            {"name": f"m{i}", "worker": "actor", "config_key": "k", "resource_pool": f"pool{i}"}
            for i in range(64)
        ],
    }
    seconds: list[float] = []

    def turn(_: int) -> None:
        begin = time.perf_counter()
        compile_topology(topology)
        seconds.append(time.perf_counter() - begin)

    measured.repeat(repeats, turn)
    return [Figure(name="topology_compile", value=statistics.median(seconds), unit="s", goal="<= 1")]


def round_figures(rounds: int, measured: Measurements) -> list[Figure]:
    """Open and close a runtime with a group of 2, many times in one process."""
    seconds: list[float] = []
    resources: list[dict[str, int]] = []
    parts: list[list[float]] = []

    def turn(number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            runtime = Runtime.from_config({"runtime": {"run_dir": folder}})
            opened = time.perf_counter()
            group = runtime.create_worker_group(
                ClassWithInitArgs(Ours), on=runtime.create_resource_pool(1, 2), name="g"
            )
            assert group.sync(1) == [1, 1]
            called = time.perf_counter()
            runtime.close()
            ended = time.perf_counter()
        seconds.append(ended - begin)
        parts.append([round(value, 2) for value in (opened - begin, called - opened, ended - called)])
        resources.append(usage())
        print(f"round {number}: {seconds[-1]:.1f} s {parts[-1]} {resources[-1]}", flush=True)

    done = measured.repeat(rounds, turn)
    settled = resources[min(2, done - 1)]
    figures = [
        Figure(
            name="open_and_close",
            value=statistics.median(seconds),
            unit="s",
            goal="<= 10",
            detail={"seconds": seconds, "open_group_close": parts},
        )
    ]
    for name in ("threads", "fds", "shm"):
        figures.append(
            Figure(
                name=f"growth_{name}",
                value=resources[-1][name] - settled[name],
                unit="count",
                goal="<= 0",
                detail={"by_round": [one[name] for one in resources]},
            )
        )
    return figures


def usage() -> dict[str, int]:
    """What a round could leave behind in this process and on the machine."""
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "fds": len(os.listdir("/proc/self/fd")),
        "shm": len(os.listdir("/dev/shm")),
    }


def measure(parts: Sequence[str], repeats: int, calls: int, rounds: int, measured: Measurements) -> None:
    """The figures asked for."""
    if "topology" in parts:
        measured.add(topology_figures(repeats, measured))
    if "many" in parts:
        measured.add(many_figures(repeats, measured))
    if {"calls", "pipelined"} & set(parts):
        with (
            tempfile.TemporaryDirectory() as folder,
            Runtime.from_config({"runtime": {"run_dir": folder}}) as runtime,
        ):
            group = runtime.create_worker_group(
                ClassWithInitArgs(Ours), on=runtime.create_resource_pool(1, 4), name="g"
            )
            measured.add(call_figures(group, repeats, calls, "pipelined" in parts, measured))
    if "rounds" in parts:
        measured.add(round_figures(rounds, measured))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--calls", type=positive, default=200)
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        sdk.start_client(Path(folder) / "client.log")  # process-wide, so no part of a round
    with Measurements("runtime", options.repeats) as measured:
        measure(parts, options.repeats, options.calls, options.rounds, measured)


if __name__ == "__main__":
    main()
