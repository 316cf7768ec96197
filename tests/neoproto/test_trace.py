from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neoproto import trace
from neoproto.trace import TraceWriter, merge_parts, threads_of


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    trace.close_process()


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    whole = json.loads((run_dir / "trace.json").read_text())
    assert whole["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = whole["traceEvents"]
    return events


def event(name: str, start: float, seconds: float) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": seconds}


def test_spans_of_a_process_become_events_of_its_lane(tmp_path: Path) -> None:
    before = time.time() * 1e6
    trace.open_process("actor-rank0", tmp_path / "trace")
    with trace.span("update_actor", "call", step=3):
        time.sleep(0.02)
    trace.since("step 3", "step", time.perf_counter() - 1.0)
    with pytest.raises(ValueError, match="no"), trace.span("failing", "call"):
        raise ValueError("no")
    trace.close_process()
    with trace.span("after the end", "call"):
        pass
    merged = merge_parts(tmp_path)
    assert merged is not None
    assert (merged.lanes, merged.events) == (1, 3)
    name, _, *spans = events_of(tmp_path)
    assert name["args"]["name"].startswith("actor-rank0 (pid ")
    assert sorted(span["name"] for span in spans) == ["failing", "step 3", "update_actor"]
    (update,) = (span for span in spans if span["name"] == "update_actor")
    assert (update["ph"], update["cat"], update["args"]) == ("X", "call", {"step": 3})
    assert before <= update["ts"] <= time.time() * 1e6
    assert 20e3 <= update["dur"] < 5e6
    (step,) = (span for span in spans if span["name"] == "step 3")
    assert 1e6 <= step["dur"] < 3e6


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv(trace.FOLDER_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(trace.FOLDER_VARIABLE, value)
        trace.open_process("actor-rank0")
        with trace.span("update_actor", "call"):
            trace.since("step", "step", 0.0)
    assert list(tmp_path.iterdir()) == []
    assert merge_parts(tmp_path) is None


def test_a_worker_takes_the_folder_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trace.FOLDER_VARIABLE, str(tmp_path / "deep" / "trace"))
    trace.open_process("rollout-0-rank0")
    assert (tmp_path / "deep" / "trace" / "rollout-0-rank0.jsonl").is_file()


def test_lanes_begin_with_the_controller_and_a_lane_may_have_several_processes(tmp_path: Path) -> None:
    for lane in ("actor-rank0", "controller", "rollout-0-rank0", "rollout-0-rank0"):
        writer = TraceWriter(tmp_path / "trace", lane)
        writer.add("something", "call", time.perf_counter_ns())
        writer.close()
    merged = merge_parts(tmp_path)
    assert merged is not None
    assert (merged.lanes, merged.events) == (3, 4)
    names = [row["args"]["name"] for row in events_of(tmp_path) if row["name"] == "process_name"]
    assert [name.partition(" ")[0] for name in names] == ["controller", "actor-rank0", "rollout-0-rank0"]
    assert names[2].count(",") == 1


def test_of_a_killed_process_the_cut_line_is_left_out_and_others_are_named(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace", "a")
    for _ in range(3):
        writer.add("something", "call", time.perf_counter_ns())
    writer.close()
    part = tmp_path / "trace" / "a.jsonl"
    whole = part.read_text()
    part.write_text(whole[:-20])
    merged = merge_parts(tmp_path)
    assert merged is not None
    assert merged.events == 2
    part.write_text(whole.replace('"dur"', "dur", 1))
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not JSON"):
        merge_parts(tmp_path)


def test_events_of_a_thread_follow_or_contain_each_other() -> None:
    events = [
        event("a", 0, 10),
        event("b", 2, 3),
        event("inside b", 3, 1),
        event("over the end of a", 8, 5),
        event("beside both", 9, 1),
        event("c", 10, 2),
    ]
    threads = {one["name"]: thread for thread, one in threads_of(events)}
    assert threads == {
        "a": 0, "b": 0, "inside b": 0, "over the end of a": 1, "beside both": 0, "c": 0,
    }  # fmt: skip


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace", "a")

    def write() -> None:
        for _ in range(200):
            with writer.span("something", "call", text="x" * 50):
                pass

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    merged = merge_parts(tmp_path)
    assert merged is not None
    assert merged.events == 800


def test_off_a_span_costs_next_to_nothing() -> None:
    started = time.perf_counter()
    for _ in range(100_000):
        with trace.span("x", "call"):
            pass
    assert time.perf_counter() - started < 2.0  # 0.02 s on an idle machine
