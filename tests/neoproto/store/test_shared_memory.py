"""Segments, locks and the table, with real files and small processes but no actors."""

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from neoproto.errors import KeyMissing, StoreClosed, StoreError, StoreFull
from neoproto.store import shm
from neoproto.store import volume as volume_module
from neoproto.store.base import ObjectRef
from neoproto.store.codec import encode
from neoproto.store.counters import REPORTED
from neoproto.store.shm import MAP_BYTES, SharedVolume, aligned, layout, total_bytes
from neoproto.store.volume import SegmentPool, VolumeContents, VolumeOptions, round_up, volume_ids

MIB = 1 << 20
NO_STATS = ("a client", dict.fromkeys(REPORTED, 0))


class Host:
    """A volume's files, and a process's view of them."""

    def __init__(self, limit=64 * MIB, clock=None):
        self.prefix = shm.volume_prefix(f"unit-{os.getpid()}")
        self.owner = shm.Owner.claim(self.prefix)
        self.table = shm.Table.create(self.prefix)
        times = {} if clock is None else {"clock": clock}
        self.pool = SegmentPool(self.prefix, self.table, limit, wait_s=0.1, **times)
        self.view = SharedVolume.open(self.prefix)
        self.generation = 100

    def reserve(self, nbytes, slots=1):
        return asyncio.run(self.pool.reserve(nbytes, slots))

    def put(self, value):
        info, parts = encode(value)
        sizes = [part.size for part in parts]
        reservation = self.reserve(total_bytes([sizes]))
        writer = self.view.open_writer(reservation)
        location = writer.allocate(sizes)
        writer.write(location, parts)
        self.generation += 1
        self.view.seal([location.slot], [self.generation])
        self.pool.fulfil(reservation.token, location.slot, self.generation)
        writer.close()
        return ObjectRef(
            store="unit", key="k", volume="0", info=info, generation=self.generation, location=location
        )

    def free(self, ref):
        self.pool.free(ref.location.slot)

    @contextlib.contextmanager
    def program(self, *args):
        """A process of `shm_programs`, after its first line of output; killed in the end."""
        command = [sys.executable, "-m", "tests.neoproto.store.shm_programs", *map(str, args)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture
def host():
    host = Host()
    yield host
    host.owner.release()


def big(fill, n=MIB):
    return torch.full((n,), fill, dtype=torch.uint8)


def test_a_value_is_mapped_and_belongs_to_the_reader(host):
    ref = host.put(big(7))
    one, two = host.view.read(ref), host.view.read(ref)
    one[:] = 1
    assert two.unique().tolist() == [7]
    assert host.view.read(ref).unique().tolist() == [7]
    assert one.unique().tolist() == [1]
    assert one.untyped_storage().nbytes() == MIB


def test_small_values_and_pickles_come_back(host):
    values = [torch.arange(5), torch.empty(0), np.arange(6).reshape(2, 3), {"a": [torch.ones(2), "b"]}]
    for value in values:
        info, parts = encode(host.view.read(host.put(value)))
        expected, bytes_put = encode(value)
        assert info == expected
        assert [part.tolist() for part in parts] == [part.tolist() for part in bytes_put]
    assert host.view.holds == 0


def test_rows_of_large_and_small_values(host):
    for n in (100, 100_000):
        ref = host.put(torch.arange(n * 2).reshape(n, 2))
        assert host.view.read(ref, np.array([n - 1, 0, 0]))[:, 0].tolist() == [2 * n - 2, 0, 0]
        assert host.view.read(ref, range(1, 3))[:, 1].tolist() == [3, 5]
        with pytest.raises(ValueError, match="outside"):
            host.view.read(ref, range(n, n + 1))
    gc.collect()
    assert host.view.holds == 0


def test_wide_rows_are_read_one_by_one_and_nothing_else_is(host, monkeypatch):
    """By call at first, then from a mapping that is kept."""
    read = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(preadv(*args)) or read[-1])
    table = torch.arange(512 * 512, dtype=torch.float32).reshape(512, 2, 256)
    ref = host.put(table)
    wanted = (np.array([511, 3, 4, 5, 3]), range(10, 20), range(9, 0, -4), range(0), np.array([7]))
    for known in (False, True):
        for rows in wanted:
            if not known:
                host.view = SharedVolume.open(host.prefix)
            index = np.asarray(rows, dtype=np.int64)
            read.clear()
            assert torch.equal(host.view.read(ref, rows), table[index])
            assert sum(read) == (0 if known else len(rows) * 2048)
            assert host.view.copied % 2048 == 0
    assert host.view.holds == 0
    copied = host.view.copied
    host.view.read(ref, np.array([1, 2])).zero_()
    assert host.view.copied - copied == 2 * 2048
    assert torch.equal(host.view.read(ref), table)
    host.free(ref)
    with pytest.raises(KeyMissing):
        host.view.read(ref, range(1))
    assert host.put(table).location.segment == ref.location.segment, "no lock is kept"


