"""Runs tests one by one, each case in a fresh interpreter and a session of its own.

    python -m tests.run_isolated_tests PATHS… [-j N] [-k EXPR] [-m MARK] [--lf] [--out DIR] [--timeout S]

Live cases start real processes; a hung or crashed one must not take the others along. The folder `--out`
keeps the manifest of collected cases, each case's log and JUnit report, its exit code, and a summary. A hung
case is killed with its whole session, reported as such, and the rest go on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = Path("outputs") / "isolated-tests"
CASE_TIMEOUT_S = 180.0
GRACE_S = 16.0
"""After its session is killed, how long it may take to be gone."""
_LISTING = "NEOPROTO_TEST_LISTING"
_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one case ended: `status` is passed, failed, skipped or hung; no `exit_code` if it was killed."""

    case: str
    status: str
    exit_code: int | None
    seconds: float
    log: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect, run, report. Returns 0 if nothing failed."""
    options = _parse(arguments)
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    cases = collect(options.paths, options.mark, options.expression, out)
    if options.last_failed:
        cases = [case for case in cases if case in _failed_before(out)] or cases
    (out / "manifest.json").write_text(json.dumps(cases, indent=1))
    started = time.monotonic()
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGTERM, _terminate)
    with concurrent.futures.ThreadPoolExecutor(max_workers=options.jobs) as pool:
        running = [pool.submit(run_case, case, out, options.timeout) for case in cases]
        for done in concurrent.futures.as_completed(running):
            outcome = done.result()
            outcomes.append(outcome)
            print(f"{outcome.status:>7} {outcome.seconds:6.1f} s  {outcome.case}", flush=True)
            if outcome.status in ("failed", "hung"):
                print(_tail(Path(outcome.log)), flush=True)
    (out / "summary.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    counts = {
        status: sum(one.status == status for one in outcomes) for status in ("passed", "skipped", "hung")
    }
    failed = len(outcomes) - counts["passed"] - counts["skipped"]
    hung = f" ({counts['hung']} hung)" if counts["hung"] else ""
    print(f"isolated: {time.monotonic() - started:.0f} s, logs in {out}")
    print(f"{counts['passed']} passed, {failed} failed{hung}, {counts['skipped']} skipped")
    return 1 if failed else 0


def collect(paths: Sequence[str], mark: str, expression: str, out: Path) -> list[str]:
    """Node ids of the cases, as pytest collects them.

    Raises:
        SystemExit: collection itself failed.
    """
    command = [*_pytest(), "--collect-only", "-q", *paths]
    command += ["-m", mark] if mark else []
    command += ["-k", expression] if expression else []
    listing = out / "collected.json"
    listing.unlink(missing_ok=True)
    env = {**os.environ, _LISTING: str(listing)}
    command += ["-p", "tests.run_isolated_tests"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    (out / "collection.log").write_text(done.stdout + done.stderr)
    if done.returncode not in (0, 5):  # 5: nothing collected
        print(done.stdout + done.stderr)
        raise SystemExit(f"collection failed with exit code {done.returncode}")
    cases: list[str] = json.loads(listing.read_text())
    return cases


def pytest_collection_finish(session: Any) -> None:
    """This module is also the plugin that lists the cases, by file: pytest's own ids depend on its root."""
    if _LISTING in os.environ:
        cases = []
        for item in session.items:
            inside = item.path.is_relative_to(ROOT)
            path = item.path.relative_to(ROOT) if inside else item.path
            cases.append(f"{path}::{item.nodeid.partition('::')[2]}")
        Path(os.environ[_LISTING]).write_text(json.dumps(cases))


def run_case(case: str, out: Path, timeout_s: float) -> Outcome:
    """Run one case in a fresh interpreter and session; end everything it left in that session."""
    name = re.sub(r"[^A-Za-z0-9_.\-\[\]]+", "-", case.removeprefix("tests/"))[-150:]
    log_path = out / f"{name}.log"
    # A case about to be killed for hanging says first where it is.
    command = [*_pytest(), "-q", "-o", f"faulthandler_timeout={0.9 * timeout_s}", case]
    command.append(f"--junitxml={out / f'{name}.xml'}")
    started = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=ROOT
        )
        _running.add(process)
        exit_code: int | None
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
            log.write(f"\nHUNG: killed with its session after {timeout_s:.0f} s\n".encode())
        _end_session(process)
        _running.discard(process)
    seconds = time.monotonic() - started
    (out / f"{name}.exit").write_text(f"{'killed' if exit_code is None else exit_code}\n")
    return Outcome(
        case=case,
        status=_status(exit_code, log_path),
        exit_code=exit_code,
        seconds=seconds,
        log=str(log_path),
    )


def _pytest() -> list[str]:
    """pytest with this repository's configuration, wherever the tests lie."""
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]


def _terminate(signum: int, _: object) -> None:
    """A runner that is told to go takes the running cases along."""
    for process in list(_running):
        for pid in _session_members(process.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    os._exit(128 + signum)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL what is left of the case's session; hosts it started have their own, and a guardian."""
    left = _session_members(process.pid)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + GRACE_S
    while left and _session_members(process.pid) and time.monotonic() < until:
        time.sleep(0.1)


def _session_members(session: int) -> list[int]:
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry)) == session:
                    members.append(int(entry))
    return members


def _status(exit_code: int | None, log: Path) -> str:
    if exit_code is None:
        return "hung"
    if exit_code != 0:
        return "failed"
    return "skipped" if re.search(r"^\d+ skipped in ", _tail(log, 3), re.MULTILINE) else "passed"


def _tail(log: Path, lines: int = 60) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _failed_before(out: Path) -> set[str]:
    summary = out / "summary.json"
    if not summary.exists():
        return set()
    return {one["case"] for one in json.loads(summary.read_text()) if one["status"] in ("failed", "hung")}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.run_isolated_tests", description=__doc__)
    parser.add_argument("paths", nargs="+", help="files, folders or node ids")
    parser.add_argument("-j", dest="jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("-k", dest="expression", default="", help="as pytest's -k")
    parser.add_argument("-m", dest="mark", default="live", help="as pytest's -m; '' for all cases")
    parser.add_argument("--lf", dest="last_failed", action="store_true", help="only what failed last time")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for logs and reports")
    parser.add_argument("--timeout", type=float, default=CASE_TIMEOUT_S, help="seconds for each case")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
