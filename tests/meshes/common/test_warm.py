"""The warm parent of a host, its stubs and its workers, with modules that take no time to import."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshes.common import procs
from meshes.common.warm import READ_LATER, Plan, make_plan, unfit_variables
from meshes.common.warm_stub import PLAN_VARIABLE, stub_arguments
from tests.meshes.waiting import MOST_S, wait_until

ENTRY = "tests.meshes.common.warm_programs:main"
FRESH = ("-m", "tests.meshes.common.warm_programs", "fresh")


class Host:
    """This process as a host: starts stubs in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.plan = make_plan(str(folder), ENTRY, [(("colorsys",), {})])
        self.stubs: list[subprocess.Popen[bytes]] = []
        (folder / "modules").mkdir()
        self.env = {
            "TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join([str(folder / "modules"), *filter(None, sys.path)]),
        }

    def module(self, name: str, text: str) -> None:
        (self.folder / "modules" / f"{name}.py").write_text(text)

    def arguments(
        self, modules: tuple[str, ...] = ("colorsys",), own: tuple[str, ...] = (), wait_s: float = MOST_S
    ) -> list[str]:
        return stub_arguments(("NEOPROTO_REPORT", "NEOPROTO_DO", *own), modules, FRESH, wait_s)

    def environment(self, report: Path, do: str) -> dict[str, str]:
        own = {PLAN_VARIABLE: self.plan.to_text(), "NEOPROTO_REPORT": str(report), "NEOPROTO_DO": do}
        return {**os.environ, **self.env, **own}

    def start(self, do: str = "wait", **options: Any) -> tuple[subprocess.Popen[bytes], Path]:
        """A stub, and where its worker reports."""
        env = options.pop("env", {})
        self.count += 1
        report = self.folder / f"report{self.count}"
        with open(self.output(report), "wb") as output:
            stub = subprocess.Popen(
                [sys.executable, *self.arguments(own=tuple(env), **options)],
                env={**self.environment(report, do), **env},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        self.stubs.append(stub)
        return stub, report

    def worker(self, do: str = "wait", **options: Any) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        """A stub whose worker is up, and what that reports."""
        stub, report = self.start(do, **options)
        return stub, self.read(report)

    def read(self, report: Path) -> dict[str, Any]:
        wait_until(report.exists)
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    @staticmethod
    def output(report: Path) -> Path:
        return report.with_suffix(".out")

    def parents(self) -> list[int]:
        """The root and its branches, as far as they are ready and live."""
        logs = "".join(log.read_text() for log in self.folder.glob("warm-*.log"))
        pids = [int(pid) for pid in re.findall(r"^\S+ (\d+) (?:ready|not used)", logs, re.MULTILINE)]
        return [pid for pid in pids if procs.lives(pid)]

    def end(self) -> None:
        for stub in self.stubs:
            stub.kill()
            stub.wait()
        for pid in self.parents():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.parents())
        shutil.rmtree(self.folder)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(Path(tempfile.mkdtemp(prefix="warm")))
    yield host
    host.end()


def is_forked(report: dict[str, Any]) -> bool:
    return bool(report["arguments"] != ["fresh"])


def test_a_worker_has_what_it_was_started_with(host: Host) -> None:
    stub, report = host.worker(env={"NEOPROTO_WORD": "äöü\nß"})
    assert is_forked(report)
    assert report["pid"] != stub.pid
    assert report["parent"] in host.parents()
    assert (report["group"], report["session"]) == (report["pid"], os.getsid(0))
    assert report["folder"] == str(host.folder)
    assert report["modules"] == ["colorsys"]
    environment = report["environment"]
    assert environment["NEOPROTO_WORD"] == "äöü\nß"
    assert environment["NEOPROTO_REPORT"].endswith("report1")
    assert PLAN_VARIABLE not in environment
    assert environment["PYTHONPATH"] == host.env["PYTHONPATH"]
    output = host.output(Path(environment["NEOPROTO_REPORT"]))
    wait_until(lambda: output.read_text() == "printed by a worker\n")
    # Beside the standard streams a worker has its lifeline, and the folder that it lists.
    assert {name: where for name, where in report["files"].items() if not where.startswith("pipe:")} == {
        "0": "/dev/null",
        "1": str(output),
        "2": str(output),
    }
    assert len(report["files"]) == 4
    assert report["children"]


