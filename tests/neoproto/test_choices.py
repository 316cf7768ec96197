"""Folders of choices: what makes an entry, and that a new estimator is one new file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neoproto.choices import Choice, Choices

ENTRY = 'from neoproto.choices import Choice\nCHOICE = Choice(name="{name}", about="{name} it is")\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable, empty folder `chosen`."""
    folder = tmp_path / "chosen"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "chosen"]:
        del sys.modules[name]


def test_each_module_of_the_folder_is_an_entry(folder: Path) -> None:
    for name in ("second", "first"):
        (folder / f"{name}.py").write_text(ENTRY.format(name=name))
    choices = Choices("chosen", Choice)
    assert list(choices) == ["first", "second"]
    assert choices["second"].about == "second it is"
    assert choices.help == "first = first it is; second = second it is"
    assert choices.get("third") is None
    with pytest.raises(KeyError):
        choices["third"]


@pytest.mark.parametrize("text", ["", "CHOICE = 1\n", ENTRY.format(name="other")])
def test_a_module_that_is_no_entry_of_its_name_is_named(folder: Path, text: str) -> None:
    (folder / "one.py").write_text(text)
    with pytest.raises(TypeError, match=r"chosen\.one: wanted CHOICE, a Choice named 'one', got"):
        list(Choices("chosen", Choice))


ONE_FILE = """
from neoproto.algorithms.advantages import AdvantageInputs, AdvantageOptions, Estimate, Estimator


def centred(inputs: AdvantageInputs, options: AdvantageOptions) -> Estimate:
    from neoproto.algorithms.groups import GroupScores

    groups = GroupScores.of(inputs.rewards_bt, inputs.mask_bt, inputs.required("centred", "group_ids_b"))
    return groups.onto_tokens(groups.scores_b - groups.mean_b(), inputs.rewards_bt, inputs.mask_bt)


CHOICE = Estimator(
    name="centred", about="against the mean", compute=centred, compares_samples=True, options=("gamma",)
)
"""

DRIVE = """
import json, sys
import neoproto.algorithms.estimators as estimators
estimators.__path__.append(sys.argv[1])

from neoproto.config import AlgorithmConfig, load_config
from neoproto.config.precedence import typed_wins
from neoproto.errors import ConfigError

def mapping(n, **algorithm):
    rollout = {"rollout": {"n": n}}
    return {"algorithm": {"adv_estimator": "centred", **algorithm}, "actor_rollout_ref": rollout}

try:
    load_config(mapping(1, truncated="bootstrap") | {"critic": {"enable": True}})
    problems = []
except ConfigError as error:
    problems = list(error.problems)
config = load_config(mapping(2))
settled = typed_wins(mapping(2, truncated="bootstrap"), {"algorithm.adv_estimator"}, set())
said = {
    "problems": problems,
    "torch": "torch" in sys.modules,
    "roles": config.roles,
    "help": AlgorithmConfig.model_fields["adv_estimator"].description,
    "gamma": AlgorithmConfig.model_fields["gamma"].description,
    "truncated": settled["algorithm"]["truncated"],
}

from neoproto.trainer.advantages import advantage_options, chosen_estimator, made_up_inputs

advantages_bt, _ = chosen_estimator(config)(made_up_inputs(config), advantage_options(config))
print(json.dumps(said | {"advantages": advantages_bt.tolist()}))
"""


def test_an_estimator_is_one_file(tmp_path: Path) -> None:
    """From the configuration's checks to its numbers: nothing else is told of it."""
    (tmp_path / "centred.py").write_text(ONE_FILE)
    done = subprocess.run(
        [sys.executable, "-c", DRIVE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    said: dict[str, Any] = json.loads(done.stdout)
    assert [problem.partition(": ")[0] for problem in said["problems"]] == [
        "actor_rollout_ref.rollout.n",
        "algorithm.truncated",
        "critic.enable",
    ]
    assert "algorithm.adv_estimator=centred compares the samples" in said["problems"][0]
    assert said["roles"] == ["actor", "rollout"]
    assert not said["torch"]
    assert "centred = against the mean (compares the `rollout.n` samples of a prompt)" in said["help"]
    assert said["gamma"].startswith("centred, gae")
    assert said["truncated"] == "zero"
    # Samples of 1, 2, 3 and 4 tokens in groups of two; every second is right.
    assert said["advantages"] == [
        [-0.5, 0.0, 0.0, 0.0],
        [0.5, 0.5, 0.0, 0.0],
        [-0.5, -0.5, -0.5, 0.0],
        [0.5, 0.5, 0.5, 0.5],
    ]


ONE_ENGINE = '''
from neoproto.rollout.engine_kind import EngineKind


class Remote:
    """An engine with an event loop of its own: no thread of ours steps it."""

    def __init__(self, options):
        self.model = options.model


CHOICE = EngineKind(
    name="remote",
    about="a server",
    engine="neoproto.rollout.engines.remote:Remote",
    in_process=False,
    devices=("cpu",),
    env=lambda device, eager: {"REMOTE": device},
    model_problem=lambda config, device: "is too large" if config["layers"] > 1 else None,
    library_bytes=7.0,
)
'''

DRIVE_ENGINE = """
import json, sys
from pathlib import Path
import neoproto.rollout.engines as engines
engines.__path__.append(sys.argv[1])

from neoproto.config import load_config
from neoproto.errors import ConfigError

config = load_config({"actor_rollout_ref": {"rollout": {"name": "remote", "kv_cache_gib": 2.0}}})
try:
    load_config({"actor_rollout_ref": {"rollout": {"name": "other"}}})
except ConfigError as error:
    refused = str(error)

from actors.rollout.engine_thread import build_engine
from actors.rollout.options import check_servable, rollout_env
from neoproto.run import plan
from neoproto.run.options import rollout_options
from neoproto.run.prepare import unread_options

options = rollout_options(config, Path("m"), "cpu", (2,), 0).engine
problems = []
for device in ("gpu", "cpu"):
    try:
        rollout_options(config, Path("m"), device, (2,), 0)
        check_servable(sys.argv[1], max_model_len=4, device=device, field="model", engine="remote")
    except ConfigError as error:
        problems.append(str(error))
print(json.dumps({
    "refused": refused,
    "problems": problems,
    "notes": list(unread_options(config)),
    "env": rollout_env(options)["REMOTE"],
    "engine": type(build_engine(options)).__name__,
    "cache": plan._cache_bytes(config, 1.0),
}))
"""


def test_an_engine_is_one_file(tmp_path: Path) -> None:
    """From the configuration to the engine in the worker, with its checks, environment and memory."""
    (tmp_path / "remote.py").write_text(ONE_ENGINE)
    (tmp_path / "config.json").write_text('{"layers": 2}')
    done = subprocess.run(
        [sys.executable, "-c", DRIVE_ENGINE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["refused"].endswith("is not supported: the engines are hf, remote, vllm")
    assert said["problems"] == [
        "actor_rollout_ref.rollout.name=remote runs on CPUs only; on a GPU take vllm",
        f"model: {tmp_path} is too large",
    ]
    assert said["notes"] == [
        "actor_rollout_ref.rollout.kv_cache_gib=2.0 is an option of vllm; remote does not read it"
    ]
    assert (said["env"], said["engine"], said["cache"]) == ("cpu", "Remote", 256 * 72)
