"""One run with one fault: started as a person starts it, struck at its moment, watched to its end.

plan ─> command (a fresh process) ─> moment ─> fault ─> end, or a hang ─> what is left ─> verdict
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests.chaos import faults
from tests.chaos.plan import KINDS, STEPS, Action, Plan
from tests.chaos.verdict import GONE_S, PASSED, Checked, Seen, Verdict, judge
from tests.e2e.command import LIMIT_S, Command

QUIET_S = 120.0
"""A run that has not printed a line for so long after its fault hangs."""
STACKS_S = 2.0
"""How long processes of a run that hangs may take to write their stacks."""
POLL_S = 0.05
WORDS = ("--config-name", "ppo_monarch", "+smoke=tiny", f"trainer.total_training_steps={STEPS}")
CHECKED = ("trainer.log_samples=true", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=null")
"""What it takes to compute a run's samples again."""
FIRST_SIGN = "starting hosts and store"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What became of a plan.

    Attributes:
        detail: what the verdict rests on, if there is more to say.
        fault: what was done, "SIGKILL to actor[0]"; "" if it came to nothing.
        code: exit code of the command; None if it hung.
        seconds: from the fault to its end.
        total_seconds: from its start to the end of the search for what is left.
        last_line: the last it said, of its errors if there are any.
        tokens: training samples' tokens whose log-probs were computed again from the weights they name.
        versions: weight versions they name.
        folder: where its output and run folder are kept; None if they are not.
    """

    plan: Plan
    verdict: Verdict
    detail: str = ""
    fault: str = ""
    code: int | None = None
    seconds: float | None = None
    total_seconds: float = 0.0
    last_line: str = ""
    tokens: int = 0
    versions: int = 0
    folder: str | None = None


class ChaosRun:
    """A command under a plan."""

    def __init__(
        self, plan: Plan, folder: Path, env: Mapping[str, str], overrides: Sequence[str], quiet_s: float
    ) -> None:
        self._plan, self._kind, self._env, self._quiet_s = plan, KINDS[plan.kind], env, quiet_s
        run_folder = folder / "run"
        run_folder.mkdir(parents=True)
        words = (
            *WORDS,
            *CHECKED,
            f"trainer.mode={plan.mode}",
            f"trainer.seed={plan.index}",
            *overrides,
        )
        self._began = time.monotonic()
        self.command = Command(folder, env, *words, within=faults.within(self._kind, run_folder))
        self._views: list[faults.View] = []
        self._run_folder = run_folder
        self._said, self._said_at = 0, self._began
        self._looked_at = 0.0
        self._struck: float | None = None
        self.fault = ""

    def play(self) -> Result:
        """Everything, from the first wait to the verdict."""
        if self._wait_for_moment():
            self._bring_about()
        hung = not self._wait_for_end()
        if hung:
            self._ask_for_stacks()
        ended = time.monotonic()
        code = None if hung else self.command.process.returncode
        left = [] if hung else self.command.left_after(GONE_S)
        seconds = None if self._struck is None else ended - self._struck
        checked = Checked() if hung else self._checked()
        seen = self._seen(code, seconds, left, checked)
        verdict, detail = judge(self._kind, seen)
        return Result(
            plan=self._plan,
            verdict=verdict,
            detail=detail,
            fault=self.fault,
            code=code,
            seconds=None if seconds is None else round(seconds, 2),
            total_seconds=round(time.monotonic() - self._began, 1),
            last_line=seen.last_line,
            tokens=checked.tokens,
            versions=checked.versions,
        )

    def close(self, keep: bool) -> None:
        """End what is left of it, by pid; a run folder that only it could see is copied out if kept."""
        self.command.discard()
        if keep and self._run_folder_view() != self._run_folder:
            skip = shutil.ignore_patterns(faults.FILLER)
            shutil.copytree(f"{self._run_folder_view()}/", self._run_folder, dirs_exist_ok=True, ignore=skip)
        for view in self._views:
            view.close()

    def _run_folder_view(self) -> Path:
        return (
            self._run_folder if self._kind.mount != "run folder" or not self._views else self._views[0].path
        )

    def _wait_for_moment(self) -> bool:
        """Wait until the plan's moment; False if the run ended or hung before."""
        plan = self._plan
        sign = FIRST_SIGN if plan.phase == "start" else f"step {plan.step}/"
        while not any(line.startswith(sign) for line in self.command.out.splitlines()):
            if not self._goes_on():
                return False
        if self._kind.action is Action.FILL:
            path = Path("/dev/shm") if self._kind.mount == "/dev/shm" else self._run_folder
            view = faults.View(self.command.process.pid, path)
            self._views.append(view)
            if self._kind.mount == "/dev/shm":
                self.command.shm = str(view.path)
        until = time.monotonic() + plan.delay_s
        while time.monotonic() < until or not self._ready():
            if not self._goes_on():
                return False
        return True

    def _ready(self) -> bool:
        """Whether there is a process that the fault is for."""
        return self._kind.action is Action.FILL or bool(faults.targets(self._kind, self._run_folder))

    def _bring_about(self) -> None:
        kind, plan = self._kind, self._plan
        self.command.look()
        if kind.action is Action.FILL:
            self._struck = self._said_at = time.monotonic()
            written = faults.fill(self._views[0].path)
            self.fault = f"{kind.mount} filled with {written >> 20} MiB"
            return
        group, rank, pid = faults.choose(plan, faults.targets(kind, self._run_folder))
        what = kind.signal or f"{plan.pause_s:.1f} s of SIGSTOP"
        self._struck = self._said_at = time.monotonic()
        try:
            faults.strike(pid, kind, plan.pause_s)
        except ProcessLookupError:
            self._struck = None  # it was just going by itself
            return
        self.fault = f"{what} to {group}[{rank}]"

    def _wait_for_end(self) -> bool:
        """Wait for the command's own end; False if it hangs."""
        while self._goes_on():
            pass
        return self.command.process.poll() is not None

    def _ask_for_stacks(self) -> None:
        """Have every process that still runs write to its log where it is."""
        with contextlib.suppress(FileNotFoundError):
            listed = {pid for _, _, pid in faults.listed(self._run_folder_view())}
            for pid in listed & self.command.processes().keys():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
            time.sleep(STACKS_S)

    def _goes_on(self) -> bool:
        """Wait a moment; whether the run lives and has said something not long ago."""
        now = time.monotonic()
        said = sum((self.command.cwd / name).stat().st_size for name in ("stdout", "stderr"))
        if said != self._said:
            self._said, self._said_at = said, now
        if now > self._looked_at + 1.0:
            self.command.look()
            self._looked_at = now
        time.sleep(POLL_S)
        limit = LIMIT_S if self._struck is None else self._quiet_s
        return self.command.process.poll() is None and now - self._said_at < limit

    def _checked(self) -> Checked:
        from tests.chaos.versions import check_samples  # late: it imports torch and transformers

        return check_samples(self._run_folder_view(), self._env)

    def _seen(self, code: int | None, seconds: float | None, left: Sequence[str], checked: Checked) -> Seen:
        errors = self.command.errors
        told = (errors.strip() or self.command.out.strip()).splitlines()
        folder = self._run_folder_view()
        return Seen(
            code=code,
            seconds=seconds,
            last_line=told[-1].strip() if told else "",
            errors=errors,
            early=self._plan.phase == "start",
            left=left,
            rows=whole_rows(folder / "metrics.jsonl"),
            most_stale=most_stale(folder / "config.yaml"),
            sync=self._plan.mode == "sync",
            other_weights=checked.wrong,
        )


