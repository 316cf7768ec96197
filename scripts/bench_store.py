"""The object store side by side with raw TorchStore RPC and memcpy, and with Ray's store where there is one.

    python scripts/bench_store.py [--repeats 7] [--quick]

One host, one volume, this process as the client; raw TorchStore is a stock client of a store of its own.
Medians; ours and theirs are measured in turn, so that a busy machine slows both. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from _bench import Figure, Measurements, positive, seconds

from neoproto.data import DataProto
from neoproto.store import use_store

MIB = 1 << 20


class Cluster:
    """A store with one volume, its client, and a stock TorchStore client with a volume of its own."""

    def __init__(self) -> None:
        from monarch.job import ProcessJob

        from neoproto.store.torchstore.actors import StoreServer
        from neoproto.store.torchstore.client import StoreClient

        self._job = ProcessJob({"hosts": 1})
        hosts = self._job.state(cached_path=None).hosts
        self._server = asyncio.run(
            StoreServer.start(
                procs=hosts.spawn_procs(per_host={"volumes": 1}),
                index_procs=hosts.spawn_procs(per_host={"index": 1}),
                name="bench",
                strategy="host",
                timeout_s=300,
            )
        )
        # Only the stock client uses this one: its own volume and index, nothing of ours in between.
        self._raw = asyncio.run(
            StoreServer.start(
                procs=hosts.spawn_procs(per_host={"volumes": 1}),
                index_procs=hosts.spawn_procs(per_host={"index": 1}),
                name="bench_raw",
                strategy="host",
                timeout_s=300,
                sharing="off",
            )
        )
        self.spec = self._server.spec()
        self.client = StoreClient.attach(self.spec, host_id="0")
        self.stock = self._raw.spec().stock_client()
        self.loop = asyncio.new_event_loop()
        self.wait(lambda: self.stock.put("warm-up", torch.zeros(1)))  # its volume imports TorchStore now

    def wait(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run something of the stock client's."""

        async def body() -> Any:
            return await work()

        return self.loop.run_until_complete(body())

    def close(self) -> None:
        self.client.close()
        self.loop.close()
        for server in (self._server, self._raw):
            asyncio.run(server.close(20))
        self._job.kill()


