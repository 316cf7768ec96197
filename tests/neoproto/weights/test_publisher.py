from dataclasses import replace

import pytest
import torch

from neoproto.errors import KeyMissing, StoreFull, WeightMismatch, WeightsInUse
from neoproto.store import MemoryStore
from neoproto.weights import Publisher, WeightOptions, WeightVersion
from neoproto.weights.publisher import ALIGNMENT, OwnRegistry, plan_packing
from neoproto.weights.reading import WeightReader
from neoproto.weights.registry import LeaseInfo


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


def test_parameters_of_a_module_that_are_tied_are_recognised():
    head = torch.nn.Linear(4, 6, bias=False)
    embed = torch.nn.Embedding(6, 4)
    head.weight = embed.weight
    plan = plan_packing(
        {"embed": embed.weight, "head": head.weight}, bucket_bytes=1 << 20, rollout_dtype=None
    )
    assert len(plan.sources) == 1


def test_buckets_hold_no_more_than_their_size_except_for_one_larger_tensor():
    tensors = {f"w{index}": torch.zeros(size) for index, size in enumerate([10, 10, 100, 10, 5, 40, 1])}
    plan = plan_packing(tensors, bucket_bytes=256, rollout_dtype=None)
    assert plan.bucket_sizes == (104, 400, 84, 196)
    assert all(entry.offset % ALIGNMENT == 0 for entry in plan.entries)


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


def test_a_rank_that_does_not_write_returns_the_same_manifest_and_stores_nothing():
    store, quiet = MemoryStore(), MemoryStore()
    manifest = Publisher(store).publish(version(0), model_tensors())
    other = Publisher(quiet, writes=False)
    found = other.publish(version(0), model_tensors())
    assert found.entries == manifest.entries
    assert found.buckets == tuple(ref.key for ref in manifest.buckets)
    other.retire(version(0))
    assert quiet.trips == 0


def test_nothing_to_publish_and_useless_buckets_are_refused():
    with pytest.raises(ValueError, match="no tensors"):
        Publisher(MemoryStore()).publish(version(0), {})
    with pytest.raises(ValueError, match="bucket_bytes must be positive, got 0"):
        WeightOptions(bucket_bytes=0)


def test_a_reader_refuses_a_version_with_another_layout_and_names_what_differs():
    store = MemoryStore()
    publisher, reader = Publisher(store), WeightReader(store)
    reader.read(publisher.publish(version(0), {"a": torch.zeros(2), "b": torch.zeros(3)}))
    changed = publisher.publish(version(1), {"a": torch.zeros(2), "b": torch.zeros(4)})
    with pytest.raises(WeightMismatch, match=r"weights 0\.1 .* b is float32\[4\], not float32\[3\]"):
        reader.read(changed)


def test_a_reader_refuses_a_bucket_of_another_size():
    store = MemoryStore()
    manifest = Publisher(store).publish(version(0), {"a": torch.zeros(2)})
    store.put(torch.zeros(7, dtype=torch.uint8), key="weights/0.0/0")
    manifest = replace(manifest, buckets=("weights/0.0/0",))
    with pytest.raises(WeightMismatch, match=r"bucket weights/0\.0/0 has 7 bytes, its manifest says 8"):
        WeightReader(store).read(manifest)


class Registry(OwnRegistry):
    """Notes what it is told; says who reads the versions in `read`."""

    def __init__(self):
        super().__init__()
        self.told, self.read = [], set()

    def publish(self, manifest):
        super().publish(manifest)
        self.told.append(("publish", manifest.version.n))

    def retire(self, version):
        super().retire(version)
        self.told.append(("retire", version.n))

    def wait_reclaimed(self, version, timeout):
        self.told.append(("wait", version.n, timeout))
        if version.n in self.read:
            return (LeaseInfo(lease_id="1", holder="rollout/3", version=version, seconds_left=4.0),)
        return super().wait_reclaimed(version, timeout)


def test_the_oldest_version_makes_room_once_nobody_reads_it():
    store, registry = MemoryStore(), Registry()
    publisher = Publisher(store, registry, WeightOptions(num_slots=2))
    kept = [publisher.publish(version(n), {"w": torch.full((2,), n)}, timeout=5) for n in range(4)]
    assert registry.told == [
        *[("publish", 0), ("publish", 1)],
        *[("retire", 0), ("wait", 0, 5), ("publish", 2)],
        *[("retire", 1), ("wait", 1, 5), ("publish", 3)],
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


@pytest.mark.parametrize(("name", "value"), [("num_slots", 0), ("lease_ttl", 0.0)])
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        WeightOptions(**{name: value})
