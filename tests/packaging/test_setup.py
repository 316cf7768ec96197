"""`scripts/setup`, `run` and `test` on a copy of the checkout, with a Python that pretends to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Understands what the scripts say to a Python: `-m venv`, `-m pip install`, `-c`; $CALLS has all it was told.
FAKE_PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
"-V") echo "Python 3.11.7" ;;
"-m venv "*)
    mkdir -p "$3/bin" "$3/lib/python3.11/site-packages/pip-1.dist-info"
    : > "$3/lib/python3.11/site-packages/pip-1.dist-info/INSTALLER"
    cp "$0" "$3/bin/python" ;;
*"-m pip install"*)
    sleep "${PIP_TAKES:-0}"
    if [ -n "${PIP_FAILS_AT-}" ]; then case "$*" in *"$PIP_FAILS_AT"*) echo "$PIP_SAYS"; exit 1 ;; esac; fi ;;
"-I -c "*version*torch*) echo "${TORCH_FOUND-}"; [ -n "${TORCH_FOUND-}" ] ;;
"-I -c "*) exec REAL -I -c "$FAKE_PRELUDE$3" ;;
"-m neoproto.run"* | "-m neoproto actors.smollm2"*) echo "ran: $*" ;;
esac
""".replace("REAL", sys.executable)


class Checkout:
    """A copy of what the scripts need, in a folder with a space in its name, and calls of them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.calls_file = folder / "a checkout", folder / "calls"
        self.bin = folder / "bin"
        for part in ("scripts", "requirements"):
            shutil.copytree(ROOT / part, self.root / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.command("python3.11", FAKE_PYTHON)
        self.env = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(folder),
            "CALLS": str(self.calls_file),
            "FAKE_PRELUDE": "",
        }
        self.venv = self.root / ".venv"

    def command(self, name: str, text: str) -> None:
        self.bin.mkdir(exist_ok=True)
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts" / command[0]), *command[1:]],
            env=self.env | env,
            cwd=self.bin,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, **env: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        with self.start(*command, **env) as process:
            out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def installs(self) -> list[str]:
        if not self.calls_file.exists():
            return []
        return [line for line in self.calls_file.read_text().splitlines() if "pip install" in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_installs_torch_first_then_the_lock_then_the_project(checkout: Checkout) -> None:
    code, out, err = checkout.run("setup")
    assert (code, err) == (0, "")
    torch, lock, project = checkout.installs()
    assert "torch==2.13.0+cpu" in torch
    assert "--no-deps" not in torch
    assert "--no-deps" in lock
    assert lock.endswith("requirements/cpu.lock")
    assert project.endswith(f"-e {checkout.root}")
    assert [line.split()[0] for line in out.splitlines()] == ["setup:"] * 5


def test_a_second_time_does_nothing_and_is_quick(checkout: Checkout) -> None:
    checkout.run("setup")
    checkout.calls_file.unlink()
    started = time.perf_counter()
    assert checkout.run("setup") == (0, "", "")
    assert time.perf_counter() - started < 2
    assert not checkout.calls_file.exists()  # no interpreter was even started


@pytest.mark.parametrize("changed", ["requirements/cpu.lock", "pyproject.toml"])
def test_a_change_of_what_it_installs_runs_it_again(checkout: Checkout, changed: str) -> None:
    checkout.run("setup")
    checkout.calls_file.unlink()
    with (checkout.root / changed).open("a") as file:
        file.write("# changed\n")
    assert checkout.run("setup", TORCH_FOUND="2.13.0+cpu")[0] == 0
    assert len(checkout.installs()) == 2  # torch, the right one, was left alone


def test_dev_adds_the_test_tools(checkout: Checkout) -> None:
    checkout.run("setup")
    checkout.calls_file.unlink()
    assert checkout.run("setup", "--dev", TORCH_FOUND="2.13.0+cpu")[0] == 0
    assert any(line.endswith("requirements/dev.lock") for line in checkout.installs())
    assert checkout.run("setup") == (0, "", "")
    assert checkout.run("setup", "--dev") == (0, "", "")


def test_a_cut_off_installation_is_repaired(checkout: Checkout) -> None:
    code, out, err = checkout.run("setup", PIP_FAILS_AT="cpu.lock", PIP_SAYS="connection lost")
    assert code == 1
    assert "... failed" in out
    assert "connection lost" in err
    packages = checkout.venv / "lib/python3.11/site-packages"
    (packages / "half-1.dist-info").mkdir()
    (packages / "~eft").mkdir()
    (packages / "whole-1.dist-info").mkdir()
    (packages / "whole-1.dist-info/INSTALLER").touch()
    assert checkout.run("setup")[0] == 0
    assert sorted(path.name for path in packages.iterdir()) == ["pip-1.dist-info", "whole-1.dist-info"]
    assert checkout.run("setup") == (0, "", "")


def test_a_half_made_environment_is_made_again(checkout: Checkout) -> None:
    (checkout.venv / "bin").mkdir(parents=True)
    (checkout.venv / "bin/python").symlink_to("/nonexistent")
    assert checkout.run("setup")[0] == 0
    assert not (checkout.venv / "bin/python").is_symlink()


def test_two_at_once_take_turns(checkout: Checkout) -> None:
    with (
        checkout.start("setup", PIP_TAKES="0.3") as first,
        checkout.start("setup", PIP_TAKES="0.3") as second,
    ):
        outputs = first.communicate(timeout=60)[0], second.communicate(timeout=60)[0]
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(checkout.installs()) == 3
    assert sum("another set-up" in out for out in outputs) == 1


def test_an_index_without_a_cpu_torch_is_said_so(checkout: Checkout) -> None:
    says = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    code, _, err = checkout.run("setup", PIP_FAILS_AT="torch==", PIP_SAYS=says)
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "has no CPU build of torch==2.13.0" in err
    assert err.rstrip().endswith("PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu scripts/setup")


def test_an_active_environment_is_used_and_its_other_torch_left_alone(
    checkout: Checkout, tmp_path: Path
) -> None:
    active = tmp_path / "active"
    subprocess.run([checkout.bin / "python3.11", "-m", "venv", active], env=checkout.env, check=True)
    code, _, err = checkout.run("setup", VIRTUAL_ENV=str(active), TORCH_FOUND="2.14.1+cu130")
    assert code == 1
    assert "the active environment has torch 2.14.1+cu130" in err
    assert checkout.installs() == []
    assert checkout.run("setup", VIRTUAL_ENV=str(active))[0] == 0
    assert len(checkout.installs()) == 3
    assert not checkout.venv.exists()


OLD = "import sys; sys.version_info = (3, 9, 2)\n"
LACKS_ALL = (
    "import os, ctypes, shutil; shutil.which = lambda name: None; os.path.exists = lambda path: False\n"
)


@pytest.mark.parametrize(
    ("env", "fakes", "said"),
    [
        (
            {"PYTHON": "python3.11", "FAKE_PRELUDE": OLD},
            {},
            "PYTHON=python3.11 is CPython 3.9; CPython 3.11, 3.12",
        ),
        ({"PYTHON": "/nonexistent"}, {}, "PYTHON=/nonexistent does not run"),
        (
            {"FAKE_PRELUDE": OLD},
            {"python3.12": "exit 127", "python3.13": "exit 1"},
            "python3.11 is CPython 3.9",
        ),
        ({}, {"uname": "echo Darwin"}, "Darwin on Darwin is not supported"),
        ({}, {"getconf": "exit 1"}, "glibc 2.28 or newer"),
        ({}, {"df": "echo; echo x 1 1 10240 1 /"}, "10 MiB free; 4096 MiB are needed"),
        ({"FAKE_PRELUDE": LACKS_ALL}, {}, "the system lacks a C compiler"),
        ({"VIRTUAL_ENV": "/nonexistent/env"}, {}, "bin/python; deactivate it"),
    ],
)
def test_what_cannot_work_fails_early_with_one_line(
    checkout: Checkout, env: dict[str, str], fakes: dict[str, str], said: str
) -> None:
    for name, text in fakes.items():
        checkout.command(name, f"#!/bin/sh\n{text}\n")
    # No other interpreter may come to the rescue.
    for name in ("python3.12", "python3.13", "python3", "python"):
        if name not in fakes:
            checkout.command(name, "#!/bin/sh\nexit 1\n")
    code, out, err = checkout.run("setup", **env)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert said in err
    assert checkout.installs() == []


def test_run_picks_the_default_config_unless_one_is_named(checkout: Checkout) -> None:
    out = checkout.run("run", "trainer.total_steps=2")[1]
    assert out.endswith("ran: -m neoproto.run --config-name ppo_monarch trainer.total_steps=2\n")
    assert checkout.run("run", "--config-name", "other")[1] == "ran: -m neoproto.run --config-name other\n"
    assert checkout.run("run", "--config-name=a b")[1] == "ran: -m neoproto.run --config-name=a b\n"


def test_make_smollm2_sets_up_and_hands_its_arguments_on(checkout: Checkout) -> None:
    out = checkout.run("make_smollm2", "--to", "a b")[1]
    assert out.endswith("ran: -m neoproto actors.smollm2 --to a b\n")
    assert any(line.endswith("requirements/cpu.lock") for line in checkout.installs())


TOOLS = {
    "python": """case "$*" in
