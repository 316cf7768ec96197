"""Our packages are found where a user's packages and modules have the same names."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from actors.reward.builtin import check_rows
from actors.reward.function import load_reward_function
from meshes.monarch.workers_job import WorkersJob
from neoproto.errors import ConfigError
from neoproto.neighbours import source_files
from neoproto.packages import NAMES, ROOT, elsewhere, users_first
from neoproto.user_code import load_function


@pytest.fixture(params=["packages", "modules", "folders"])
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with all three names, as packages, as modules, or as packages without an `__init__.py`."""
    for name in NAMES:
        if request.param == "modules":
            (tmp_path / f"{name}.py").write_text("RATE = 7\n")
            continue
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("RATE = 7\n")
        if request.param == "packages":
            (tmp_path / name / "__init__.py").write_text("RATE = 7\n")
    return tmp_path


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A user's package called `actors`, with a module that has the name of one of ours."""
    (tmp_path / "actors").mkdir()
    (tmp_path / "actors" / "__init__.py").write_text("RATE = 7\n")
    (tmp_path / "actors" / "rewards.py").write_text("def points(text):\n    return float(len(text))\n")
    return tmp_path


def python(folder: Path, *arguments: str) -> str:
    """What a Python says that is started in the folder and has it on PYTHONPATH too."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


EVERYTHING = """
import {before}neoproto.run.compose as compose, neoproto.run.completion as completion
import actors.reward.builtin, configs, meshes.common.machine
from neoproto.packages import ROOT
assert compose.compose("grpo_monarch", [])["algorithm"]["adv_estimator"] == "grpo"
assert "gae" in completion.group_files("algorithm", None)
for one in (actors, actors.reward.builtin, configs, meshes.common.machine):
    assert one.__file__.startswith(ROOT), one.__file__
try:
    from configs import mine
except ImportError as error:
    print(error)
try:
    configs.RATE
except AttributeError as error:
    print(error)
"""


def test_ours_are_found_and_both_places_are_named(theirs: Path) -> None:
    """In one interpreter, for time: names that were imported before are put aside too."""
    place = theirs / ("configs.py" if (theirs / "configs.py").exists() else "configs")
    clash = f"'configs' is NeoProto's package {ROOT}/configs here, not {place}; rename the latter\n"
    said = python(theirs, "-c", EVERYTHING.format(before="actors, configs, meshes, "))
    assert said == (
        f"no module named 'configs.mine': {clash}module 'configs' has no attribute 'RATE': {clash}"
    )


@pytest.mark.parametrize("theirs", ["packages"], indirect=True)
def test_a_module_of_ours_is_run_by_its_name(theirs: Path) -> None:
    assert "usage: python -m neoproto actors.tiny_model" in python(
        theirs, "-m", "neoproto", "actors.tiny_model", "--help"
    )
    assert "python -m neoproto.run      train" in python(theirs, "-m", "neoproto")


def test_neoproto_is_not_imported_by_a_package_that_hides_ours(package: Path) -> None:
    (package / "actors" / "__init__.py").write_text("import neoproto\n")
    said = python(package, "-c", "import actors")
    assert said.splitlines()[-1] == (
        f"ImportError: neoproto cannot be imported here: 'actors' is NeoProto's package {ROOT}/actors here, "
        f"not {package}/actors; rename the latter"
    )


REWARD = """
from actors.rewards import points
from actors import RATE

def compute_score(data_source, solution_str, ground_truth, extra_info):
    import actors.rewards as again
    assert again.points is points
    return {"score": points(solution_str), "rate": RATE}
"""
JUDGED = """
import asyncio
from actors.reward.judge_pool import JudgePool, JudgeSpec, Question
pool = JudgePool(JudgeSpec(kind="custom", timeout_s=30.0, path="reward.py", name="compute_score"), 1)
question = Question(data_source="", solution="four", ground_truth="", extra_info={})
print(asyncio.run(pool.judge([question, question], 50.0)))
pool.close()
"""


def test_in_a_judges_process_the_users_packages_win(package: Path) -> None:
    (package / "reward.py").write_text(REWARD)
    said = python(package, "-c", "import neoproto\n" + JUDGED)
    score = "Score(score=4.0, acc=4.0, vote=None, extra={'rate': 7})"
    assert said == f"[{score}, {score}]\n"


def test_a_folder_of_data_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert elsewhere("configs") is None
    (tmp_path / "configs" / "mine.py").touch()
    assert elsewhere("configs") == str(tmp_path / "configs")


ESTIMATOR = "from actors.reward.builtin import points\ndef f(): return points('four')\n"


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "on the path"])
def test_a_users_file_that_imports_such_a_name_is_refused_though_ours_has_the_module(
    package: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    folder = package if beside else tmp_path_factory.mktemp("apart")
    if not beside:
        monkeypatch.syspath_prepend(package)
    (folder / "mine.py").write_text(ESTIMATOR)
    with pytest.raises(ConfigError) as error:
        load_function(folder / "mine.py", "f", field="x")
    assert str(error.value) == (
        f"x.path: {folder}/mine.py cannot be imported: line 1: ImportError: 'actors' is NeoProto's package "
        f"{ROOT}/actors here, not {package}/actors; rename the latter"
    )


def test_a_users_file_may_import_ours_where_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from actors.reward.builtin import check_rows\ndef f(): return check_rows\n"
    )
    assert load_function(tmp_path / "mine.py", "f", field="x")() is check_rows


@pytest.mark.parametrize("theirs", ["packages", "modules"], indirect=True)
def test_a_reward_file_finds_such_a_neighbour_from_any_folder(theirs: Path) -> None:
    (theirs / "reward.py").write_text(
        "import actors\nfrom configs import RATE\ndef compute_score(**_):\n"
        "    import meshes\n    return actors.RATE + RATE + meshes.RATE\n"
    )
    function = load_reward_function(theirs / "reward.py")
    with users_first():
        assert function() == 21
    assert len(source_files(theirs / "reward.py")) == 4, "a resumed run compares them"


@pytest.mark.parametrize("theirs", ["modules"], indirect=True)
def test_an_applied_job_is_read_where_another_package_is_called_meshes(theirs: Path) -> None:
    job = pickle.dumps(WorkersJob({"default": ["tcp://127.0.0.1:26600"]}))
    assert "default" in python(theirs, "-c", f"import pickle; print(pickle.loads({job!r})._meshes)")