def side_by_side(measured: Measurements, repeats: int, **works: Callable[[], Any]) -> dict[str, float]:
    """Median seconds of each, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in works}

    def turn(_: int) -> None:
        for name, work in works.items():
            times[name].append(seconds(work))

    done = measured.repeat(repeats, turn)
    return {name: statistics.median(found[:done]) for name, found in times.items()}


def puts(cluster: Cluster, mib: int, repeats: int, measured: Measurements) -> Iterator[Figure]:
    """A large value: the first put, and steady state."""
    client, stock = cluster.client, cluster.stock
    value = torch.randint(0, 255, (mib * MIB,), dtype=torch.uint8)
    target = torch.zeros(mib * MIB, dtype=torch.uint8)
    refs: list[Any] = []

    def ours() -> None:
        refs.append(client.put(value))

    def raw() -> None:
        cluster.wait(lambda: stock.put("raw", value))

    times: dict[str, list[float]] = {"memcpy": [], "ours": [], "raw": []}

    def turn(number: int) -> None:
        times["memcpy"].append(seconds(lambda: target.copy_(value)))
        times["ours"].append(seconds(ours))
        client.delete(refs.pop())
        if number < 3:
            times["raw"].append(seconds(raw))
            cluster.wait(lambda: stock.delete("raw"))

    measured.repeat(repeats + 2, turn)
    first, first_raw = times["ours"][0], times["raw"][0]
    yield Figure(
        name=f"first_put_{mib}mib_vs_raw",
        value=first_raw / first,
        unit="times",
        goal=">= 2",
        detail={"ours_s": first, "raw_s": first_raw},
    )
    # From the third put on, this process has mapped the segment that is used again.
    put, memcpy, slow = (
        statistics.median(times[name][cut:]) for name, cut in (("ours", 2), ("memcpy", 2), ("raw", 0))
    )
    detail = {"gib_s": mib / 1024 / put, "memcpy_gib_s": mib / 1024 / memcpy, "raw_gib_s": mib / 1024 / slow}
    yield Figure(
        name=f"put_{mib}mib_vs_memcpy", value=memcpy / put, unit="times", goal=">= 0.4", detail=detail
    )
    yield Figure(name=f"put_{mib}mib_vs_raw", value=slow / put, unit="times", goal=">= 10")


def gets(cluster: Cluster, mib: int, repeats: int, measured: Measurements) -> Iterator[Figure]:
    """By reference and by key, the first read, some rows."""
    client = cluster.client
    ref = client.put(torch.zeros(mib * MIB, dtype=torch.uint8), key="large")
    asked = client.counters.gets - client.counters.gets_shared
    by_ref = side_by_side(measured, repeats * 3, ours=lambda: client.get(ref))["ours"]
    messages = client.counters.gets - client.counters.gets_shared - asked
    yield Figure(
        name=f"get_ref_{mib}mib", value=by_ref * 1e3, unit="ms", goal="<= 1", detail={"messages": messages}
    )
    keys = cluster.spec.index.keys
    found = side_by_side(
        measured,
        repeats * 5,
        call=lambda: cluster.wait(lambda: keys.call_one("none").as_asyncio()),
        get=lambda: client.get("large"),
    )
    yield Figure(
        name="get_by_key_vs_call_one",
        value=found["get"] / found["call"],
        unit="times",
        goal="<= 1.5",
        detail=found,
    )

    def read() -> Any:
        return client.get(ref).view(torch.int64).sum()

    warm = client.get(ref)
    warm.view(torch.int64).sum()
    found = side_by_side(measured, repeats, first=read, warm=lambda: warm.view(torch.int64).sum())
    yield Figure(
        name=f"get_and_first_read_{mib}mib_vs_warm",
        value=found["first"] / found["warm"],
        unit="times",
        goal="<= 3.5",
    )
    client.delete(ref)
    column = client.put(torch.zeros(65536, 1024))
    rows = np.sort(np.random.default_rng(0).choice(65536, 655, replace=False))
    found = side_by_side(
        measured,
        repeats * 3,
        some=lambda: client.get(column, rows=rows),
        all=lambda: client.get(column).clone(),
    )
    yield Figure(
        name="one_percent_of_rows_vs_all",
        value=found["some"] / found["all"],
        unit="ratio",
        goal="<= 0.05",
        detail=found,
    )
    client.delete(column)


def small(cluster: Cluster, repeats: int, measured: Measurements) -> Iterator[Figure]:
    """Small values against stock TorchStore, and many at once."""
    client, stock = cluster.client, cluster.stock
    value = torch.zeros(1024)
    names = iter(range(10**9))
    found = side_by_side(
        measured,
        repeats * 5,
        ours=lambda: client.put(value, key=f"o{next(names)}"),
        raw=lambda: cluster.wait(lambda: stock.put(f"r{next(names)}", value)),
    )
    yield Figure(
        name="small_put_vs_raw", value=found["ours"] / found["raw"], unit="times", goal="<= 0.8", detail=found
    )
    client.put(value, key="o")
    cluster.wait(lambda: stock.put("r", value))
    found = side_by_side(
        measured, repeats * 5, ours=lambda: client.get("o"), raw=lambda: cluster.wait(lambda: stock.get("r"))
    )
    yield Figure(
        name="small_get_vs_raw", value=found["ours"] / found["raw"], unit="times", goal="<= 0.5", detail=found
    )
    many = [torch.full((4096,), float(i)) for i in range(200)]
    refs: list[Any] = []
    put_times: list[float] = []
    get_times: list[float] = []

    def turn(_: int) -> None:
        put_times.append(seconds(lambda: refs.extend(client.put_batch(many))))
        get_times.append(seconds(lambda: client.get_batch(refs)))
        client.delete_batch(refs)
        refs.clear()

    measured.repeat(repeats * 3, turn)
    for name, times in (("put", put_times), ("get", get_times)):
        yield Figure(
            name=f"batch_{name}_200x16kib", value=statistics.median(times) * 1e3, unit="ms", goal="<= 20"
        )


def batches(cluster: Cluster, repeats: int, measured: Measurements) -> Iterator[Figure]:
    """Operations on a batch of 4,096 rows and 12 columns."""
    client = cluster.client
    with use_store(client):
        batch = DataProto.from_dict({f"c{i}": torch.zeros(4096, 64) for i in range(12)})
    order = torch.randperm(4096)
    read = client.counters.gets

    def operate() -> None:
        whole = DataProto.concat(batch.chunk(8))
        whole.select(["c0", "c1"])
        whole.reorder(order)

    value = side_by_side(measured, repeats * 3, ours=operate)["ours"]
    detail = {"reads": client.counters.gets - read}
    yield Figure(name="batch_operations", value=value * 1e3, unit="ms", goal="<= 5", detail=detail)
    batch.release()


def in_turn(
    measured: Measurements, repeats: int, works: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]]
) -> dict[str, float]:
    """As `side_by_side`, of puts, each with what takes it back; neither that is timed nor two warm-ups."""
    times: dict[str, list[float]] = {name: [] for name in works}

    def turn(_: int) -> None:
        for name, (put, undo) in works.items():
            begin = time.perf_counter()
            kept = put()
            times[name].append(time.perf_counter() - begin)
            undo(kept)

    done = measured.repeat(repeats + 2, turn)
    return {name: statistics.median(found[2:done]) for name, found in times.items()}


def ray_store(
    cluster: Cluster, sizes: list[int], largest: int, repeats: int, measured: Measurements
) -> Iterator[Figure]:
    """Ray's object store beside ours, where it is installed; nothing is claimed of it."""
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return
    client = cluster.client
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=4 * largest * MIB,
        )
    except Exception as error:  # noqa: BLE001 - Ray raises nothing narrower when its processes start too slowly
        print(f"without Ray, which did not start: {error}", file=sys.stderr)
        return

    def figure(name: str, found: dict[str, float]) -> Figure:
        return Figure(
            name=f"ray_{name}_vs_ours", value=found["ray"] / found["ours"], unit="times", detail=found
        )

    def put(value: torch.Tensor) -> dict[str, float]:
        ours = (lambda: client.put(value), client.delete)
        return in_turn(
            measured, repeats, {"ours": ours, "ray": (lambda: ray.put(value.numpy()), lambda ref: None)}
        )

    def get(value: torch.Tensor) -> dict[str, float]:
        mine, theirs = client.put(value), ray.put(value.numpy())
        found = side_by_side(
            measured, repeats * 3, ours=lambda: client.get(mine), ray=lambda: ray.get(theirs)
        )
        client.delete(mine)
        return found

    for mib in sizes:
        yield figure(f"put_{mib}mib", put(torch.randint(0, 255, (mib * MIB,), dtype=torch.uint8)))
    yield figure(f"get_{largest}mib", get(torch.zeros(largest * MIB, dtype=torch.uint8)))
    yield figure("small_put", put(torch.zeros(1024)))
    yield figure("small_get", get(torch.zeros(1024)))
    many = [torch.full((4096,), float(i)) for i in range(200)]
    ours = (lambda: client.put_batch(many), client.delete_batch)
    theirs = (lambda: [ray.put(one.numpy()) for one in many], lambda refs: None)
    yield figure("batch_put_200x16kib", in_turn(measured, repeats, {"ours": ours, "ray": theirs}))
    ray.shutdown()


def main() -> None:
    """Measure, then report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--quick", action="store_true", help="smaller values, for trying the script itself")
    options = parser.parse_args()
    sizes, largest = ([4], 16) if options.quick else ([64, 256], 1024)
    repeats = options.repeats
    with Measurements("store", repeats) as measured, contextlib.closing(Cluster()) as cluster:
        for mib in sizes:
            measured.add(puts(cluster, mib, repeats, measured))
        measured.add(gets(cluster, largest, repeats, measured))
        measured.add(small(cluster, repeats, measured))
        measured.add(batches(cluster, repeats, measured))
        measured.add(ray_store(cluster, sizes, largest, repeats, measured))


if __name__ == "__main__":
    main()
