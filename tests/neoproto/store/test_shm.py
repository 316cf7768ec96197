"""Files, locks and words of shared memory, with real files and small processes but no actors."""

import contextlib
import gc
import os
import pickle
import signal
import threading

import numpy as np
import pytest
import torch

from neoproto.errors import KeyMissing, StoreClosed
from neoproto.store import shm
from neoproto.store.codec import encode
from neoproto.store.shm import MAP_BYTES, SharedVolume, aligned, layout, total_bytes
from neoproto.store.volume import round_up
from tests.neoproto.store.shm_host import MIB, Host, big, names


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


def test_a_file_that_only_looks_like_an_owner_has_nothing_removed(tmp_path, monkeypatch):
    """`np.owner` would be the owner of all stores of all runs."""
    monkeypatch.setattr(shm, "SHM_DIR", tmp_path)
    alive = tmp_path / f"{shm.volume_prefix('alive')}.table"
    for path in (alive, tmp_path / "np.owner", tmp_path / "np.alive.owner"):
        path.touch()
    assert shm.sweep_dead_owners() == []
    assert alive.exists()