def test_workers_of_one_parent_differ_in_what_is_random(host: Host) -> None:
    (_, one), (_, other) = host.worker(), host.worker()
    assert one["parent"] == other["parent"]
    assert one["number"] != other["number"]
    assert len(host.parents()) == 1


def test_stubs_that_come_at_once_share_a_parent(host: Host) -> None:
    reports = [host.read(report) for _, report in [host.start() for _ in range(6)]]
    assert len({report["parent"] for report in reports}) == 1
    assert len(host.parents()) == 1


@pytest.mark.parametrize(("do", "code"), [("0", 0), ("3", 3), ("raise", 1)])
def test_a_stub_ends_as_its_worker_ends(host: Host, do: str, code: int) -> None:
    stub, report = host.worker(do)
    assert is_forked(report)
    assert stub.wait(MOST_S) == code
    if do == "raise":
        assert "a worker's failure" in host.output(host.folder / "report1").read_text()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGUSR1])
def test_a_stub_ends_by_the_signal_that_its_worker_ends_by(host: Host, signum: signal.Signals) -> None:
    stub, report = host.worker()
    os.kill(report["pid"], signum)
    assert stub.wait(MOST_S) == -signum
    assert not procs.state(report["pid"]), "a zombie is left"


def test_signals_to_a_stub_reach_its_worker(host: Host) -> None:
    stub, report = host.worker()
    stub.terminate()
    assert stub.wait(MOST_S) == 7
    assert not procs.lives(report["pid"])


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_ends_with_its_stub(host: Host, stopped: bool) -> None:
    stub, report = host.worker()
    if stopped:
        os.kill(report["pid"], signal.SIGSTOP)
    stub.kill()
    wait_until(lambda: not procs.state(report["pid"]))
    assert len(host.parents()) == 1


def test_a_worker_ends_with_its_stub_also_without_a_parent(host: Host) -> None:
    stub, report = host.worker()
    os.kill(report["parent"], signal.SIGKILL)
    wait_until(lambda: not host.parents())
    stub.kill()
    wait_until(lambda: not procs.lives(report["pid"]))


def test_all_end_with_their_host(host: Host) -> None:
    report = host.folder / "report"
    command = [sys.executable, "-m", "tests.meshes.common.warm_programs", "host", str(host.folder / "out")]
    process = subprocess.Popen(
        [*command, *host.arguments()],
        env=host.environment(report, "wait"),
    )
    found = host.read(report)
    assert is_forked(found)
    process.kill()
    process.wait()
    wait_until(lambda: not procs.lives(found["pid"]))
    wait_until(lambda: not host.parents())
    wait_until(lambda: not [pid for pid in procs.pids() if str(host.folder) in procs.command(pid)])


def test_workers_outlive_their_parent_and_later_ones_are_fresh(host: Host) -> None:
    stub, report = host.worker()
    os.kill(report["parent"], signal.SIGKILL)
    wait_until(lambda: not host.parents())
    _, later = host.worker()
    assert not is_forked(later)
    assert procs.lives(report["pid"])
    assert stub.poll() is None
    stub.terminate()
    # 7 where the kernel tells how a process ended that another one has reaped.
    assert stub.wait(MOST_S) in (1, 7)


def test_a_fresh_worker_takes_the_place_of_its_stub(host: Host) -> None:
    host.worker()
    stub, report = host.worker(modules=("wave",))
    assert not is_forked(report)
    assert report["pid"] == stub.pid
    assert "colorsys" not in report["modules"]


