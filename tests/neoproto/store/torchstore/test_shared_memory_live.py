"""Shared memory under real processes: messages, leftovers, deaths, two hosts. Each test passes alone."""

import asyncio
import os
import signal
import time

import pytest
import torch

from neoproto.errors import KeyMissing, StoreError, StoreFull
from neoproto.store import shm
from tests.neoproto.store.torchstore.test_actors_live import Cluster
from tests.neoproto.store.torchstore.two_hosts import check_two_hosts

pytestmark = pytest.mark.live

MIB = 1 << 20
SOAK_S = float(os.environ.get("NEOPROTO_SOAK_S", "20"))


@pytest.fixture
def cluster(request):
    cluster = Cluster(**getattr(request, "param", {}))
    yield cluster
    cluster.close()
    assert files(cluster) == []


def files(cluster):
    prefixes = tuple(cluster.spec.memory.values())
    return [name for name in os.listdir(shm.SHM_DIR) if name.startswith(prefixes)]


def segments(cluster):
    return [name for name in files(cluster) if ".s" in name]


def messages(cluster):
    return cluster.client.counters.gets - cluster.client.counters.gets_shared


def test_references_are_read_without_messages_and_segments_recycled(cluster):
    client = cluster.client
    for i in range(5):
        refs = [client.put(torch.full((n,), i)) for n in (10, MIB)]
        for ref in refs:
            value = client.get(ref)
            assert value.unique().tolist() == [i]
            assert cluster.on(1, "run", "get", ref, rows=range(3)).tolist() == [i] * 3
        del value
        client.delete_batch(refs)
    assert messages(cluster) == 0
    assert len(segments(cluster)) == 2
    assert cluster.on(1, "stats")["gets_shared"] == 10
    found = client.stats(run=True)
    assert (found["objects"], found["made"], found["reused"]) == (0, 2, 4)
    assert client.stats()["bytes_in"] == 5 * 8 * (MIB + 10)
    (owner,) = [name for name in files(cluster) if name.endswith(".owner")]
    with open(f"/proc/{lock_holder(shm.path_of(owner))}/maps") as maps:
        assert "libtorch" not in maps.read(), "a volume moves bytes, and needs no torch for that"


@pytest.mark.core
@pytest.mark.parametrize("cluster", [{"limit_bytes": 8 * MIB}], indirect=True)
def test_a_full_store_says_so_and_keeps_nothing(cluster):
    client = cluster.client
    kept = client.put(torch.ones(4 * MIB, dtype=torch.uint8))
    with pytest.raises(StoreFull, match="at most 8388608"):
        client.put(torch.ones(6 * MIB, dtype=torch.uint8), key="k")
    with pytest.raises(StoreFull):
        client.put_batch([torch.ones(3 * MIB, dtype=torch.uint8)] * 2)
    with pytest.raises(KeyMissing):
        client.get("k")
    assert int(client.get(kept).sum()) == 4 * MIB
    client.delete(kept)
    assert int(client.get(client.put(torch.ones(6 * MIB, dtype=torch.uint8)))[-1]) == 1
    assert client.stats(run=True)["reservations"] == 0


@pytest.mark.core
def test_snapshots_outlive_deletion_and_not_their_holder(cluster):
    client = cluster.client
    first = client.put(torch.arange(3), key="k")
    assert cluster.on(0, "snapshot", "k", 60.0) == first
    client.delete("k")
    assert client.get(first).tolist() == [0, 1, 2]
    with pytest.raises(KeyMissing):
        client.get("k")
    with client.snapshot(client.put(1, key="other")) as other:
        assert other.get() == 1
        client.delete("other")
        assert client.stats(run=True)["leases"] == 2
    cluster.on(0, "release")
    with pytest.raises(KeyMissing):
        client.get(first)
    second = client.put(torch.arange(4))
    cluster.on(1, "snapshot", second, 4.0)
    lease = cluster.spec.volume(second.volume).lease
    lease.call_one(second.key, second.generation, "a holder that died", 4.0).get(90)
    client.delete(second)
    assert client.stats(run=True)["leases"] == 2
    until = time.monotonic() + 60
    while (found := client.stats(run=True))["leases"] == 2:
        assert time.monotonic() < until, "the lease of a holder that died runs out"
        time.sleep(0.2)
    # The worker took its lease before that one, for as long, and has renewed it.
    assert (found["leases"], found["deferred_deletions"]) == (1, 1)
    assert client.get(second).tolist() == [0, 1, 2, 3]
    cluster.on(1, "release")
    assert client.stats(run=True)["objects"] == 0


TWO_HOSTS = {"hosts": 2, "host_ids": ["0", "1"], "sharing": "host", "remote": "rdma"}


@pytest.mark.parametrize("cluster", [TWO_HOSTS], indirect=True)
def test_two_hosts_have_a_volume_each_and_reach_each_others_rows(cluster):
    """Monarch carries RDMA over TCP where there is no hardware for it."""
    assert check_two_hosts(cluster) == 3


def test_a_volume_that_died_leaves_nothing_and_says_so(cluster, monkeypatch):
    import monarch.actor

    # Without a runtime, which has a hook of its own, Monarch interrupts the program.
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    client = cluster.client
    held = client.get(client.put(torch.ones(MIB)))
    (owner,) = [name for name in files(cluster) if name.endswith(".owner")]
    os.kill(lock_holder(shm.path_of(owner)), signal.SIGKILL)
    with pytest.raises(StoreError):
        client.put(torch.ones(MIB))
    assert int(held.sum()) == MIB  # files of the dead one may be swept already, by a store that starts beside
    with pytest.raises(StoreError):
        asyncio.run(cluster.server.close(10))
    assert files(cluster) == []


def lock_holder(path):
    """The process that locks a file."""
    inode = str(os.stat(path).st_ino)
    with open("/proc/locks") as file:
        lines = [line.split() for line in file]
    return int(next(line[4] for line in lines if line[5].split(":")[-1] == inode))


@pytest.mark.parametrize("cluster", [{"workers": 4, "limit_bytes": 1024 * MIB}], indirect=True)
def test_soak(cluster):
    asked = [cluster.workers.slice(hosts=0, gpus=rank).soak.call_one(SOAK_S) for rank in range(4)]
    found = [one.get(SOAK_S + 120) for one in asked]
    assert sum(one["wrong"] for one in found) == 0
    for one in found:
        assert one["rounds"] > SOAK_S / 4
        grown = [after - before for before, after in zip(one["before"], one["after"], strict=True)]
        assert grown[0] < 64, found
        assert grown[1] < 16, found
    stats = cluster.client.stats(run=True)
    assert stats["objects"] == 0
    assert stats["held_bytes"] <= 1024 * MIB
    assert stats["reused"] > stats["made"]
    assert len(segments(cluster)) == stats["segments"]
