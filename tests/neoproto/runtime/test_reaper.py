from __future__ import annotations

import gc
import threading
from typing import Any

from neoproto.runtime.group import WorkerGroup
from neoproto.runtime.placement import Block
from neoproto.runtime.pool import ResourcePool
from neoproto.runtime.reaper import Reaper
from neoproto.runtime.wire import GroupRef


def group(reaper: Reaper, key: str) -> WorkerGroup:
    block = Block(first_node=0, nnodes=1, first_device=0, devices_per_node=2)
    pool = ResourcePool(name="p", cluster="c", block=block, device_type="cpu")

    def close(*_: Any) -> None: ...

    return WorkerGroup(None, GroupRef(key=key, name="g", world_size=2), {"": {}}, pool, close, reaper.enqueue)


def test_a_finalizer_only_says_so_and_the_reaper_releases() -> None:
    """It may run on any thread, with any lock held: here with the one that releasing takes."""
    lock, released = threading.Lock(), []

    def release(key: str) -> None:
        with lock:
            released.append((key, threading.current_thread().name))
        if key == "first":
            raise RuntimeError("one that fails does not keep the next")

    reaper = Reaper(release)
    reaper.start()
    groups = {"first": group(reaper, "first"), "second": group(reaper, "second")}
    closed = group(reaper, "closed")
    closed.close()
    del closed

    def drop(key: str) -> None:
        with lock:
            del groups[key]
            gc.collect()

    for key in ("first", "second"):
        thread = threading.Thread(target=drop, args=(key,))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    reaper.close(10)
    assert released == [("first", "neoproto-reaper"), ("second", "neoproto-reaper")]


def test_a_view_keeps_its_group() -> None:
    released: list[str] = []
    reaper = Reaper(released.append)
    whole = group(reaper, "g")
    view = whole.rank(1)
    del whole
    gc.collect()
    reaper.start()
    assert released == []
    del view
    gc.collect()
    reaper.close(10)
    assert released == ["g"]