def test_a_segment_is_reused_only_when_no_reader_holds_it(host):
    ref = host.put(big(1))
    held = host.view.read(ref)
    part = held[10:20]
    del held
    host.free(ref)
    with pytest.raises(KeyMissing):
        host.view.read(ref)
    other = host.put(big(2))
    assert other.location.segment != ref.location.segment
    assert part.tolist() == [1] * 10
    del part
    assert host.view.holds == 0
    assert host.put(big(3)).location.segment == ref.location.segment
    with pytest.raises(KeyMissing):
        host.view.read(ref)


def test_a_killed_reader_counts_as_gone(host, tmp_path):
    ref = host.put(big(1))
    (tmp_path / "ref").write_bytes(pickle.dumps(ref))
    with host.program("hold", host.prefix, tmp_path / "ref") as (process, told):
        assert told == str(MIB)
        host.free(ref)
        assert host.put(big(2)).location.segment != ref.location.segment
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert host.put(big(3)).location.segment == ref.location.segment


def test_a_killed_writer_takes_nothing_along(tmp_path):
    now = [0.0]
    host = Host(clock=lambda: now[0])
    reservation = host.reserve(2 * MIB)
    (tmp_path / "reservation").write_bytes(pickle.dumps(reservation))
    with host.program("begin_to_write", host.prefix, tmp_path / "reservation") as (process, told):
        assert told == "half"
        now[0] = 1000.0
        host.pool.reap()
        assert host.pool.stats().reservations == 1  # it lives, however slow
        process.send_signal(signal.SIGKILL)
        process.wait()
    host.pool.reap()
    assert host.pool.stats().taken_back == 1
    assert host.reserve(2 * MIB).segment == reservation.segment
    with pytest.raises(StoreError, match="taken back"):
        host.view.open_writer(reservation)
    with pytest.raises(StoreError, match="taken back"):
        host.pool.fulfil(reservation.token, reservation.slots[0], 5)
    host.owner.release()


def test_a_value_announced_by_a_writer_that_died_stays_until_deleted():
    now = [0.0]
    host = Host(clock=lambda: now[0])
    reservation = host.reserve(100)
    host.view.seal(reservation.slots, [55])
    now[0] = 1000.0
    host.pool.reap()
    assert host.table.words[reservation.slots[0]] == 55
    host.pool.free_uncommitted(reservation.slots[0], 54)
    assert host.pool.stats().idle_segments == 0
    host.pool.free_uncommitted(reservation.slots[0], 55)
    assert host.pool.stats().idle_segments == 1
    host.owner.release()


def test_a_value_overwritten_before_its_commit_came_is_gone_and_its_put_no_failure(host):
    first, second = host.reserve(100), host.reserve(100)
    host.view.seal(first.slots, [55])
    host.pool.free_uncommitted(first.slots[0], 55)  # another writer's value has taken the key
    again = host.reserve(100)  # may have the slot by now
    host.view.seal(second.slots, [66])
    assert host.pool.fulfil(second.token, second.slots[0], 66)
    assert not host.pool.fulfil(first.token, first.slots[0], 55)
    with pytest.raises(StoreError, match="taken back"):
        host.pool.fulfil(first.token, first.slots[0], 55)
    host.view.seal(again.slots, [77])
    assert host.pool.fulfil(again.token, again.slots[0], 77)