def test_a_parent_that_does_not_answer_is_not_waited_for(host: Host) -> None:
    _, first = host.worker()
    os.kill(first["parent"], signal.SIGSTOP)
    stub, report = host.worker(wait_s=0.2)
    assert not is_forked(report)
    os.kill(first["parent"], signal.SIGCONT)
    # Nor does it fork one that nobody waits for any more.
    _, last = host.worker()
    assert last["parent"] == first["parent"]
    assert [pid for pid in procs.pids() if procs.parent(pid) == first["parent"]] == [
        first["pid"],
        last["pid"],
    ]
    assert stub.poll() is None


def test_a_stub_that_is_killed_while_it_waits_gets_no_worker(host: Host) -> None:
    _, first = host.worker()
    os.kill(first["parent"], signal.SIGSTOP)
    stub, report = host.start()
    listening = f"{host.folder}/warm-{os.getpid()}.sock"
    wait_until(lambda: len(procs.unix_sockets(listening)) > 1)
    stub.kill()
    stub.wait()
    os.kill(first["parent"], signal.SIGCONT)
    host.worker()
    assert not report.exists()


def test_a_module_that_starts_a_thread_makes_the_parent_unfit(host: Host) -> None:
    host.module(
        "with_thread",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    )
    host.plan = make_plan(str(host.folder), ENTRY, [(("with_thread",), {})])
    _, report = host.worker(modules=("with_thread",))
    assert not is_forked(report)


