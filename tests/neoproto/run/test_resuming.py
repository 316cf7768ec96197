"""Where a run starts, and what is said of checkpoints that it cannot start from."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neoproto.config import load_config
from neoproto.data.prompts import EncodedPrompts, PromptLoader, rows_from_dicts
from neoproto.errors import ConfigError
from neoproto.files import write_synced
from neoproto.run.prepare import PreparedRun
from neoproto.run.resuming import ResumePoints, open_checkpoint
from neoproto.trainer.checkpoint.folder import Checkpoint, CheckpointFolder
from neoproto.trainer.checkpoint.resume import STATE, TrainerState, code_options, fixed_options, read_state
from neoproto.weights import WeightVersion
from tests.neoproto.run.inputs import words

STEPS = 8


def prepared(prompts: int = 12, steps: int = STEPS, **sections: Any) -> PreparedRun:
    rows = rows_from_dicts(words(prompts), name="rows")
    encoded = EncodedPrompts(
        rows=tuple(rows),
        token_ids=tuple((number,) for number in range(prompts)),
        filtered=0,
        truncated=0,
        max_prompt_length=4,
        pad_token_id=0,
    )
    return PreparedRun(
        config=load_config(sections),
        model_dir=Path(),
        critic_dir=Path(),
        loader=PromptLoader(encoded, 4),
        validation=None,
        total_steps=steps,
        pad_token_id=0,
        eos_token_ids=(1,),
        notes=(),
    )


def save(run: PreparedRun, folder: Path, step: int, epoch: int = 0, metrics: int = 0) -> Checkpoint:
    """A checkpoint of a run that drew `step` batches."""
    run.loader.load_state_dict(run.loader.state_dict() | {"epoch": 0, "position": 0})
    for _ in range(step):
        run.loader.next_indices()
    state = TrainerState(
        step=step,
        version=WeightVersion(epoch=epoch, n=step),
        loader=run.loader.state_dict(),
        kl={},
        recorder={},
        positions={"metrics.jsonl": metrics},
        ranks={"actor": 1},
        fixed=fixed_options(run.config),
    )
    checkpoints = CheckpointFolder(folder / "checkpoints")
    partial = checkpoints.begin(step)
    return checkpoints.commit(partial, step, state_file(partial, state.to_json()))


def state_file(partial: Path, data: bytes) -> dict[str, str]:
    """Write the file of the controller's state; its SHA-256, by name."""
    write_synced(partial / STATE, data)
    return {STATE: hashlib.sha256(data).hexdigest()}


