import pytest
import torch

from neoproto.errors import KeyMissing, StoreFull, WeightsInUse
from neoproto.store import MemoryStore
from neoproto.weights import Publisher, WeightOptions, WeightVersion
from neoproto.weights.puller import Slice, WeightReader
from neoproto.weights.registry import LeaseInfo
from tests.neoproto.weights.host_store import FakeDTensor, HostStore, Mesh, Ranks, Shard


def version(n: int, epoch: int = 0) -> WeightVersion:
    return WeightVersion(epoch=epoch, n=n)


def model_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    embed = torch.randn(10, 8, generator=generator)
    return {
        "embed": embed,
        "layer.weight": torch.randn(8, 8, generator=generator).t(),
        "layer.scale": torch.tensor(0.5),
        "layer.empty": torch.empty(0, 4),
        "layer.counts": torch.arange(5),
        "layer.flags": torch.tensor([True, False, True]),
        "layer.half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "lm_head": embed,
    }


@pytest.mark.parametrize("bucket_bytes", [1, 64, 200, 10_000])
def test_what_is_published_is_pulled_bit_for_bit(bucket_bytes):
    store, tensors = MemoryStore(), model_tensors()
    manifest = Publisher(store, options=WeightOptions(bucket_bytes=bucket_bytes)).publish(version(0), tensors)
    pulled = WeightReader(store).read(manifest)
    assert list(pulled) == list(tensors)
    for name, tensor in tensors.items():
        assert pulled[name].dtype == tensor.dtype
        assert pulled[name].shape == tensor.shape
        assert torch.equal(pulled[name], tensor), name


def test_float32_is_cast_and_other_dtypes_are_kept():
    store, tensors = MemoryStore(), model_tensors()
    manifest = Publisher(store, options=WeightOptions(rollout_dtype="bfloat16")).publish(version(0), tensors)
    pulled = WeightReader(store).read(manifest)
    for name, tensor in tensors.items():
        expected = tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
        assert pulled[name].dtype == expected.dtype
        assert torch.equal(pulled[name], expected), name


def test_tied_weights_are_stored_once_and_come_back_tied():
    store, tensors = MemoryStore(), model_tensors()
    manifest = Publisher(store).publish(version(0), tensors)
    pulled = WeightReader(store).read(manifest)
    assert pulled["lm_head"].data_ptr() == pulled["embed"].data_ptr()
    untied = Publisher(MemoryStore()).publish(version(0), tensors | {"lm_head": tensors["embed"].clone()})
    assert untied.nbytes == manifest.nbytes + tensors["embed"].nbytes


def test_a_version_holds_the_values_of_its_publish_not_later_ones():
    store, weight = MemoryStore(), torch.ones(3)
    publisher, reader = Publisher(store), WeightReader(store)
    first = publisher.publish(version(0), {"w": weight})
    weight += 1
    second = publisher.publish(version(1), {"w": weight})
    assert reader.read(first)["w"].tolist() == [1, 1, 1]
    assert reader.read(second)["w"].tolist() == [2, 2, 2]


def test_retire_deletes_the_objects_of_that_version_only():
    store = MemoryStore()
    publisher = Publisher(store, options=WeightOptions(bucket_bytes=64))
    old, new = (publisher.publish(version(n), model_tensors()) for n in (0, 1))
    publisher.retire(version(0))
    assert set(store.keys()) == {ref.key for ref in new.buckets}
    assert publisher.live == (version(1),)
    with pytest.raises(KeyMissing):
        WeightReader(store).read(old)
    with pytest.raises(ValueError, match=r"weights 0\.0 are not published here; published: 0\.1"):
        publisher.retire(version(0))


def test_versions_only_go_up():
    publisher = Publisher(MemoryStore())
    publisher.publish(version(5), model_tensors())
    for stale in (version(5), version(4)):
        with pytest.raises(ValueError, match=r"after 0\.5"):
            publisher.publish(stale, model_tensors())
    publisher.publish(version(4, epoch=1), model_tensors())


def test_a_failed_put_leaves_the_version_free_for_another_try():
    class Full(MemoryStore):
        full = True

        def put_batch(self, values, *, blocking=True):
            if self.full:
                raise StoreFull("no room")
            return super().put_batch(values, blocking=blocking)

    store = Full()
    publisher = Publisher(store)
    with pytest.raises(StoreFull):
        publisher.publish(version(0), model_tensors())
    assert publisher.live == ()
    store.full = False
    publisher.publish(version(0), model_tensors())


def test_nothing_to_publish_and_useless_buckets_are_refused():
    with pytest.raises(ValueError, match="no tensors"):
        Publisher(MemoryStore()).publish(version(0), {})
    with pytest.raises(ValueError, match="bucket_bytes must be positive, got 0"):
        WeightOptions(bucket_bytes=0)


class Registry:
    """Notes what is announced and withdrawn; says who reads the versions in `read`."""

    def __init__(self):
        self.told, self.read = [], set()

    def announce(self, manifest):
        self.told.append(("announce", manifest.version.n))

    def withdraw(self, version, timeout):
        self.told.append(("withdraw", version.n, timeout))
        if version.n in self.read:
            return (LeaseInfo(lease_id="1", holder="rollout/3", version=version, seconds_left=4.0),)
        return ()