def test_the_bound_holds_and_idle_segments_make_room(host):
    refs = [host.put(big(i, 20 * MIB)) for i in range(3)]
    with pytest.raises(StoreFull, match="at most 67108864 bytes"):
        host.put(big(9, 20 * MIB))
    with pytest.raises(StoreFull):
        host.put(big(9, 65 * MIB))
    assert [int(host.view.read(ref)[0]) for ref in refs] == [0, 1, 2]
    host.free(refs[0])
    host.free(refs[1])
    whole = host.put(big(5, 40 * MIB))
    assert int(host.view.read(whole)[-1]) == 5
    assert host.pool.stats().held_bytes <= 64 * MIB
    assert sum(os.stat(f"/dev/shm/{n}").st_blocks * 512 for n in names(f"{host.prefix}.s")) <= 64 * MIB


def test_a_reader_that_lets_go_makes_room_for_a_put_that_waits(host):
    ref = host.put(big(1, 40 * MIB))
    held = [host.view.read(ref)]
    host.free(ref)
    host.pool.wait_s = 5.0
    threading.Timer(0.2, held.clear).start()
    assert int(host.view.read(host.put(big(2, 50 * MIB)))[0]) == 2


def test_too_little_left_in_shared_memory_is_an_error_before_any_write(host):
    host.pool.free_bytes = lambda: volume_module.margin() + MIB
    assert host.put(big(1, MIB))
    with pytest.raises(StoreFull, match="has 68157440 left"):
        host.put(big(1, 2 * MIB))
    assert host.pool.stats().segments == 1


def test_what_shared_memory_has_no_room_for_goes_to_files(host, tmp_path):
    host.pool.spill = volume_module.Spill.into(str(tmp_path))
    host.pool.free_bytes = lambda: volume_module.margin() + MIB
    small, large = host.put(big(1, MIB)), host.put(big(2, 20 * MIB))
    assert host.view.read(large, np.array([0, 5])).tolist() == [2, 2]
    assert [int(host.view.read(ref)[-1]) for ref in (small, large)] == [1, 2]
    (file,) = tmp_path.iterdir()
    found = host.pool.stats()
    assert file.stat().st_blocks * 512 >= found.spilled_bytes >= 20 * MIB
    assert found.held_bytes < 2 * MIB
    host.free(large)
    again = host.put(big(3, 20 * MIB))
    assert int(host.view.read(again)[-1]) == 3
    assert host.pool.stats().reused == 1
    host.pool.spill = volume_module.Spill(folder=str(tmp_path), limit_bytes=30 * MIB)
    with pytest.raises(StoreFull, match=f"; {tmp_path} holds .* of at most 31457280 bytes"):
        host.put(big(4, 20 * MIB))
    host.free(again)
    assert int(host.view.read(host.put(big(5, 28 * MIB)))[-1]) == 5, "idle files make room"
    host.pool.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mib", "left"), [(64, 16), (8192, 64)])
