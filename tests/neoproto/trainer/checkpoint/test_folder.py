"""Checkpoint folders: whatever a save was doing when it was killed, the next start finds a whole one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neoproto import files
from neoproto.errors import CheckpointError
from neoproto.files import write_synced
from neoproto.trainer.checkpoint import folder as checkpoints
from neoproto.trainer.checkpoint.folder import (
    LATEST,
    MANIFEST,
    Checkpoint,
    CheckpointFolder,
    locate,
    problems,
)

STEPS_ON_DISK = (
    *((files, name) for name in ("_write", "_rename", "_unlink", "sync")),
    *((checkpoints, name) for name in ("_mkdir", "_rename", "_unlink", "_rmdir", "sync")),
)


@pytest.fixture(autouse=True, scope="module")
def quick_disk() -> Iterator[None]:
    """That files are synced is seen in what is called; the disk itself would only make the tests slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


class Killed(BaseException):
    """The process is gone."""


class Disk:
    """Counts what is done to the disk, and stops before number `at` (half of it done, where that can be)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None = None) -> None:
        self.log: list[tuple[str, Path]] = []
        self._at = at
        for module, name in STEPS_ON_DISK:
            monkeypatch.setattr(module, name, self._watched(name, getattr(module, name)))

    def _watched(self, name: str, real: Callable[..., None]) -> Callable[..., None]:
        def act(path: Path, *more: Any) -> None:
            if len(self.log) == self._at:
                if name == "_write":
                    real(path, more[0][: len(more[0]) // 2])
                raise Killed
            self.log.append((name, path))
            real(path, *more)

        return act


def save(folder: CheckpointFolder, step: int, text: str | None = None) -> Checkpoint:
    """What the trainer does: workers' files, its own, then the name."""
    partial = folder.begin(step)
    digests = {}
    for name in ("actor/a", "actor/b", "trainer.json"):
        (partial / name).parent.mkdir(exist_ok=True)
        data = (text or f"{name} of {step}").encode()
        write_synced(partial / name, data)
        digests[name] = hashlib.sha256(data).hexdigest()
    return folder.commit(partial, step, digests)


def operations(tmp_path: Path, keep: int | None) -> int:
    with pytest.MonkeyPatch.context() as patch:
        folder = CheckpointFolder(tmp_path / "counted", keep)
        save(folder, 1)
        save(folder, 2)
        disk = Disk(patch)
        save(folder, 3)
    return len(disk.log)


@pytest.mark.parametrize("keep", [1, 2, None])
def test_a_kill_anywhere_leaves_the_previous_one_or_the_new_one(tmp_path: Path, keep: int | None) -> None:
    total = operations(tmp_path, keep)
    assert total > 15
    found = []
    for at in range(total + 1):
        folder = CheckpointFolder(tmp_path / f"kill{at}", keep)
        save(folder, 1)
        save(folder, 2)
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, at)
            if at < total:
                with pytest.raises(Killed):
                    save(folder, 3)
            else:
                save(folder, 3)
        newest = folder.newest()
        assert newest is not None
        assert problems(newest) == []
        found.append(newest.step)
        folder.sweep()
        assert not [path for path in folder.root.iterdir() if path.name.startswith(".")]
        assert folder.newest() == newest, "sweeping changes nothing that is whole"
        again = save(folder, 3)
        assert problems(again) == []
        assert (folder.root / LATEST).read_text() == "3\n"
        assert len(folder.all()) == (keep or 3)
    assert found == sorted(found)
    assert set(found) == {2, 3}


def test_a_kill_while_sweeping_leaves_what_is_whole(tmp_path: Path) -> None:
    for at in range(40):
        folder = CheckpointFolder(tmp_path / str(at), 2)
        save(folder, 1)
        partial = folder.begin(2)
        write_synced(partial / "half", b"half")
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, at)
            try:
                folder.sweep()
            except Killed:
                killed = True
            else:
                killed = False
        assert folder.all() == [Checkpoint(step=1, path=folder.root / "global_step_1")]
        folder.sweep()
        assert sorted(path.name for path in folder.root.iterdir()) == ["global_step_1", LATEST]
        if not killed:
            return
    raise AssertionError("sweeping has no end")