def test_the_oldest_version_makes_room_once_nobody_reads_it():
    store, registry = MemoryStore(), Registry()
    publisher = Publisher(store, registry, WeightOptions(num_slots=2))
    kept = [publisher.publish(version(n), {"w": torch.full((2,), n)}, timeout=5) for n in range(4)]
    assert registry.told == [
        *[("announce", 0), ("announce", 1)],
        *[("withdraw", 0, 5), ("announce", 2)],
        *[("withdraw", 1, 5), ("announce", 3)],
    ]
    assert publisher.live == (version(2), version(3))
    assert set(store.keys()) == {ref.key for manifest in kept[2:] for ref in manifest.buckets}


def test_a_slot_that_is_still_read_is_not_overwritten_and_the_holder_is_named():
    store, registry = MemoryStore(), Registry()
    publisher = Publisher(store, registry, WeightOptions(num_slots=1))
    old = publisher.publish(version(0), {"w": torch.zeros(2)})
    registry.read = {0}
    with pytest.raises(
        WeightsInUse, match=r"weights 0\.0 .* after 5\.0 s, by rollout/3 on 0\.0 \(4\.0 s left\)"
    ):
        publisher.publish(version(1), {"w": torch.ones(2)}, timeout=5)
    assert WeightReader(store).read(old)["w"].tolist() == [0, 0]
    registry.read = set()
    new = publisher.publish(version(1), {"w": torch.ones(2)})
    assert set(store.keys()) == {ref.key for ref in new.buckets}


@pytest.mark.parametrize(("name", "value"), [("num_slots", 0), ("bucket_bytes", 0)])
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        WeightOptions(**{name: value})


@pytest.fixture
def host():
    store = HostStore()
    yield store
    store.close()


def test_a_version_is_written_once_and_read_where_it_was_written(host):
    publisher, tensors = Publisher(host, options=WeightOptions(rollout_dtype="bfloat16")), model_tensors()
    for n in range(4):
        tensors["embed"] += 1
        manifest = publisher.publish(version(n), tensors)
        found = WeightReader(host).read(manifest)
        for name, tensor in tensors.items():
            expected = tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
            assert torch.equal(found[name], expected), name
        del found
    stats = host.stats()
    assert (stats["objects"], stats["reservations"]) == (2, 0)
    assert (stats["made"], stats["reused"]) == (2, 2)
    assert host.counters.puts == 4


def sharded(rank, tensors):
    return {name: FakeDTensor(whole, (Shard(0),), Mesh((3,), (rank,))) for name, whole in tensors.items()}


def whole_tensors(n):
    return {
        "a": torch.arange(35.0).view(7, 5) + n,
        "b": torch.arange(4.0) * n,
        "c": torch.full((2, 3), float(n)),
    }


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("mapped", [True, False])
def test_ranks_publish_their_own_shards_in_parallel_and_nobody_gathers(hosts, mapped):
    stores = [HostStore(f"h{number}", mapped=mapped) for number in range(hosts)]
    stores[0].neighbours = stores[1:]
    gathered, registry = [], Registry()

    def publish(peer):
        publisher = Publisher(stores[peer.rank % hosts], registry, peers=peer)
        for n in range(5):
            own = sharded(peer.rank, whole_tensors(n))
            manifest = publisher.publish(version(n), own)
            gathered.extend(tensor.gathered for tensor in own.values())
        return manifest

    manifests = Ranks(3).run(publish)
    assert manifests[0] == manifests[1] == manifests[2]
    assert not any(gathered)
    assert [told[0] for told in registry.told].count("announce") == 5
    found = WeightReader(stores[0]).read(manifests[0])
    for name, expected in whole_tensors(4).items():
        assert torch.equal(found[name], expected), name
    part = WeightReader(stores[0]).read(manifests[0], select={"a": Slice(dim=0, start=1, stop=6)})
    assert torch.equal(part["a"], whole_tensors(4)["a"][1:6])
    assert len(manifests[0].entries[0].pieces) == (1 if hosts == 1 else 3)
    del found, part
    for store in stores:
        assert store.stats()["objects"] == 2
        store.close()


def boom(*args, **kwargs):
    raise StoreFull("no room for it")


def break_at(when, publisher, registry, tensors):
    """Let a step of the next publish fail on this rank."""
    transport = publisher._transport
    match when:
        case "room":
            registry.withdraw = boom
        case "reserve":
            transport.create = boom
        case "open":
            transport.open = boom
        case "fill":
            tensors["a"].to_local = boom
        case "commit":
            transport._in_place._client.publish = boom
        case "announce":
            registry.announce = boom


@pytest.mark.parametrize(
    ("when", "rank"),
    [("room", 0), ("reserve", 0), ("open", 1), ("fill", 2), ("commit", 0), ("announce", 0)],
)
def test_a_failure_on_one_rank_ends_all_alike_and_leaves_nothing(host, when, rank):
    def publish(peer):
        registry = Registry()
        publisher = Publisher(host, registry, WeightOptions(num_slots=1), peers=peer)
        publisher.publish(version(0), sharded(peer.rank, whole_tensors(0)))
        own = sharded(peer.rank, whole_tensors(1))
        if peer.rank == rank:
            break_at(when, publisher, registry, own)
        publisher.publish(version(1), own)

    assert [str(result) for result in Ranks(3).run(publish)] == ["no room for it"] * 3
    assert host.stats()["objects"] == (1 if when == "room" else 0)
    host.__dict__.pop("publish", None)
    Publisher(host).publish(version(2), whole_tensors(2))
    stats = host.stats()
    assert stats["objects"] == stats["live_slots"] == (2 if when == "room" else 1)
    assert stats["reservations"] == 0
