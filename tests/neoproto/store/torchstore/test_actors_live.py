"""The TorchStore engine on real processes. Each test passes alone in a fresh interpreter."""

import asyncio
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from neoproto.data import DataProto, collect, split_for_ranks
from neoproto.errors import KeyMissing, StoreClosed, StoreError
from neoproto.store import use_store

pytestmark = pytest.mark.live


class Cluster:
    """Two workers, a store and the controller's client of it."""

    def __init__(self, volumes=1, strategy="host", host_ids=None, hosts=1, workers=2, mesh=None, **options):
        """`mesh` has that many hosts; if None, they are processes of this machine."""
        from monarch.job import ProcessJob

        from neoproto.store.torchstore.actors import StoreServer
        from neoproto.store.torchstore.client import StoreClient
        from tests.neoproto.store.torchstore.live_actors import Worker

        self.job = ProcessJob({"hosts": hosts}) if mesh is None else None
        self.per_host = workers // hosts
        hosts = mesh or self.job.state(cached_path=None).hosts
        self.procs = hosts.spawn_procs(per_host={"gpus": self.per_host})
        self.store_procs = hosts.spawn_procs(per_host={"volumes": volumes})
        self.workers = self.procs.spawn("workers", Worker)
        first = hosts if hosts.size() == 1 else hosts.slice(hosts=slice(0, 1))
        self.index_procs = first.spawn_procs(per_host={"index": 1})
        start = StoreServer.start(
            procs=self.store_procs,
            index_procs=self.index_procs,
            name="test_live",
            strategy=strategy,
            timeout_s=90,
            host_ids=host_ids,
            **options,
        )
        self.server = asyncio.run(start)
        self.spec = self.server.spec()
        self.client = StoreClient.attach(self.spec, host_id="0", local_rank=None)
        self.homes = [volume for _, volume in self.workers.attach.call(self.spec, host_ids).get(90)]

    def on(self, rank, method, *args, **kwargs):
        host, local = divmod(rank, self.per_host)
        worker = self.workers.slice(hosts=host, gpus=local)
        return getattr(worker, method).call_one(*args, **kwargs).get(90)

    def close(self):
        self.client.close()
        asyncio.run(self.server.close(10))
        if self.job is not None:
            self.job.kill()


@pytest.fixture
def cluster(request):
    cluster = Cluster(**getattr(request, "param", {}))
    yield cluster
    cluster.close()


@pytest.mark.core
def test_workers_exchange_every_kind_of_value(cluster):
    refs = cluster.on(0, "put_every_kind")
    assert len(refs) == 48
    assert cluster.on(1, "wrong_ones", refs) == []
    assert cluster.client.get("array").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cluster.on(1, "wrong_ones", refs[1:] + refs[:1]) != []


def test_every_kind_of_caller_can_use_the_client(cluster):
    for rank, method in enumerate(["run_blocking", "run_in_thread"]):
        ref = cluster.on(rank, method, "put", torch.full((4,), rank), key=f"k{rank}")
        assert cluster.client.get(ref).tolist() == [rank] * 4
        assert cluster.on(1 - rank, method, "get", ref).tolist() == [rank] * 4
        assert not cluster.on(rank, "root_clients")

    async def in_a_notebook():
        blocking = cluster.client.get("k1")
        future = cluster.client.get("k1", blocking=False)
        return blocking, await future, await asyncio.to_thread(cluster.client.get, "k0")

    blocking, awaited, threaded = asyncio.run(in_a_notebook())
    assert (blocking.tolist(), awaited.tolist(), threaded.tolist()) == ([1] * 4, [1] * 4, [0] * 4)


