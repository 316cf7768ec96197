"""The runtime in a real Jupyter kernel, where an event loop runs in the thread that runs the cells."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.meshes.leftovers import wait_until_clean

pytestmark = pytest.mark.live

CELLS = [
    """
import asyncio, warnings
warnings.simplefilter("always")
asyncio.get_running_loop()
from neoproto.runtime import ClassWithInitArgs, RemoteCall, Runtime, Worker

class Counter(Worker):
    def __init__(self, start):
        self.total = start

    def add(self, value):
        self.total += value
        return self.total

    async def wait(self, seconds):
        await asyncio.sleep(seconds)
        return self.rank

    def fail(self):
        raise LookupError("on purpose")

import mine  # a module beside the notebook

runtime = Runtime.from_config({"runtime": {"run_dir": "run"}})
pool = runtime.create_resource_pool(1, 2)
both = {"counter": ClassWithInitArgs(Counter, 10), "mine": ClassWithInitArgs(mine.Doubler)}
fused = runtime.create_worker_group(both, on=pool, name="fused")
group = fused.role("counter")
assert fused.role("mine").double(2) == [4, 4]
""",
    """
assert group.add(1) == [11, 11]
assert group.submit("add", (1,), timeout=60).result() == [12, 12]
assert group.submit("wait", (0.1,), timeout=60, blocking=True) == [0, 1]
""",
    """
assert await group.submit("add", (1,), timeout=60) == [13, 13]
both = group.submit("add", (1,), timeout=60), group.submit("wait", (0.1,), timeout=60)
assert await RemoteCall.gather(both) == [[14, 14], [0, 1]]
assert await asyncio.gather(*(group.rank(i).submit("wait", (0.1,)) for i in range(2))) == [[0], [1]]
""",
    """
calls = [group.submit("wait", (seconds,), timeout=60) for seconds in (30, 0.1)]
completed, pending = RemoteCall.wait(calls, count=1).result()
assert (completed, pending) == ([calls[1]], [calls[0]])
assert await RemoteCall.wait(calls, count=1) == (completed, pending)
assert RemoteCall.gather([group.submit("add", (1,)) for _ in range(20)]).result()[-1] == [34, 34]
assert calls[0].cancel()
""",
    """
try:
    group.fail()
except LookupError as error:
    assert "in fail" in "".join(error.__notes__)
else:
    raise AssertionError("it did not fail")
""",
    """
fused.close()
runtime.close()
print(runtime.run_id)
""",
]


MODULE = """
from neoproto.runtime import Worker

class Doubler(Worker):
    def double(self, value):
        return 2 * value
"""


def test_cells_call_workers_in_every_way_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    assert [output.name for output in outputs] == ["stdout"], outputs
    assert wait_until_clean(outputs[0].text.strip(), None, 2.0) == []
