"""The runtime in a real Jupyter kernel, where an event loop runs in the thread that runs the cells."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
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


@pytest.mark.core
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


CLASS = """
import asyncio, os, time
from neoproto.runtime import ClassWithInitArgs, Runtime, Worker, current_runtime

class Counter(Worker):
    def __init__(self):
        self.total = 0

    def add(self, seconds=0.0):
        time.sleep(seconds)
        self.total += 1
        return self.total

    async def wait(self, seconds):
        await asyncio.sleep(seconds)

    def fail(self):
        raise LookupError("on purpose, with <b>")
"""
START = "runtime = Runtime.from_config({'runtime': {'run_dir': 'run%d'}})"
GROUP = "group = runtime.create_worker_group(ClassWithInitArgs(Counter), on=runtime.create_resource_pool())"


class Kernel:
    """A real kernel, and cells that are typed into it."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(
            cwd=str(folder), env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        )
        self._client: BlockingKernelClient = self.manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def run(self, *lines: str, interrupt_after: float | None = None) -> tuple[str, str]:
        """Execute a cell: what it printed, and the error it ended with, "" without one.

        Args:
            interrupt_after: seconds after which the kernel is interrupted, as Jupyter's button does it.
        """
        texts: list[str] = []

        def take(message: Any) -> None:
            texts.append(message["content"].get("text", ""))

        timer = threading.Timer(interrupt_after or 0.0, self._interrupt)
        if interrupt_after is not None:
            timer.start()
        reply = self._client.execute_interactive("\n".join(lines), timeout=60, output_hook=take)
        timer.cancel()
        content = reply["content"]
        error = f"{content['ename']}: {content['evalue']}" if content["status"] == "error" else ""
        return "".join(texts), error

    def value(self, expression: str) -> str:
        """What an expression prints; it must not fail, nor print anything else."""
        text, error = self.run(f"print({expression})")
        assert error == ""
        return text.strip()

    def interrupted(self, *lines: str) -> str:
        """The error that a waiting cell ends with when it is interrupted; soon."""
        start = time.monotonic()
        _, error = self.run(*lines, interrupt_after=1.0)
        assert 1.0 <= time.monotonic() - start < 5.0
        return error

    def restart(self) -> None:
        self.manager.restart_kernel(now=False)
        self._client.wait_for_ready(timeout=60)

    def kill(self) -> None:
        """As a machine that is short of memory does it, with the processes of its group left alone."""
        os.kill(int(self.value("os.getpid()")), signal.SIGKILL)

    def close(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def _interrupt(self) -> None:
        # `interrupt_kernel` does this on an event loop that it makes for the thread and leaves open.
        kernel = self.manager.provisioner
        assert isinstance(kernel, LocalProvisioner)
        assert kernel.pgid is not None
        os.killpg(kernel.pgid, signal.SIGINT)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    yield made
    made.close()


def start(kernel: Kernel, number: int) -> tuple[str, int]:
    """A runtime with a group: its run, and the process of its controller."""
    assert kernel.run(CLASS, START % number, GROUP) == ("", "")
    return kernel.value("runtime.run_id"), int(kernel.value("os.getpid()"))


def check_usable(kernel: Kernel, total: int) -> None:
    assert kernel.value("group.add()") == str([total])


def test_cells_that_are_run_again_fail_or_are_interrupted(kernel: Kernel) -> None:
    """The runtime goes on through all of it, and can be closed and made again."""
    run_id, _ = start(kernel, 1)
    for _ in range(2):
        _, error = kernel.run(START % 1)
        assert "live Runtime already" in error
        assert "close it first with current_runtime().close()" in error
    check_usable(kernel, 1)
    assert kernel.run("group.fail()")[1] == "LookupError: on purpose, with <b>"
    _, error = kernel.run("call = group.submit('fail')", "call.result()")
    assert kernel.value("'on purpose, with &lt;b&gt;' in call._repr_html_()") == "True"
    check_usable(kernel, 2)
    for lines in (
        ("group.wait(60)",),
        ("group.submit('wait', (60,)).result()",),
        ("await group.submit('wait', (60,))",),
        ("group.add(2.5)",),  # a def method, which runs to its end
        ("time.sleep(60)",),
    ):
        error = kernel.interrupted(*lines)
        assert error.startswith("CancelledError" if "await" in lines[0] else "KeyboardInterrupt")
    check_usable(kernel, 4)
    assert kernel.run("runtime = None", "current_runtime().close()")[1] == ""
    assert wait_until_clean(run_id, None, 2.0) == []
    run_id, _ = start(kernel, 2)
    check_usable(kernel, 1)
    assert kernel.run("runtime.close()")[1] == ""
    assert wait_until_clean(run_id, None, 2.0) == []


def test_a_kernel_that_is_restarted_or_killed_leaves_nothing(kernel: Kernel) -> None:
    run_id, controller = start(kernel, 1)
    kernel.restart()
    assert wait_until_clean(run_id, controller, 15.0) == []
    run_id, controller = start(kernel, 2)
    kernel.kill()
    assert wait_until_clean(run_id, controller, 15.0) == []