def test_signals_that_a_host_ignores_are_ignored_by_its_workers(host: Host) -> None:
    """As under nohup; also by one that asked for a fork and is started afresh."""
    host.module(
        "with_thread",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
    )
    for modules in (("colorsys",), ("colorsys", "with_thread")):
        host.count += 1
        report = host.folder / f"report{host.count}"
        words = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, *host.arguments(modules)]
        with open(host.output(report), "wb") as output:
            stub = subprocess.Popen(
                words,
                env=host.environment(report, "wait"),
                cwd=host.folder,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        host.stubs.append(stub)
        found = host.read(report)
        assert is_forked(found) == (len(modules) == 1)
        for pid in (stub.pid, found["pid"]):
            status = Path(f"/proc/{pid}/status").read_text()
            (ignored,) = re.findall(r"SigIgn:\s*(\S+)", status)
            assert int(ignored, 16) & 1 << signal.SIGHUP - 1


def test_a_module_that_fails_is_left_to_the_workers(host: Host) -> None:
    host.module("breaks", "raise RuntimeError('broken on purpose')")
    host.plan = make_plan(str(host.folder), ENTRY, [(("breaks", "colorsys"), {})])
    _, report = host.worker(modules=("breaks", "colorsys"))
    assert is_forked(report)
    assert report["modules"] == ["colorsys"]
    (log,) = host.folder.glob("warm-*.log")
    assert "broken on purpose" in log.read_text()


def test_workers_that_need_more_come_from_a_branch(host: Host) -> None:
    more = {"VLLM_WORD": "one"}
    host.plan = make_plan(str(host.folder), ENTRY, [(("colorsys",), {}), (("colorsys", "wave"), more)])
    _, little = host.worker()
    _, much = host.worker(modules=("colorsys", "wave"), env=more)
    _, again = host.worker(modules=("colorsys", "wave"), env=more)
    assert (little["modules"], much["modules"]) == (["colorsys"], ["colorsys", "wave"])
    assert much["parent"] == again["parent"] != little["parent"]
    assert "VLLM_WORD" not in little["environment"]
    assert much["environment"]["VLLM_WORD"] == "one"
    os.kill(much["parent"], signal.SIGKILL)
    wait_until(lambda: len(host.parents()) == 1)
    _, later = host.worker(modules=("colorsys", "wave"), env=more)
    assert not is_forked(later)
    assert procs.lives(much["pid"])


def test_a_branch_that_was_not_planned_is_made(host: Host) -> None:
    host.worker()
    _, report = host.worker(modules=("colorsys", "wave"))
    assert is_forked(report)
    assert len(host.parents()) == 2


def test_a_branch_keeps_nothing_of_the_worker_that_it_was_made_for(host: Host) -> None:
    """Its output, for one, has not ended as long as it is open somewhere."""
    host.worker()
    stub, report = host.worker(modules=("colorsys", "wave"))
    stub.kill()
    # The socket by which requests come, and the pipe by which signals wake it.
    wait_until(lambda: sorted(kinds_of_files(report["parent"])) == ["pipe", "pipe", "socket"])


def kinds_of_files(pid: int) -> list[str]:
    """Of what it has open beside its output and its host's pidfd."""
    folder = Path(f"/proc/{pid}/fd")
    names = [os.readlink(one) for one in folder.iterdir() if int(one.name) > 2]
    return [name.partition(":")[0] for name in names if "pidfd" not in name]


def test_a_branch_has_what_modules_of_the_root_do_to_the_environment(host: Host) -> None:
    host.module("sets", "import os\nos.environ['MADE'] = 'here'")
    host.plan = make_plan(str(host.folder), ENTRY, [(("sets",), {})])
    host.worker(modules=("sets",))
    _, report = host.worker(modules=("sets", "wave"))
    assert is_forked(report)
    assert report["environment"]["MADE"] == "here"


def test_a_worker_that_wants_otherwise_what_a_module_has_set_is_fresh(host: Host) -> None:
    """In a process of its own the module finds that: `setdefault` leaves it as it is."""
    host.module("sets", "import os\nos.environ.setdefault('NEOPROTO_X', 'by default')")
    host.plan = make_plan(str(host.folder), ENTRY, [(("sets",), {})])
    host.worker(modules=("sets",))
    _, report = host.worker(modules=("sets",), env={"NEOPROTO_X": "chosen"})
    assert report["environment"]["NEOPROTO_X"] == "chosen"


def test_a_worker_whose_host_has_gone_is_not_forked(host: Host) -> None:
    """A stub that has been adopted would start a parent that lives as long as what has adopted it."""
    host.count += 1
    report = host.folder / f"report{host.count}"
    program = """
import os, sys, time
host = os.getpid()
if not os.fork():
    while os.getppid() == host:
        time.sleep(0.01)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
    command = [sys.executable, "-c", program, *host.arguments()]
    env = host.environment(report, "wait")
    subprocess.run(command, env=env, cwd=host.folder, start_new_session=True, check=True)
    found = host.read(report)
    os.kill(found["pid"], signal.SIGKILL)
    assert not is_forked(found)
    assert not list(host.folder.glob("warm-*"))


def test_a_folder_that_may_be_entered_but_not_read_is_worked_in(host: Host) -> None:
    closed = host.folder / "closed"
    closed.mkdir(mode=0o300)
    ordinary = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []
    if ordinary and (shutil.which("setpriv") is None or subprocess.run([*ordinary, "true"]).returncode):
        pytest.skip("root reads every folder, and cannot give that up here")
    report = host.folder / "report"
    with open(host.output(report), "wb") as output:
        stub = subprocess.Popen(
            [*ordinary, sys.executable, *host.arguments()],
            env=host.environment(report, "wait"),
            cwd=closed,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    host.stubs.append(stub)
    found = host.read(report)
    closed.chmod(0o700)
    assert is_forked(found)
    assert found["folder"] == str(closed)


def test_what_a_module_does_to_the_environment_stays(host: Host) -> None:
    host.module("sets", "import os\nos.environ['MADE'] = 'here'\nos.environ.pop('GONE', None)")
    host.env["GONE"] = "there"
    host.plan = make_plan(str(host.folder), ENTRY, [(("sets",), {})])
    _, report = host.worker(modules=("sets",))
    assert is_forked(report)
    assert report["environment"]["MADE"] == "here"
    assert "GONE" not in report["environment"]


def test_modules_find_what_they_find_in_a_worker(host: Host) -> None:
    """A home folder, the run's working folder and the way to start processes, all set before the imports."""
    host.module("sitecustomize", "import pwd\ndef getpwuid(_):\n    raise KeyError\npwd.getpwuid = getpwuid")
    reads = [
        "import multiprocessing, os",
        "os.environ['MADE_HOME'] = os.path.expanduser('~')",
        "os.environ['MADE_FOLDER'] = os.getcwd()",
        "os.environ['MADE_START'] = multiprocessing.get_start_method()",
    ]
    host.module("reads", "\n".join(reads))
    host.plan = make_plan(str(host.folder), ENTRY, [(("reads",), {})])
    host.env["NEOPROTO_WORKING_FOLDER"] = str(host.folder / "modules")
    unset = {name: os.environ.pop(name) for name in ("HOME",) if name in os.environ}
    try:
        _, report = host.worker(modules=("reads",))
    finally:
        os.environ.update(unset)
    assert is_forked(report)
    made = {name: report["environment"][name] for name in ("MADE_HOME", "MADE_FOLDER", "MADE_START")}
    assert made == {
        "MADE_HOME": str(host.folder),
        "MADE_FOLDER": str(host.folder / "modules"),
        "MADE_START": "forkserver",
    }


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "OMP_WAIT_POLICY", "ANYTHING", "TMPDIR"])
def test_a_worker_with_environment_that_imports_read_is_fresh(host: Host, name: str) -> None:
    host.worker()
    value = os.pathsep.join(
        filter(None, ["/nowhere" if name != "LD_PRELOAD" else "", host.env.get(name, "")])
    )
    _, report = host.worker(env={name: value} if name != "TMPDIR" else {name: "/tmp/."})
    assert not is_forked(report)
    assert report["environment"][name] == (value if name != "TMPDIR" else "/tmp/.")


