"""What was written down after a checkpoint is set aside, line for line, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

from neoproto.trainer.checkpoint.history import PromptLog, cut_history, positions, sync_history


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_files_are_cut_back_to_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", "one\ntwo\n")
    write(tmp_path / "prompts.jsonl", "p1\n")
    at = positions(tmp_path)
    write(tmp_path / "metrics.jsonl", "three\nfo")
    write(tmp_path / "prompts.jsonl", "p2\n")
    for step in (0, 2, 3):
        write(tmp_path / "validation" / f"step_{step}.jsonl", f"v{step}\n")
        write(tmp_path / "samples" / f"step_{step}.jsonl", f"s{step}\n")
    sync_history(tmp_path)
    assert cut_history(tmp_path, at, 2) == 2
    assert files(tmp_path) == {
        "metrics.jsonl": "one\ntwo\n",
        "metrics.superseded.jsonl": "three\nfo\n",
        "prompts.jsonl": "p1\n",
        "prompts.superseded.jsonl": "p2\n",
        "samples/step_0.jsonl": "s0\n",
        "samples/step_2.jsonl": "s2\n",
        "samples/step_3.superseded.jsonl": "s3\n",
        "validation/step_0.jsonl": "v0\n",
        "validation/step_2.jsonl": "v2\n",
        "validation/step_3.superseded.jsonl": "v3\n",
    }
    assert cut_history(tmp_path, at, 2) == 0
    write(tmp_path / "metrics.jsonl", "three again\n")
    write(tmp_path / "validation/step_3.jsonl", "v3 again\n")
    cut_history(tmp_path, at, 2)
    assert files(tmp_path)["metrics.superseded.jsonl"] == "three\nfo\nthree again\n"
    assert files(tmp_path)["validation/step_3.superseded.jsonl"] == "v3\nv3 again\n"


def test_a_run_that_begins_again_sets_everything_aside(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", "one\n")
    write(tmp_path / "validation/step_0.jsonl", "v0\n")
    cut_history(tmp_path, {}, 0)
    assert files(tmp_path) == {
        "metrics.jsonl": "",
        "metrics.superseded.jsonl": "one\n",
        "validation/step_0.superseded.jsonl": "v0\n",
    }


def test_what_is_shorter_than_it_was_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", "one\n")
    assert cut_history(tmp_path, {"metrics.jsonl": 100}, 3) == 0
    assert cut_history(tmp_path / "new", {}, 3) == 0
    assert files(tmp_path) == {"metrics.jsonl": "one\n"}


def test_prompts_are_logged_a_line_a_step(tmp_path: Path) -> None:
    log = PromptLog(tmp_path / "prompts.jsonl")
    assert log.on
    log.log(1, ["a", "é"])
    log.log(2, ["b"], [7])
    assert (tmp_path / "prompts.jsonl").read_text() == (
        '{"step": 1, "uids": ["a", "é"]}\n{"step": 2, "uids": ["b"], "serials": [7]}\n'
    )
    nobody = PromptLog()
    assert not nobody.on
    nobody.log(1, ["a"])