def test_missing_deleted_and_overwritten_keys(cluster):
    client = cluster.client
    with pytest.raises(KeyMissing, match="'nowhere' is not in store 'test_live'"):
        client.get("nowhere")
    with pytest.raises(KeyMissing, match="'nowhere'"):
        client.delete("nowhere")
    client.delete("nowhere", missing_ok=True)
    first = client.put(torch.zeros(2), key="k")
    second = client.put(torch.ones(2), key="k")
    assert client.get("k").tolist() == [1, 1]
    with pytest.raises(KeyMissing, match="deleted or overwritten"):
        client.get(first)
    client.delete(first, missing_ok=True)
    assert client.get(second).tolist() == [1, 1]
    client.delete(second)
    with pytest.raises(KeyMissing):
        client.get("k")
    assert client.keys() == []


def test_rows_are_selected_where_they_are(cluster):
    ref = cluster.on(0, "run", "put", torch.arange(1000).reshape(100, 10))
    assert cluster.client.get(ref, rows=np.array([7, 7, 99]))[:, 0].tolist() == [70, 70, 990]
    assert cluster.on(1, "run", "get", ref, rows=range(3))[:, 0].tolist() == [0, 10, 20]
    with pytest.raises(ValueError, match="outside its 100 rows"):
        cluster.client.get(ref, rows=range(100, 101))


@pytest.mark.core
def test_batches_travel_as_references(cluster):
    """The controller cuts, sends, collects and passes on a batch without touching a byte of its tensors."""
    with use_store(cluster.client):
        data = DataProto.from_dict(
            {"x": torch.arange(6), "wide": torch.zeros(6, 1 << 17)}, {"uid": list("abcdef")}
        )
    before = cluster.client.stats()
    split = split_for_ranks(data, 4, pad=True)
    assert len(pickle.dumps(split.chunks)) < 10_000
    results = []
    for rank, chunk in enumerate(split.chunks):
        results.append(cluster.on(rank % 2, "double", chunk, "x"))
    whole = split.collect(results)
    passed_on = cluster.on(1, "double", whole, "doubled")
    assert len(pickle.dumps([results, passed_on])) < 10_000
    assert cluster.client.stats() == before
    assert cluster.on(0, "stats")["bytes_copied"] == 2 * 2 * 8, (
        "a rank reads its own rows, of the column it uses"
    )
    assert cluster.client.stats(run=True)["bytes_copied"] > 0
    assert passed_on["doubled"].tolist() == [0, 4, 8, 12, 16, 20]
    assert len(whole.refs) == 8
    assert whole["doubled"].tolist() == [0, 2, 4, 6, 8, 10]
    assert whole["rank"].tolist() == [0, 0, 1, 1, 0, 0]
    assert collect([results[1], results[0]])["doubled"].tolist() == [4, 6, 0, 2]
    data.release()
    collect([*results, passed_on]).release()
    assert cluster.client.keys() == []


@pytest.mark.parametrize("cluster", [{"volumes": 2, "strategy": "local_rank"}], indirect=True)
def test_local_rank_strategy_gives_each_rank_a_volume(cluster):
    assert cluster.homes == ["0:0", "0:1"]
    assert cluster.client.volume == "0:0"
    refs = [cluster.on(rank, "run", "put", torch.tensor([rank]), key=f"r{rank}") for rank in range(2)]
    assert [ref.volume for ref in refs] == ["0:0", "0:1"]
    assert [value.item() for value in cluster.client.get_batch(["r1", "r0"])] == [1, 0]
    moved = cluster.on(1, "run", "put", torch.tensor([5]), key="r0")
    assert moved.volume == "0:1"
    assert cluster.on(0, "run", "get", "r0").item() == 5
    with pytest.raises(KeyMissing):
        cluster.client.get(refs[0])


