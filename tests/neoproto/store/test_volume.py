"""What a volume holds and hands out, with real files and small processes but no actors."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from neoproto.errors import KeyMissing, StoreClosed, StoreError, StoreFull
from neoproto.store import volume as volume_module
from neoproto.store.base import ObjectRef
from neoproto.store.codec import decode, encode
from neoproto.store.counters import REPORTED
from neoproto.store.messages import DeletedValue, SentValue, ValueRequest
from neoproto.store.shm import SharedVolume
from neoproto.store.volume import VolumeContents, VolumeOptions, volume_ids
from tests.neoproto.store.shm_host import MIB, Host, big, names

NO_STATS = ("a client", dict.fromkeys(REPORTED, 0))


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


def values(clock, shared=True):
    options = VolumeOptions(
        store=f"unit-{os.getpid()}", shared_memory=shared, limit_bytes=8 * MIB, volumes_on_host=1
    )
    return VolumeContents(options, clock)


@pytest.mark.parametrize("shared", [True, False])
def test_leases_hold_up_deletion_and_expire(shared):
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


def test_volume_ids_follow_the_strategy():
    assert volume_ids("host", ["a", "b"], 2) == ["a", "b"]
    assert volume_ids("local_rank", ["a"], 2) == ["a:0", "a:1"]
    with pytest.raises(ValueError, match="do not fit"):
        volume_ids("host", ["a"], 2)


def sent(key, generation, value):
    info, parts = encode(value)
    return SentValue(key=key, generation=generation, info=info, parts=parts)


def test_what_a_local_client_writes_is_kept_once_it_is_committed():
    contents = values(time.monotonic)
    view = SharedVolume.open(contents.prefix)
    info, parts = encode(torch.arange(3))
    (reservation,) = asyncio.run(contents.reserve([(info.nbytes, 1)]))
    writer = view.open_writer(reservation)
    location = writer.allocate([part.size for part in parts])
    writer.write(location, parts)
    view.seal([location.slot], [77])
    ref = ObjectRef(store="unit", key="k", volume="0", info=info, generation=77, location=location)
    assert contents.get(ValueRequest(key="k", generation=77, rows=None)).problem == "missing"
    contents.commit([reservation.token], pickle.dumps([ref]), NO_STATS)
    writer.close()
    reply = contents.get(ValueRequest(key="k", generation=77, rows=range(1, 3)))
    assert decode(reply.info, reply.parts).tolist() == [1, 2]
    assert contents.value_of("k").tolist() == [0, 1, 2]
    assert contents.stats()["reservations"] == 0
    contents.delete([DeletedValue(key="k", generation=77, volume="0", slot=location.slot)])
    with pytest.raises(KeyMissing):
        view.read(ref)
    assert (contents.stats()["objects"], contents.stats()["idle_segments"]) == (0, 1)
    contents.close()


def test_values_of_ours_take_the_place_of_a_stock_clients():
    contents = values(time.monotonic)
    forgotten = []
    contents.forget_stock = forgotten.append
    asyncio.run(contents.put([sent("a", 1, 5), sent("b", 2, 6)], NO_STATS))
    contents.delete([DeletedValue(key="c", generation=0, volume="0")])
    assert forgotten == ["a", "b", "c"]
    assert contents.newest == {"a": 1, "b": 2}
    contents.close()


def test_a_closed_volume_refuses_everything():
    contents = values(time.monotonic)
    asyncio.run(contents.put([sent("k", 1, 5)], NO_STATS))
    contents.close()
    with pytest.raises(StoreClosed):
        asyncio.run(contents.reserve([(10, 1)]))
    with pytest.raises(StoreClosed):
        asyncio.run(contents.put([sent("k", 2, 5)], NO_STATS))
    with pytest.raises(StoreClosed):
        contents.commit([], pickle.dumps([]), NO_STATS)
    with pytest.raises(StoreClosed):
        contents.get(ValueRequest(key="k", generation=1, rows=None))
    with pytest.raises(StoreClosed):
        contents.lease("k", 1, "a", 10.0)
    assert contents.stats()["objects"] == 0