def test_nothing_gets_its_name_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power may fail too: files, then the folders that name them, before the rename that makes them count."""
    folder = CheckpointFolder(tmp_path / "c", 1)
    disk = Disk(monkeypatch)
    save(folder, 1)
    named = next(place for place, (name, _) in enumerate(disk.log) if name == "_rename")
    partial = disk.log[named][1]
    written = {path for name, path in disk.log[:named] if name == "_write"}
    assert {path.name for path in written} == {"a", "b", "trainer.json", MANIFEST}
    for path in written:
        assert disk.log.index(("sync", path)) > disk.log.index(("_write", path))
    synced = [path for name, path in disk.log[:named] if name == "sync"]
    assert synced.index(partial / "actor") < synced.index(partial / MANIFEST) < synced.index(partial)
    assert disk.log[named + 1] == ("sync", folder.root)


@given(kills=st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=8), keep=st.integers(1, 3))
def test_any_sequence_of_saves_and_kills(
    tmp_path_factory: pytest.TempPathFactory, kills: list[tuple[int, bool]], keep: int
) -> None:
    folder = CheckpointFolder(tmp_path_factory.mktemp("c"), keep)
    last = 0
    for step, (at, sweep) in enumerate(kills, start=1):
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, at)
            try:
                save(folder, step)
                last, whole = step, True
            except Killed:
                whole = False
        newest = folder.newest()
        assert newest is not None or last == 0
        if newest is not None:
            assert problems(newest) == []
            assert newest.step in ((step,) if whole else (last, step))
            last = newest.step
        if sweep:
            folder.sweep()


def test_the_newest_is_the_one_with_the_highest_step(tmp_path: Path) -> None:
    """By number, not by name; and only what has a manifest."""
    folder = CheckpointFolder(tmp_path)
    assert folder.newest() is None
    for step in (9, 100, 10):
        save(folder, step)
    (tmp_path / "global_step_200").mkdir()
    (tmp_path / "global_step_x").mkdir()
    assert [one.step for one in folder.all()] == [9, 10, 100]
    newest = folder.newest()
    assert newest is not None
    assert newest.path == tmp_path / "global_step_100"


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 4, "old")
    again = save(folder, 4, "new")
    assert (again.path / "trainer.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_4", LATEST]


def test_a_kill_while_a_step_is_replaced_leaves_something_whole(tmp_path: Path) -> None:
    for at in range(40):
        folder = CheckpointFolder(tmp_path / str(at))
        save(folder, 1)
        save(folder, 2, "old")
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, at)
            try:
                save(folder, 2, "new")
            except Killed:
                killed = True
            else:
                killed = False
        newest = folder.newest()
        assert newest is not None
        assert problems(newest) == []
        if not killed:
            return
    raise AssertionError("saving has no end")


def test_files_that_nobody_vouches_for_are_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    partial = folder.begin(1)
    write_synced(partial / "extra", b"x")
    with pytest.raises(CheckpointError, match=r"holds \['extra'\] .* lacks \['missing'\]"):
        folder.commit(partial, 1, {"missing": "0"})
    assert folder.newest() is None


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    saved = save(CheckpointFolder(tmp_path), 3)
    assert problems(saved) == []
    (saved.path / "actor/a").unlink()
    (saved.path / "actor/b").write_bytes(b"actor/b of 4")
    (saved.path / "trainer.json").write_bytes(b"short")
    said = problems(saved)
    assert len(said) == 3
    assert f"{saved.path}/actor/a: No such file" in said[0]
    assert "SHA-256 differs" in said[1]
    assert "has 5 bytes, wanted 17" in said[2]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"files": 3}',
        '{"format": 9, "step": 1, "files": {}}',
        pytest.param("[" * 100_000, id="deep"),
        '{"format": 1, "step": 1, "files": {"a": {"size": Infinity, "sha256": ""}}}',
    ],
)
def test_a_damaged_manifest_is_a_problem_too(tmp_path: Path, text: str) -> None:
    saved = save(CheckpointFolder(tmp_path), 1)
    (saved.path / MANIFEST).write_text(text)
    (said,) = problems(saved)
    assert MANIFEST in said


def test_the_manifest_says_what_is_in_the_folder(tmp_path: Path) -> None:
    saved = save(CheckpointFolder(tmp_path), 1)
    manifest = json.loads((saved.path / MANIFEST).read_text())
    data = (saved.path / "actor/a").read_bytes()
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    assert manifest["files"]["actor/a"] == entry
    assert manifest["step"] == 1


def test_a_checkpoint_is_found_by_its_own_folder_or_its_runs(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    save(folder, 1)
    two = save(folder, 2)
    assert locate(two.path) == two
    assert locate(tmp_path / "run") == locate(folder.root) == two
    assert locate(tmp_path) is None
    assert locate(tmp_path / "nothing") is None


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0"):
        CheckpointFolder(tmp_path, 0)