@pytest.mark.core
def test_stock_torchstore_clients_share_the_store(cluster):
    cluster.client.put(torch.arange(3), key="ours.tensor")
    cluster.client.put({"a": 1}, key="ours.object")
    assert cluster.on(0, "stock_client", "get", "test_live", "ours.tensor").tolist() == [0, 1, 2]
    assert cluster.on(0, "stock_client", "get", "test_live", "ours.object") == {"a": 1}
    assert cluster.on(0, "stock_client", "exists", "test_live", "ours.object")
    assert sorted(cluster.on(0, "stock_client", "keys", "test_live", "ours")) == [
        "ours.object",
        "ours.tensor",
    ]
    cluster.on(1, "stock", "put", "theirs", torch.ones(2), "test_live")
    cluster.on(1, "stock", "put", "ours.object", torch.ones(1), "test_live")
    assert cluster.client.get("theirs").tolist() == [1, 1]
    assert cluster.client.get("ours.object").tolist() == [1]
    cluster.client.put(torch.zeros(1), key="theirs")
    assert cluster.on(0, "stock_client", "get", "test_live", "theirs").tolist() == [0]
    cluster.on(0, "stock_client", "delete", "test_live", "theirs")
    cluster.client.delete("ours.object")
    assert cluster.client.keys() == ["ours.tensor"]


def test_stores_side_by_side_do_not_see_each_other(cluster):
    """Nor does closing one, or a client of it, touch the other."""
    from neoproto.store.torchstore.actors import StoreServer
    from neoproto.store.torchstore.client import StoreClient

    start = StoreServer.start(
        procs=cluster.store_procs,
        index_procs=cluster.index_procs,
        name="test_beside",
        strategy="host",
        timeout_s=90,
    )
    server = asyncio.run(start)
    beside = StoreClient.attach(server.spec(), host_id="0")
    ours, theirs = cluster.client.put(torch.zeros(1 << 20), key="k"), beside.put(torch.ones(1 << 20), key="k")
    assert (cluster.client.get("k").sum(), beside.get("k").sum()) == (0, 1 << 20)
    assert cluster.client.keys() == beside.keys() == ["k"]
    with pytest.raises(KeyMissing):
        beside.delete(ours)
    beside.close()
    asyncio.run(server.close(10))
    with pytest.raises(StoreClosed):
        beside.get(theirs)
    assert cluster.on(0, "run", "get", "k").sum() == 0
    impatient = StoreClient.attach(replace(cluster.spec, timeout_s=1e-6), host_id="0")
    with pytest.raises(StoreError, match="did not answer within 1e-06 s"):
        impatient.get("k")
    impatient.close()


def test_a_store_takes_over_the_directory_of_one_that_closed(cluster):
    """Names lead to their own store, closed ones to nobody's, and the program does not grow with each."""
    from neoproto.store.torchstore.actors import StoreServer
    from neoproto.store.torchstore.client import StoreClient

    def opened(name):
        start = StoreServer.start(
            procs=cluster.store_procs,
            index_procs=cluster.index_procs,
            name=name,
            strategy="host",
            timeout_s=90,
        )
        server = asyncio.run(start)
        client = StoreClient.attach(server.spec(), host_id="0")
        client.put(torch.full((2,), len(name)), key="k")
        client.close()
        return server

    cluster.client.put(torch.zeros(2), key="k")
    first = opened("test_a")
    assert cluster.on(0, "stock_client", "get", "test_a", "k").tolist() == [6, 6]
    asyncio.run(first.close(10))
    before = len(os.listdir("/proc/self/task"))
    for name in ("test_bb", "test_ccc"):
        server = opened(name)
        assert cluster.on(0, "stock_client", "get", name, "k").tolist() == [len(name)] * 2
        for closed in ("test_a", *(["test_bb"] if name == "test_ccc" else [])):
            with pytest.raises(Exception, match="is closed"):
                cluster.on(1, "stock_client", "get", closed, "k")
        assert cluster.on(1, "stock_client", "get", "test_live", "k").tolist() == [0, 0]
        asyncio.run(server.close(10))
        assert len(os.listdir("/proc/self/task")) == before


def test_a_closed_client_and_a_closed_store_say_so(cluster):
    ref = cluster.client.put(1)
    cluster.client.close()
    cluster.client.close()
    with pytest.raises(StoreClosed):
        cluster.client.get(ref)
    asyncio.run(cluster.server.close(10))
    asyncio.run(cluster.server.close(10))
    for method, argument in [("get", ref), ("get", ref.key), ("put", 1), ("delete", ref)]:
        assert cluster.on(0, "error_of", method, argument) == "StoreClosed"
