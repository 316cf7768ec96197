"""Functions out of files that a user names."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from neoproto.errors import ConfigError
from neoproto.runtime.signals import Terminated
from neoproto.user_code import error_place, load_function, noted_interrupts, run_users


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_it_is_called_as_the_user_wrote_it(tmp_path: Path) -> None:
    path = write(tmp_path, "def f(a, b, *, c=0): return a + b + c\n")
    function = load_function(path, "f", field="x.y", positional=("a", "b"), keywords=("c",))
    assert function(1, 2, c=3) == 6


def test_every_load_is_a_module_of_its_own(tmp_path: Path) -> None:
    """So that trying a function leaves no trace in the one that is used."""
    path = write(tmp_path, "seen = []\ndef f(a):\n    seen.append(a)\n    return len(seen)\n")
    first, second = (load_function(path, "f", field="x", positional=("a",)) for _ in range(2))
    assert (first(0), first(0), second(0)) == (1, 2, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def g(): pass\n", r"^x\.y\.name: .*mine\.py has no 'f'; its functions: g$"),
        ("def f(a): pass\n", r"^x\.y\.name: f\(a\) in .* cannot be called as f\(a, b, c\): too many"),
        ("def f(a, b): pass\n", r"cannot be called as f\(a, b, c\): got an unexpected keyword argument 'c'"),
        ("def f(a, b, c, d): pass\n", r"missing a required argument: 'd'"),
        ("f = max\n", r"^x\.y\.name: 'f' in .* does not say its arguments: ValueError: no signature"),
        ("f = dict\n", r"^x\.y\.name: 'f' in .* does not say its arguments: ValueError: no signature"),
        (
            "f = 10 ** 5000\n",
            r"^x\.y\.name: 'f' in .* is not callable, it is an integer of thousands of digits$",
        ),
        ("def __getattr__(name): 1 / 0\n", r"'f' in .* its arguments: line 1: ZeroDivisionError"),
        (
            "class F:\n    def __call__(self): pass\n"
            "    @property\n    def __signature__(self): raise ValueError('a\\nb')\nf = F()\n",
            r"'f' in .* its arguments: line 4: ValueError: a b; a function of Python's is needed$",
        ),
        ("class End(BaseException): pass\nraise End('a')\n", r"cannot be imported: line 2: End: a$"),
        ("raise SystemExit(3)\n", r"cannot be imported: line 1: SystemExit: 3$"),
        ("import sys; sys.exit(0)\n", r"cannot be imported: line 1: SystemExit: 0$"),
        ("raise GeneratorExit\n", r"cannot be imported: line 1: GeneratorExit$"),
        ("def __getattr__(name): raise SystemExit(0)\n", r"'f' in .* its arguments: line 1: SystemExit: 0"),
        ("import sys\ndel sys.modules[__name__]\n1 / 0\n", r"line 3: ZeroDivisionError"),
        ("1 / 0\n", r"^x\.y\.path: .*mine\.py cannot be imported: line 1: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=said):
        load_function(path, "f", field="x.y", positional=("a", "b"), keywords=("c",))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^x\.path: no such file: .*gone\.py$"):
        load_function(tmp_path / "gone.py", "f", field="x")


def test_a_folder_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^x\.path: .* is a folder, a file is needed$"):
        load_function(tmp_path, "f", field="x")


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), Terminated(15)])
def test_a_signal_while_the_file_runs_is_not_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: BaseException
) -> None:
    monkeypatch.setattr("builtins.ended", ended, raising=False)
    with pytest.raises(type(ended)):
        load_function(write(tmp_path, "raise ended\n"), "f", field="x")


def test_an_interrupt_that_the_file_raised_is_its_error(tmp_path: Path) -> None:
    with (
        noted_interrupts(),
        pytest.raises(ConfigError, match=r"mine\.py cannot be imported: line 1: Keyboard"),
    ):
        load_function(write(tmp_path, "raise KeyboardInterrupt\n"), "f", field="x")


def test_a_ctrl_c_while_the_file_runs_is_not_its_error(tmp_path: Path) -> None:
    text = "import signal\nsignal.raise_signal(signal.SIGINT)\n"
    with noted_interrupts(), pytest.raises(KeyboardInterrupt):
        load_function(write(tmp_path, text), "f", field="x")


def test_where_nobody_can_note_it_an_interrupt_is_taken_for_a_persons(tmp_path: Path) -> None:
    path = write(tmp_path, "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_function(path, "f", field="x")
    with noted_interrupts():
        signal.set_wakeup_fd(-1)  # as asyncio's remove_signal_handler does
        with pytest.raises(KeyboardInterrupt):
            load_function(path, "f", field="x")


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "pass", "1 / 0"])
def test_a_process_that_a_file_forks_does_not_come_back(tmp_path: Path, end: str) -> None:
    """Nor one that its function forks: what follows here would be done twice."""
    path = write(
        tmp_path, f"import os\npid = os.fork()\nif pid == 0:\n    {end}\ndef f(): return os.fork()\n"
    )
    function = load_function(path, "f", field="x")
    child = run_users(function, lambda error: AssertionError(str(error)))
    forked = (function.__globals__["pid"], child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forked]
    assert codes == [{"pass": 0, "1 / 0": 1}.get(end, 3), 0]


def test_an_error_is_placed_in_the_users_file(tmp_path: Path) -> None:
    path = write(tmp_path, "def f():\n    return helper()\ndef helper():\n    return int('x')\n")
    function = load_function(path, "f", field="x")
    with pytest.raises(ValueError, match="invalid literal") as caught:
        function()
    assert error_place(caught.value, path).startswith("line 4: ValueError: invalid literal")
    assert error_place(ValueError("elsewhere"), path) == "ValueError: elsewhere"