def whole_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines whose last may be cut off, or that may be missing."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def most_stale(path: Path) -> float | None:
    """The bound on the staleness of what an asynchronous run trains on; None if it has none."""
    if not path.exists():
        return None
    trainer = yaml.safe_load(path.read_text(encoding="utf-8"))["trainer"]
    if trainer["mode"] == "sync" or trainer["replay_buffer"]["max_off_policy_strategy"] != "drop":
        return None
    return float(trainer["replay_buffer"]["max_off_policy_threshold"])


def play(
    plan: Plan,
    folder: Path,
    *,
    keep: bool = False,
    overrides: Sequence[str] = (),
    quiet_s: float = QUIET_S,
    env: Mapping[str, str] | None = None,
) -> Result:
    """Run a plan in a new folder; the folder stays if `keep` or if it did not go well."""
    if KINDS[plan.kind].action is Action.FILL and not faults.namespaces_possible():
        return Result(plan=plan, verdict=Verdict.NOT_POSSIBLE, detail="no mount namespace can be made")
    folder = folder.absolute()
    run = ChaosRun(plan, folder, os.environ if env is None else env, overrides, quiet_s)
    kept = True
    try:
        result = run.play()
        kept = keep or result.verdict not in PASSED
    finally:
        run.close(kept)
    if not kept:
        shutil.rmtree(folder)
        return result
    return replace(result, folder=str(folder))
