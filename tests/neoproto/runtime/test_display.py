"""What notebooks show of topologies, pools, groups and calls."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshes.common.topology import compile_topology
from neoproto.runtime import RemoteCall, WorkerGroup
from neoproto.runtime.base import RuntimeBase
from neoproto.runtime.display import run_html, spans
from neoproto.runtime.group import RemoteWorkerGroup, public_methods
from neoproto.runtime.placement import Block, Placement
from neoproto.runtime.pool import ResourcePool
from neoproto.runtime.wire import GroupRef
from neoproto.runtime.worker import Worker
from tests.neoproto.html_reading import Page
from tests.neoproto.runtime.test_call_tracker import Bench


class Adder(Worker):
    def add(self, value: int) -> int:
        return value

    async def wait(self) -> None: ...


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path, count=4)
    yield made
    made.tracker.close("over")


def group_of(bench: Bench) -> WorkerGroup:
    block = Block(first_node=0, nnodes=1, first_device=0, devices_per_node=bench.group.world_size)
    pool = ResourcePool(name="pool", cluster="default", block=block, device_type="cpu")
    methods = {"": public_methods(Adder)}
    return WorkerGroup(bench.tracker, bench.group.ref, methods, pool, lambda *_: None, lambda _: None)


def cells_of(shown: Any) -> list[str]:
    page = Page(shown._repr_html_())
    assert page.foreign == []
    return page.cells


def has_row(cells: list[str], *row: str) -> bool:
    return any(cells[at : at + len(row)] == list(row) for at in range(len(cells)))


def topology(models: int, nodes: int) -> Placement:
    return compile_topology(
        {
            "clusters": [{"name": "big", "nnodes": nodes, "n_gpus_per_node": 8, "device_type": "cpu"}],
            "device_pools": [{"name": "all", "cluster": "big", "nnodes": nodes, "n_gpus_per_node": 8}],
            "models": [
                {"name": f"model-{n}", "worker": "w", "config_key": "k", "resource_pool": "all"}
                for n in range(models)
            ],
        }
    )


def test_a_topology_of_a_thousand_nodes_is_a_short_table() -> None:
    cells = cells_of(topology(2, 1024))
    assert has_row(cells, "big", "1024", "8", "cpu")
    assert has_row(cells, "model-0", "w", "big", "all", "0-1023", "0-7", "8192", "cpu", "model-1")
    many = topology(1024, 1024)
    html = many._repr_html_()
    assert len(html) < 40_000
    assert "… 994 more rows" in html


def test_a_pool() -> None:
    pool = ResourcePool(
        name="a&b",
        cluster="c",
        block=Block(first_node=2, nnodes=2, first_device=0, devices_per_node=4),
        device_type="gpu",
    )
    cells = cells_of(pool)
    assert "ResourcePool a&b" in cells
    assert has_row(cells, "where", "cluster c", "nodes", "2-3", "devices of each", "0-3", "ranks", "8")


def test_a_group_and_its_views(bench: Bench) -> None:
    group = group_of(bench)
    cells = cells_of(group)
    assert "WorkerGroup g" in cells
    assert has_row(cells, "ranks", "4: 0-3", "state", "open", "methods", "add, wait")
    assert has_row(cells, "3", "h", "1", "alive")
    view = cells_of(group.rank(2))
    assert "RemoteWorkerGroup g" in view
    assert has_row(view, "ranks", "1: 2")
    assert has_row(view, "2", "h", "1", "alive")
    assert not has_row(view, "3", "h")


def test_a_group_says_which_ranks_are_gone_and_why(bench: Bench) -> None:
    group = group_of(bench)
    bench.group.mark_dying(3)
    bench.die(1)
    cells = cells_of(group)
    assert has_row(cells, "state", "open, without rank(s) 1, 3")
    assert has_row(cells, "1", "h", "1", "died: signal 9 (SIGKILL)")
    assert has_row(cells, "3", "h", "1", "gone")
    bench.group.mark_broken("it <overran>")
    assert has_row(cells_of(group), "state", "broken: it <overran>")
    bench.group.mark_closed("over")
    assert has_row(cells_of(group), "state", "closed")
    assert has_row(cells_of(group), "0", "h", "1", "released")


def test_a_large_group_and_one_of_another_process(tmp_path: Path) -> None:
    bench = Bench(tmp_path, count=8192)
    html = group_of(bench)._repr_html_()
    assert len(html) < 8000
    assert "… 8,162 more rows" in html
    bench.tracker.close("over")
    block = Block(first_node=0, nnodes=1, first_device=0, devices_per_node=2)
    ref = GroupRef(key="k", name="far", world_size=2)
    far = RemoteWorkerGroup(None, ref, public_methods(Adder), range(2), block, "role")
    assert "RemoteWorkerGroup far, role role" in cells_of(far)


def test_a_call_says_who_answered_and_what_time_is_left(bench: Bench) -> None:
    call = bench.start(0, 1, 2, 3, timeout=60)
    bench.answer(call, 0, "a")
    bench.answer(call, 2, "b")
    cells = cells_of(call)
    assert "RemoteCall g.m" in cells
    assert has_row(cells, "state", "under way", "ranks", "0-3", "answered", "2 of 4: 0, 2", "deadline")
    left = cells[cells.index("deadline") + 1]
    assert left.endswith(" s left")
    assert 50 < float(left.split()[0]) <= 60
    for rank in (1, 3):
        bench.answer(call, rank, "c")
    cells = cells_of(call)
    assert has_row(cells, "state", "ended with a result", "ranks", "0-3", "answered", "4 of 4: 0-3")
    assert "deadline" not in cells
    assert repr(call) == "<RemoteCall g.m: state ended with a result; ranks 0-3; answered 4 of 4: 0-3>"


def test_a_call_without_a_deadline_and_one_that_is_late(bench: Bench) -> None:
    call = bench.start(0)
    assert has_row(cells_of(call), "answered", "0 of 1", "deadline", "none")
    call.deadline = time.monotonic() - 2
    assert "s ago" in call._repr_html_()


@given(st.text(max_size=30))
def test_a_call_that_failed_says_how_in_text(text: str) -> None:
    call: RemoteCall[None] = RemoteCall()
    call._settle(error=ValueError(f"<b>{text}\nmore"))
    cells = cells_of(call)
    assert any(cell.startswith("failed: ValueError: <b>") for cell in cells)


def test_a_failure_that_was_not_yet_read_is_shown_too(bench: Bench) -> None:
    call = bench.start(0)
    bench.answer(call, 0, LookupError("<i>gone</i>\nand more"))
    assert has_row(cells_of(call), "state", "failed: LookupError: <i>gone</i>")


def test_showing_a_call_waits_for_nothing() -> None:
    reading, go_on = threading.Event(), threading.Event()

    def convert(_: Any) -> str:
        reading.set()
        assert go_on.wait(10)
        return "read"

    call: RemoteCall[str] = RemoteCall(convert)
    call._settle("raw")
    reader = threading.Thread(target=call.result)
    reader.start()
    assert reading.wait(10)
    assert has_row(cells_of(call), "state", "ended with a result")
    go_on.set()
    reader.join(10)
    assert call.result() == "read"


def test_many_calls_at_once() -> None:
    calls: list[RemoteCall[int]] = [RemoteCall() for _ in range(3)]
    everything, some = RemoteCall.gather(calls), RemoteCall.wait(calls, count=2)
    calls[0]._settle(1)
    assert has_row(cells_of(everything), "state", "under way", "calls ended", "1 of 3")
    assert has_row(cells_of(some), "calls ended", "1 of 3", "waits for", "2")
    assert "Gather" in cells_of(everything)


def test_a_run(bench: Bench, tmp_path: Path) -> None:
    run = RuntimeBase("0123", tmp_path / "<run>", topology(1, 2))
    page = Page(run_html(run, "open", [bench.group]))
    assert page.foreign == []
    assert has_row(page.cells, "state", "open", "run folder", f"{tmp_path}/<run>", "run id", "0123")
    assert has_row(page.cells, "g", "4", "open")
    assert "model-0" in page.cells


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], "–"),
        ([4], "4"),
        ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8"),
        (range(10**6), "0-999999"),
        (range(0, 100, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, …"),
    ],
)
def test_numbers_in_order(numbers: Any, text: str) -> None:
    assert spans(numbers) == text