*run_isolated_tests*) echo "live: 3 passed, 1 failed" ; exit 1 ;;
*"not e2e"*) echo "== 7 passed, 2 skipped in 0.1s ==" ;;
*e2e*) echo "1 passed in 9s" ;;
esac""",
    "ruff": ":",
    "codespell": ":",
    "mypy": "echo 'Found 1 error'; exit 1",
}


@pytest.fixture
def tested(checkout: Checkout) -> Checkout:
    """A checkout that is set up, with tools that only pretend."""
    checkout.run("setup", "--dev")
    for name, text in TOOLS.items():
        (checkout.venv / "bin" / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "$CALLS"\n{text}\n')
        (checkout.venv / "bin" / name).chmod(0o755)
    checkout.calls_file.unlink()
    return checkout


def test_every_stage_runs_although_some_fail_and_all_is_counted(tested: Checkout) -> None:
    code, out, _ = tested.run("test")
    assert code == 1
    lines = out.splitlines()
    assert lines[-1] == "11 passed, 2 failed"  # the second: the type check
    summary = {line.split()[0]: line.split()[1] for line in lines[lines.index("== summary ==") + 1 : -1]}
    assert summary == {"lint": "ok", "types": "FAILED", "unit": "ok", "live": "FAILED", "e2e": "ok"}


def test_a_stage_can_be_asked_for_with_arguments(tested: Checkout) -> None:
    code, out, _ = tested.run("test", "unit", "-k", "a or b")
    assert (code, out.splitlines()[-1]) == (0, "7 passed, 0 failed")
    (call,) = tested.calls_file.read_text().splitlines()
    assert call.endswith("tests -k a or b")
    code, _, err = tested.run("test", "unlit")
    assert code == 2
    assert "the stages are: lint types unit live e2e" in err