def test_the_reserve_scales_with_what_there_is(mib, left, monkeypatch):
    size = os.statvfs_result((4096, 4096, mib << 8, mib << 8, mib << 8, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: size)
    assert volume_module.margin() == left * MIB


def test_slots_without_memory_are_an_error_and_no_bus_error():
    """In a /dev/shm of its own."""
    program = [sys.executable, "-m", "tests.neoproto.store.shm_programs", "overfill", "np.overfill"]
    mount = 'mount -t tmpfs -o size=100m tmpfs /dev/shm || exit 99; exec "$@"'
    command = ["unshare", "--mount", "bash", "-c", mount, "bash", *program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip(f"no namespaces can be made here: {done.stderr}")
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == [
        "no memory for 59999 more values: /dev/shm: No space left on device",
        "10 10",
    ]


def test_a_reader_racing_with_reuse_sees_whole_values_only(host):
    stop, wrong, seen = threading.Event(), [], [0]
    current = [host.put(torch.full((MAP_BYTES // 8 + 10,), 0)), host.put(torch.full((50,), 0))]

    def read():
        while not stop.is_set():
            for ref in list(current):
                with contextlib.suppress(KeyMissing):
                    value = host.view.read(ref)
                    seen[0] += 1
                    if (value != value[0]).any():
                        wrong.append(value)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(1, 300):
        for at, n in enumerate((MAP_BYTES // 8 + 10, 50)):
            old, current[at] = current[at], host.put(torch.full((n,), i))
            host.free(old)
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert seen[0] > 50
    assert host.pool.stats().segments < 12
    del readers
    gc.collect()
    assert host.view.holds == 0


def test_forked_children_keep_what_they_inherited(host):
    ref = host.put(big(4))
    value = host.view.read(ref)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read_end, 1)
        os._exit(0 if int(value.sum()) == 4 * MIB else 1)
    del value
    host.free(ref)
    assert host.put(big(5)).location.segment != ref.location.segment
    os.write(write_end, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert host.put(big(6)).location.segment == ref.location.segment
    os.close(read_end)
    os.close(write_end)


def names(prefix):
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def test_a_sweep_removes_what_dead_owners_left_and_no_more(host):
    dead = shm.volume_prefix(f"unit-{os.getpid()}")
    with host.program("own", dead) as (process, told):
        assert told == "owned"
        assert dead not in shm.sweep_dead_owners()
        assert len(names(dead)) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert dead in shm.sweep_dead_owners()
    assert names(dead) == []
    assert len(names(host.prefix)) == 2


def test_layout_keeps_parts_and_large_values_aligned():
    assert layout([3, 0, 5]) == ([0, 64, 64], 69)
    assert layout([]) == ([], 0)
    assert aligned(1, 10) == 64
    assert aligned(1, MAP_BYTES) == shm.PAGE
    assert total_bytes([[10], [MAP_BYTES]]) == shm.PAGE + MAP_BYTES
    for n in (0, 1, 4096, 4097, 10**6, 2**28, 2**28 + 1):
        assert n <= round_up(n) <= n + max(n // 8, 2 * shm.PAGE)
        assert round_up(n) % shm.PAGE == 0


def values(clock, shared=True):
    options = VolumeOptions(
        store=f"unit-{os.getpid()}", shared_memory=shared, limit_bytes=8 * MIB, volumes_on_host=1
    )
    return VolumeContents(options, clock)


@pytest.mark.parametrize("shared", [True, False])
def test_leases_hold_up_deletion_and_expire(shared):
    from neoproto.store.wire import SentValue, ValueRequest

    now = [0.0]
    held = values(lambda: now[0], shared)
    info, parts = encode(torch.arange(3))
    for generation in (1, 2):
        asyncio.run(held.put([SentValue(key="k", generation=generation, info=info, parts=parts)], NO_STATS))

    def there(generation):
        return held.get(ValueRequest(key="k", generation=generation, rows=None)).info is not None

    held.lease("k", 1, "a", 10.0)
    held.lease("k", 1, "b", 20.0)
    held.drop("k", 1)
    held.drop("k", 2)
    assert (there(1), there(2)) == (True, False)
    with pytest.raises(KeyMissing):
        held.lease("k", 1, "c", 10.0)
    with pytest.raises(KeyMissing):
        held.lease("k", 2, "c", 10.0)
    held.lease("k", 1, "a", 0.0)
    now[0] = 15.0
    held.lease("k", 1, "b", 20.0)
    assert held.stats()["deferred_deletions"] == 1
    now[0] = 36.0  # its holder died
    assert held.stats()["objects"] == 0
    assert not there(1)
    held.close()
    held.close()
    assert names(held.prefix) == [] if shared else True


def test_closed_volumes_say_so_to_readers_of_their_memory():
    host = Host()
    ref = host.put(big(1))
    small = host.put(1)
    kept = host.view.read(ref)
    host.table.mark_closed()
    host.pool.close()
    host.owner.release()
    for gone in (ref, small):
        with pytest.raises(StoreClosed):
            host.view.read(gone)
    assert int(kept.sum()) == MIB
    assert SharedVolume.open(host.prefix) is None


def test_volume_ids_follow_the_strategy():
    assert volume_ids("host", ["a", "b"], 2) == ["a", "b"]
    assert volume_ids("local_rank", ["a"], 2) == ["a:0", "a:1"]
    with pytest.raises(ValueError, match="do not fit"):
        volume_ids("host", ["a"], 2)


def test_a_file_that_only_looks_like_an_owner_has_nothing_removed(tmp_path, monkeypatch):
    """`np.owner` would be the owner of all stores of all runs."""
    monkeypatch.setattr(shm, "SHM_DIR", tmp_path)
    alive = tmp_path / f"{shm.volume_prefix('alive')}.table"
    for path in (alive, tmp_path / "np.owner", tmp_path / "np.alive.owner"):
        path.touch()
    assert shm.sweep_dead_owners() == []
    assert alive.exists()
