"""What holds between two hosts, and programs that are two hosts; run as `python -m … NAME ARGS`.

host 0: controller, worker 0, volume "0", index        host 1: worker 1, volume "1"
"""

import sys

import numpy as np
import pytest
import torch

from neoproto.errors import KeyMissing


def check_two_hosts(cluster):
    """Values and rows cross over, each in as many bytes as it has; what is local is mapped.

    Returns:
        how many answers were read by RDMA.
    """
    assert cluster.homes == ["0", "1"]
    client = cluster.client
    ref = cluster.on(1, "run", "put", torch.arange(40_000).reshape(20_000, 2))
    assert ref.volume == "1"
    rows = np.array([5, 19_999, 5])
    sent = client.counters.bytes_out
    for _ in range(2):
        assert client.get(ref, rows=rows)[:, 0].tolist() == [10, 39_998, 10]
    assert client.counters.bytes_out - sent == 2 * 16
    assert (client.stats()["cache_hits"], client.stats()["cache_misses"]) == (2, 2)
    assert torch.equal(client.get(ref), torch.arange(40_000).reshape(20_000, 2))
    assert cluster.on(1, "stats")["gets"] == 0
    cluster.on(1, "run", "get", ref)
    assert cluster.on(1, "stats")["gets_shared"] == 1
    cluster.on(1, "run", "put", {"x": torch.ones(3)}, key="k")
    assert client.get("k")["x"].tolist() == [1, 1, 1]
    client.put(np.arange(4), key="k")
    assert cluster.on(1, "run", "get", "k").tolist() == [0, 1, 2, 3]
    client.delete(ref)
    with pytest.raises(KeyMissing):
        client.get(ref, rows=rows)
    assert client.stats(run=True)["volumes"] == 2
    large = torch.arange(3 << 20).reshape(3, -1)
    assert torch.equal(cluster.on(1, "run", "get", client.put(large, key="large")), large)
    far = cluster.on(1, "run", "put", {"large": large, "none": torch.empty(0)})
    assert torch.equal(client.get(far)["large"], large)
    far_rows = cluster.on(1, "run", "put", large)
    assert torch.equal(client.get(far_rows, rows=np.array([2, 0])), large[[2, 0]])
    client.delete_batch([far, far_rows])
    mine, theirs = client.put(large[0, :5]), cluster.on(1, "run", "put", large[0, 5:10])
    assert [value.tolist() for value in client.get_batch([theirs, mine])] == [
        [5, 6, 7, 8, 9],
        [0, 1, 2, 3, 4],
    ]
    client.delete_batch([mine, theirs, "large", "k"])
    assert client.keys() == []
    found = client.stats(run=True)
    assert found["objects"] == 0
    return found["offered"]


def serve(address):
    """Be a host at an address."""
    from monarch.actor import run_worker_loop_forever

    run_worker_loop_forever(address=address, ca="trust_all_connections")


def control(address, *hosts):
    """Run a store and two workers on two hosts, check them, and say so."""
    from monarch.actor import attach_to_workers, enable_transport

    from tests.neoproto.store.torchstore.test_actors_live import Cluster

    enable_transport(address)
    mesh = attach_to_workers(name="hosts", ca="trust_all_connections", workers=list(hosts))
    cluster = Cluster(mesh=mesh, hosts=2, host_ids=["0", "1"])
    assert check_two_hosts(cluster) == 0, "there is no hardware for it here"
    cluster.close()
    mesh.shutdown().get()
    print("held", flush=True)


if __name__ == "__main__":
    {"serve": serve, "control": control}[sys.argv[1]](*sys.argv[2:])
