import asyncio

import pytest
import torch

from neoproto.errors import StoreError
from neoproto.store import MemoryStore
from neoproto.weights import Publisher, Puller, WeightOptions, WeightRegistry
from neoproto.weights.puller import Slice, WeightReader
from neoproto.weights.transports import TRANSPORTS, make_transport
from neoproto.weights.transports.store import StoreTransport
from tests.neoproto.weights.host_store import HostStore
from tests.neoproto.weights.manifests import version


@pytest.fixture
def host():
    store = HostStore()
    yield store
    store.close()


def test_the_options_say_how_bytes_travel(host):
    assert make_transport(host, "auto").domain == "volume 0"
    assert make_transport(host, "shared_memory").domain == "volume 0"
    assert make_transport(host, "store").domain == ""
    assert make_transport(MemoryStore(), "auto").domain == ""
    with pytest.raises(StoreError, match="no shared memory in this process"):
        make_transport(MemoryStore(), "shared_memory")
    with pytest.raises(StoreError, match="no shared memory here"):
        StoreTransport(MemoryStore()).open(())


def test_a_transport_is_one_file_and_its_entry_says_where_versions_lie():
    assert {name: entry.in_store for name, entry in TRANSPORTS.items()} == {
        "auto": True,
        "nixl": False,
        "shared_memory": True,
        "store": True,
    }
    with pytest.raises(ValueError, match="one of auto, nixl, shared_memory, store, got 'tcp'"):
        WeightOptions(transport="tcp")


def test_put_slots_use_the_same_host_memory_for_every_version():
    transport = make_transport(MemoryStore(), "store")
    first, second = (transport.create({f"{n}/a": 8, f"{n}/b": 16}).buffers for n in range(2))
    assert [buffer.data_ptr() for buffer in first] == [buffer.data_ptr() for buffer in second]


def test_nixl_that_is_not_there_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nixl._api", None)
    with pytest.raises(StoreError, match="transport 'nixl' cannot be used"):
        make_transport(MemoryStore(), "nixl")


def test_nixl_reads_the_publishers_memory_bit_for_bit():
    """On whatever UCX has here; on a machine with a network card, that."""
    pytest.importorskip("nixl._api")
    options = WeightOptions(transport="nixl", num_slots=2, bucket_bytes=1 << 16, rollout_dtype="bfloat16")
    publisher = Publisher(MemoryStore(), None, options)
    store = MemoryStore()
    reader = WeightReader(store, make_transport(store, "nixl"))
    for n in range(5):
        generator = torch.Generator().manual_seed(n)
        tensors = {f"w{index}": torch.randn(50, 301, generator=generator) for index in range(8)}
        manifest = publisher.publish(version(n), tensors)
        expected = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        found = reader.read(manifest)
        assert all(torch.equal(found[name], expected[name]) for name in tensors)
        part = reader.read(manifest, select={"w3": Slice(dim=1, start=7, stop=90)})
        assert torch.equal(part["w3"], expected["w3"][:, 7:90])
    transport = publisher._transport
    assert (len(transport._used), len(transport._free)) == (2 * len(manifest.buckets), 0)

    async def pull():
        registry = WeightRegistry()
        await registry.publish(manifest)
        async with Puller(store, registry, "r0", transport=make_transport(store, "nixl")).pull() as pulled:
            assert torch.equal(pulled.tensors["w0"], expected["w0"])

    asyncio.run(pull())
    with pytest.raises(StoreError, match="cannot be read without it"):
        WeightReader(store).read(manifest)