@pytest.mark.parametrize("name", [*sorted(READ_LATER - {"OMP_NUM_THREADS"}), "NEOPROTO_X", "HYPERACTOR_X"])
def test_a_worker_has_its_own_of_what_is_read_later(host: Host, name: str) -> None:
    host.worker()
    _, report = host.worker(env={name: "3"})
    assert is_forked(report)
    assert report["environment"][name] == "3"


def test_unfit_variables() -> None:
    had = {b"A": b"1", b"OMP_NUM_THREADS": b"2", b"RANK": b"0"}
    assert unfit_variables(had, had) == []
    assert unfit_variables({**had, b"RANK": b"1", b"NEOPROTO_X": b""}, had) == []
    assert unfit_variables({**had, b"A": b"2"}, had) == ["A"]
    assert unfit_variables({b"OMP_NUM_THREADS": b"2"}, had) == ["A"]
    assert unfit_variables({**had, b"B": b"", b"LD_PRELOAD": b"x"}, had) == ["B", "LD_PRELOAD"]
    assert unfit_variables({**had, b"OMP_NUM_THREADS": b"4"}, had) == []
    # Nested levels, or none: what libraries make of that is theirs to say.
    assert unfit_variables({**had, b"OMP_NUM_THREADS": b"4,2"}, had) == ["OMP_NUM_THREADS"]
    assert unfit_variables({b"A": b"1"}, had) == ["OMP_NUM_THREADS"]


def test_a_plan_has_in_common_what_all_groups_have() -> None:
    plan = make_plan(
        "/logs",
        ENTRY,
        [
            (("torch", "actors.a"), {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OTHER": "1"}),
            (("torch", "actors.a", "vllm"), {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "OTHER": "1"}),
            (("torch", "actors.a", "vllm"), {"HF_HUB_OFFLINE": "1"}),
        ],
    )
    assert plan.modules == ("torch", "actors.a")
    assert plan.env == {"HF_HUB_OFFLINE": "1"}
    assert [branch.modules for branch in plan.branches] == [("torch", "actors.a", "vllm")]
    assert plan.branches[0].env["OMP_NUM_THREADS"] == "2"
    assert Plan.from_text(plan.to_text()) == plan
