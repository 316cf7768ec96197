"""Whole short runs, one after the other, on a job that was applied before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.e2e.command import Command
from tests.meshes.applied import applied

pytestmark = pytest.mark.e2e

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.25}
"""


def workers_of(folder: Path) -> list[int]:
    """Living processes of runs that were started in a folder."""
    found, needle = [], f"NEOPROTO_WORKING_FOLDER={folder}".encode()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if needle in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found


def test_two_runs_train_on_one_job(tmp_path: Path, cache: Path, user_env: dict[str, str]) -> None:
    words = ["--config-name", "ppo_monarch", "+smoke=tiny", "runtime.monarch.job_mode=current"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.py").write_text(REWARD)
    reward = "reward.custom_reward_function.path=../elsewhere/mine.py"
    with applied(tmp_path / "job") as job:
        for name, more in (("first", []), ("second", [reward])):
            folder = tmp_path / name
            folder.mkdir()
            (folder / ".monarch").symlink_to(job.folder / ".monarch")
            command = Command(folder, user_env | {"NEOPROTO_CACHE": str(cache)}, *words, *more)
            try:
                done = command.wait()
                assert (done.code, done.errors) == (0, ""), done.out
                assert len(done.steps) == 3
                assert (done.folder / "model" / "model.safetensors").exists()
                assert (done.folder / "logs" / "actor" / "rank0.log").exists()
                assert command.left() == []
                assert workers_of(folder) == []
                assert job.living() == job.hosts
            finally:
                command.discard()
        assert {row["critic/score/mean"] for row in done.steps} == {0.25}
