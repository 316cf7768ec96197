"""Tab completion: what is offered, and that a real bash takes it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from neoproto.config import CONFIG_NAMES
from neoproto.run import completion
from neoproto.run.compose import compose_run

ROOT = Path(__file__).resolve().parents[3]


def offered(line: str) -> list[str]:
    typed = completion.read_line(f"python -m neoproto.{line}")
    assert typed is not None
    return completion.words_for(typed)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run --c", ["--cfg", "--config-dir", "--config-name"]),
        ("run --config-name ", sorted(CONFIG_NAMES)),
        ("run -cn ppo_mon", ["ppo_monarch"]),
        ("run --config-name=grpo_mon", ["--config-name=grpo_monarch"]),
        ("run --cfg ", ["job"]),
        ("run --config-dir ", []),
        ("run algo", ["algorithm.", "algorithm="]),
        ("run dry", ["dry_run="]),
        ("run dry_run=", ["dry_run=false", "dry_run=true"]),
        ("run algorithm=g", ["algorithm=gae", "algorithm=grpo"]),
        ("run model", ["model@actor_rollout_ref.model="]),
        ("run +", ["+smoke="]),
        ("run +smoke=ti", ["+smoke=tiny"]),
        ("run trainer.res", ["trainer.resume_from_path=", "trainer.resume_mode="]),
        ("run ++trainer.mo", ["++trainer.mode="]),
        ("run ~data.task.opt", ["~data.task.options."]),
        (
            "run trainer.mode=",
            [f"trainer.mode={mode}" for mode in ("decoupled_async", "separate_async", "sync")],
        ),
        ("run critic.enable=", [f"critic.enable={value}" for value in ("false", "null", "true")]),
        ("run data.train_files=", ["data.train_files=null"]),
        ("run data.train_batch_size=", []),
        ("run nothing.of.ours", []),
        ("run trainer.mode.more=", []),
        ("run --config-name grpo_monarch +smoke=tiny trainer.dev", ["trainer.device_type="]),
        ("eval mod", ["model=", "model@actor_rollout_ref.model="]),
        ("eval n", ["n="]),
    ],
)
def test_what_may_follow(line: str, words: list[str]) -> None:
    assert offered(line) == words


def test_at_the_start_of_a_word_there_is_everything() -> None:
    found = offered("run ")
    assert {"--config-name", "data=", "data.", "topology=", "trainer.", "dry_run="} <= set(found)
    assert "+smoke=" not in found


@pytest.mark.parametrize("folder", ["~nobody9", "x" * 300, "absent"])
def test_a_folder_that_is_none_has_nothing_to_offer(folder: str) -> None:
    assert offered(f"run --config-dir {folder} --config-name ppo_mon") == ["ppo_monarch"]
    assert offered(f"run --config-dir {folder} algorithm=ga") == ["algorithm=gae"]


def test_own_configurations_and_files_are_offered(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_monarch, _self_]\n")
    (tmp_path / "data" / "words.yaml").write_text("train_batch_size: 8\n")
    assert offered(f"run --config-dir {tmp_path} --config-name m") == ["mine"]
    assert offered(f"run -cd {tmp_path} data=w") == ["data=words"]


def test_every_group_that_is_offered_composes() -> None:
    """As it is written, with each of its files; what does not go together is another matter."""
    groups = [one for one in [*offered("run "), "+smoke="] if one.endswith("=") and one != "dry_run="]
    assert len(groups) == 13
    for group in groups:
        assert offered(f"run {group}"), group
    compose_run("ppo_monarch", ["model@actor_rollout_ref.model=tiny", "+smoke=tiny", "trainer=default"])


def test_a_part_that_readline_keeps_is_left_out() -> None:
    assert completion.cut_off("trainer.mode=s", " =:") == len("trainer.mode=")
    assert completion.cut_off("model@actor", " @=:") == len("model@")
    assert completion.cut_off("trainer.mo", " =:") == 0


def test_other_commands_are_none_of_ours() -> None:
    assert completion.read_line("python -m neoproto.report runs/") is None
    assert completion.read_line("python script.py ") is None


def test_a_file_name_that_is_not_utf_8_is_offered_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/mine_\xff.yaml")).touch()
    line = f"python -m neoproto.run --config-dir {tmp_path} --config-name mi"
    monkeypatch.setenv("COMP_LINE", line)
    assert completion.main("query=bash") == 0
    assert capfdbinary.readouterr().out == b"mine_\xff\n"


@pytest.mark.parametrize("request_", ["install=tcsh", "remove=bash", "install"])
def test_an_unknown_shell_is_named(capsys: pytest.CaptureFixture[str], request_: str) -> None:
    assert completion.main(request_) == 2
    # Not where the shell evaluates it.
    said = f"error: --shell-completion: wanted install=bash, got {request_}\n"
    assert capsys.readouterr() == ("", said)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from neoproto.run.completion import main; main('query=bash')\n"
        "print(sorted({'torch', 'hydra', 'omegaconf', 'monarch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COMP_LINE": "python -m neoproto.run weights.tr", "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert done.stdout.split("\n") == ["weights.transport=", "[]", ""]


BEFORE = "_mine() { if [[ $2 == my* ]]; then COMPREPLY=(my_own_word); fi; }"
"""How `python` was completed before."""


class Terminal:
    """A bash that thinks a person types."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 300, 0, 0))  # or long lines scroll
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env={
                "PATH": path,
                "PYTHONPATH": str(ROOT),
                "TERM": "dumb",
                "PS1": "ready> ",
                "HOME": str(folder),
            },
            start_new_session=True,
        )
        os.close(theirs)
        self._seen = ""
        self.type("bind 'set enable-bracketed-paste off'; bind 'set bell-style none'\n", "ready> $")
        self.type(f"{BEFORE}; complete -F _mine python; echo done.\n", r"\ndone\.")
        install = 'eval "$(python -m neoproto.run --shell-completion install=bash)"'
        self.type(f"{install}; {install}; echo done.\n", r"\ndone\.")

    def type(self, keys: str, until: str, seconds: float = 60.0) -> str:
        """Type, and return what appears, once the pattern is in it."""
        self._seen = ""
        os.write(self._ours, keys.encode())
        end = time.monotonic() + seconds
        while not re.search(until, self._seen):
            assert time.monotonic() < end, f"{until!r} is not in {self._seen!r}"
            if select.select([self._ours], [], [], 0.2)[0]:
                self._seen += os.read(self._ours, 4096).decode().replace("\r", "")
        return self._seen

    def clear(self) -> None:
        """Take back what was typed."""
        self.type("\x15echo next.\n", r"\nnext\.")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        os.close(self._ours)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def test_a_real_bash_completes(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").touch()
    run = "python -m neoproto.run "
    terminal.type(f"{run}--config-n\t", r"--config-name $")
    terminal.type("grpo_mon\t", r"grpo_monarch $")
    # One section: no space follows its dot; then a key, then one of its values.
    terminal.type("algorithm.adv\t", r"algorithm\.adv_estimator=$")
    terminal.type("rl\t", r"rloo $")
    terminal.type("trainer.mode=\t\t", r"(?s)decoupled_async\s+separate_async\s+sync\b")
    terminal.clear()
    # What is a file is completed as one, also behind the equals sign; other commands go on as they were.
    terminal.type(f"{run}data.train_files=samp\t", r"data\.train_files=samples\.jsonl $")
    terminal.clear()
    terminal.type("python samp\t", r"python samples\.jsonl $")
    terminal.clear()
    terminal.type("python my\t", r"python my_own_word $")
    terminal.clear()