class Stages:
    """What was said to be under way."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, text: str) -> AbstractContextManager[None]:
        self.said.append(text)
        return nullcontext()


def starts(run: PreparedRun, folder: Path, given: Checkpoint | None = None) -> ResumePoints:
    opened = None if given is None else open_checkpoint(given, run, Stages())
    return ResumePoints(run, folder, opened, Stages())


def test_a_new_run_starts_at_its_beginning(tmp_path: Path) -> None:
    found = starts(prepared(), tmp_path)
    assert found.complete() is None
    start = found.next()
    assert (start.epoch, start.step, start.folder, start.version) == (0, 0, None, WeightVersion(epoch=0, n=0))
    assert found.describe(start) is None


def test_it_goes_on_from_the_newest_with_its_data_and_a_new_epoch(tmp_path: Path) -> None:
    run, stages = prepared(), Stages()
    save(run, tmp_path, 1)
    two = save(run, tmp_path, 2)
    expected = run.loader.next_indices()
    found = ResumePoints(prepared(), tmp_path, None, stages)
    start = found.next()
    assert start.checkpoint == two
    assert start.version == WeightVersion(epoch=1, n=2)
    assert found._prepared.loader.next_indices() == expected
    assert stages.said == ["verifying the checkpoint"]
    assert found.describe(start) == f"resuming from the checkpoint of step 2: {two.path}"


def test_a_second_start_without_a_new_checkpoint_begins_at_the_same_point(tmp_path: Path) -> None:
    """After a failure: the data are where they were at the start, not where the failure left them."""
    run = prepared()
    found = starts(run, tmp_path)
    found.next()
    first = run.loader.next_indices()
    run.loader.next_indices()
    assert found.next().epoch == 1
    assert run.loader.next_indices() == first


def test_from_a_path_until_there_is_an_own_one(tmp_path: Path) -> None:
    run = prepared()
    given = save(run, tmp_path / "old", 3, epoch=4)
    found = starts(run, tmp_path / "new", given)
    (tmp_path / "new").mkdir()
    start = found.next()
    assert (start.checkpoint, start.version) == (given, WeightVersion(epoch=5, n=3))
    own = save(run, tmp_path / "new", 4, epoch=5)
    assert found.newest() == own
    assert found.next().version == WeightVersion(epoch=6, n=4)


def test_history_is_cut_to_the_own_checkpoint_and_wholly_for_another(tmp_path: Path) -> None:
    run = prepared()
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\n")
    given = save(run, tmp_path / "old", 1, metrics=4)
    save(run, tmp_path, 2, metrics=4)
    found = starts(run, tmp_path)
    found.cut(found.next())
    assert (tmp_path / "metrics.jsonl").read_text() == "one\n"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("one\ntwo\n")
    found = starts(run, tmp_path / "other", given)
    found.cut(found.next())
    assert (tmp_path / "other" / "metrics.jsonl").read_text() == ""


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    run = prepared()
    save(run, tmp_path, 1)
    partial = CheckpointFolder(tmp_path / "checkpoints").begin(2)
    assert starts(run, tmp_path).next().step == 1
    assert not partial.exists()


def test_every_damaged_file_is_named_before_anything_is_started(tmp_path: Path) -> None:
    run = prepared()
    one = save(run, tmp_path, 1)
    (one.path / STATE).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        starts(run, tmp_path).next()
    file, hint = caught.value.problems
    assert file.startswith(f"{one.path}/trainer.json: has 2 bytes")
    assert hint == f"{one.path} is damaged: remove it to resume from an older one"
    assert not (tmp_path / "weight_epoch").exists()


def judged_by(**changes: Any) -> PreparedRun:
    """A run in which the last row has changed."""
    run = prepared()
    encoded = run.loader._encoded
    last = replace(encoded.rows[-1], **changes)
    return replace(run, loader=PromptLoader(replace(encoded, rows=(*encoded.rows[:-1], last)), 4))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward_model": {"style": "exact_match", "ground_truth": "else"}}, "reward_model"),
        ({"reward_model": {"style": "rule", "ground_truth": "lll"}}, "reward_model"),
        ({"data_source": "mine", "extra_info": {"a": float("nan")}}, "data_source, extra_info"),
    ],
)
def test_rows_that_are_judged_otherwise_are_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    save(prepared(), tmp_path, 1)
    with pytest.raises(ConfigError, match=f"rows that were judged otherwise: {said} of some row"):
        starts(judged_by(**changes), tmp_path).next()
    assert starts(judged_by(origin="elsewhere"), tmp_path).next().step == 1


def test_a_checkpoint_that_does_not_say_what_judged_it_is_taken_and_that_is_said(tmp_path: Path) -> None:
    run = prepared()
    one = save(run, tmp_path, 1)
    path = one.path / STATE
    state = json.loads(path.read_bytes())
    del state["loader"]["judged"]
    folder = CheckpointFolder(tmp_path / "checkpoints")
    partial = folder.begin(1)
    folder.commit(partial, 1, state_file(partial, json.dumps(state).encode()))
    found = starts(judged_by(data_source="mine"), tmp_path)
    told = found.describe(found.next())
    assert told is not None
    assert told.endswith(
        "; it is of an earlier version and does not record what judged its rows, nor which code, "
        "so neither is compared"
    )


def of_code(run: PreparedRun, folder: Path) -> Checkpoint:
    """A checkpoint that says what judged and trained."""
    one = save(run, folder, 1)
    state = read_state(one)
    state = replace(state, fixed={**state.fixed, **code_options(run.config, run.loop)})
    again = CheckpointFolder(folder / "checkpoints")
    partial = again.begin(1)
    return again.commit(partial, 1, state_file(partial, state.to_json()))


def test_what_own_code_imports_beside_it_belongs_to_it(tmp_path: Path) -> None:
    def code(value: int) -> dict[str, Any]:
        (tmp_path / "helper.py").write_text(f"VALUE = {value}")
        return code_options(prepared(reward={"custom_reward_function": {"path": str(path)}}).config)

    path = tmp_path / "a.py"
    path.write_text("def compute_score(*_, **__): return 0")
    assert code(1) == code(2)
    path.write_text("def compute_score(*_, **__):\n    import helper\n    return helper.VALUE")
    assert code(1) == code(1) != code(2)


def test_own_code_is_compared_by_content_wherever_it_lies(tmp_path: Path) -> None:
    def sections(name: str) -> dict[str, Any]:
        function = {"path": str(tmp_path / name / "a.py")}
        own = {"adv_estimator": "custom", "custom_advantage_function": function, "truncated": "zero"}
        return {"algorithm": own, "reward": {"custom_reward_function": function}}

    for name, text in (("here", "x = 1"), ("moved", "x = 1"), ("changed", "x = 2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(text)
    run = replace(prepared(**sections("here")), loop="train in a file")
    one = of_code(run, tmp_path)
    moved = replace(prepared(**sections("moved")), loop="train in a file")
    found = starts(moved, tmp_path)
    assert found.describe(found.next()) == f"resuming from the checkpoint of step 1: {one.path}"
    with pytest.raises(ConfigError) as caught:
        starts(prepared(**sections("changed")), tmp_path).next()
    estimator, reward, loop = caught.value.problems
    assert estimator.startswith(
        "algorithm.custom_advantage_function: got 'compute_advantages in a file of SHA"
    )
    assert reward.startswith("reward: got 'compute_score in a file of SHA-256 ")
    assert loop.startswith(
        f"trainer loop: got 'the one of trainer.mode', but {one.path} was saved with 'train in a file'; "
        "trainer.accept_changed_code=true"
    )
    accepting = prepared(**sections("changed"), trainer={"accept_changed_code": True})
    found = starts(accepting, tmp_path)
    told = found.describe(found.next())
    assert told is not None
    assert "; reward: got 'compute_score in a file" in told


def test_another_built_in_reward_is_refused(tmp_path: Path) -> None:
    of_code(prepared(), tmp_path)
    with pytest.raises(
        ConfigError, match=r"^reward: got 'last_number', but .* was saved with 'auto'; trainer"
    ):
        starts(prepared(reward={"name": "last_number"}), tmp_path).next()


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    save(prepared(prompts=13), tmp_path, 1)
    with pytest.raises(ConfigError, match="the saved position is of other training data: fingerprint"):
        starts(prepared(), tmp_path).next()


def test_fewer_steps_than_are_done_are_refused_and_more_are_trained(tmp_path: Path) -> None:
    save(prepared(), tmp_path, 8)
    with pytest.raises(ConfigError, match=r"total_training_steps: got 7 steps in all, but .*_8 is of step 8"):
        starts(prepared(steps=7), tmp_path).next()
    assert starts(prepared(steps=8), tmp_path).next().step == 8, "its model may not be written"
    assert starts(prepared(steps=9), tmp_path).next().step == 8


def test_another_algorithm_is_refused(tmp_path: Path) -> None:
    one = save(prepared(), tmp_path, 1)
    other = prepared(algorithm={"adv_estimator": "grpo"}, actor_rollout_ref={"rollout": {"n": 4}})
    with pytest.raises(ConfigError, match=f"adv_estimator: got 'grpo', but {one.path} was saved with 'gae'"):
        starts(other, tmp_path).next()


def test_an_estimator_of_the_users_keeps_its_critic_or_none(tmp_path: Path) -> None:
    own = {"adv_estimator": "custom", "custom_advantage_function": {"path": "a.py"}, "truncated": "zero"}
    one = save(prepared(algorithm=own), tmp_path, 1)
    assert starts(prepared(algorithm=own), tmp_path).next().step == 1
    with pytest.raises(ConfigError, match=f"critic.enable: got True, but {one.path} was saved with False"):
        starts(prepared(algorithm=own, critic={"enable": True}), tmp_path).next()


def test_a_complete_run_is_complete_for_as_many_steps(tmp_path: Path) -> None:
    (tmp_path / "complete.json").write_text('{"steps": 8}')
    assert starts(prepared(), tmp_path).complete() == 8
    assert starts(prepared(steps=7), tmp_path).complete() == 8
    assert starts(prepared(steps=9), tmp_path).complete() is None


def test_what_is_refused_leaves_the_configuration_of_the_run(tmp_path: Path) -> None:
    save(prepared(), tmp_path, 1)
    starts(prepared(), tmp_path).next()
    before = (tmp_path / "config.yaml").read_bytes()
    other = prepared(algorithm={"adv_estimator": "grpo"}, actor_rollout_ref={"rollout": {"n": 4}})
    for refused in (other, prepared(prompts=13, trainer={"seed": 5})):
        with pytest.raises(ConfigError):
            starts(refused, tmp_path).next()
        assert (tmp_path / "config.yaml").read_bytes() == before
    starts(prepared(trainer={"seed": 6}), tmp_path).next()
    assert b"seed: 6" in (tmp_path / "config.yaml").read_bytes()
    assert (tmp_path / "config.superseded.yaml").read_bytes() == before


def test_to_look_where_a_run_would_start_changes_nothing(tmp_path: Path) -> None:
    run = prepared()
    two = save(run, tmp_path, 2)
    before = sorted(tmp_path.rglob("*"))
    opened = starts(prepared(), tmp_path).open()
    assert opened is not None
    assert opened.checkpoint == two
    assert sorted(tmp_path.rglob("*")) == before


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    run = prepared()
    one = save(run, tmp_path, 1)
    text = (one.path / STATE).read_text().replace('"format": 1', '"format": 2')
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    partial = checkpoints.begin(2)
    checkpoints.commit(partial, 2, state_file(partial, text.encode()))
    with pytest.raises(ConfigError, match="got format 2, this version reads 1"):
        starts(run, tmp_path).next()
