"""The controller's state of a run in a checkpoint, and where a run starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neoproto.config import RunConfig
from neoproto.config.algorithm import CUSTOM
from neoproto.errors import ConfigError
from neoproto.files import user_path
from neoproto.neighbours import source_files
from neoproto.text import one_line
from neoproto.trainer.checkpoint.folder import Checkpoint, digest
from neoproto.weights.version import WeightVersion

STATE = "trainer.json"
OWN_LOOP_NONE = "the one of trainer.mode"
"""The name of a loop that is none of the user's."""
_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutProgress:
    """Of the asynchronous modes: what is not in the queue and the buffer themselves.

    Attributes:
        batches: of prompts that were enqueued so far.
        wanted: the version that prompts enqueued next ask for.
    """

    batches: int
    wanted: WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """The controller's state that a run resumes from, but for queue and buffer.

    Attributes:
        step: that the checkpoint was taken after.
        version: of the weights published last.
        loader: position in the training data.
        kl: state of the KL controller; empty without one.
        recorder: totals so far.
        positions: lengths of the files that grow, in bytes.
        ranks: of each group that has a part in the checkpoint.
        fixed: options that may not change, and what judges and trains, by key.
        rollout: in the asynchronous modes.
    """

    step: int
    version: WeightVersion
    loader: Mapping[str, Any]
    kl: Mapping[str, float]
    recorder: Mapping[str, Any]
    positions: Mapping[str, int]
    ranks: Mapping[str, int]
    fixed: Mapping[str, Any]
    rollout: RolloutProgress | None = None

    def to_json(self) -> bytes:
        rollout = self.rollout
        plain: dict[str, Any] = {
            "format": _FORMAT,
            "step": self.step,
            "version": [self.version.epoch, self.version.n],
            "loader": dict(self.loader),
            "kl": dict(self.kl),
            "recorder": dict(self.recorder),
            "positions": dict(self.positions),
            "ranks": dict(self.ranks),
            "fixed": dict(self.fixed),
            "rollout": None
            if rollout is None
            else {"batches": rollout.batches, "wanted": [rollout.wanted.epoch, rollout.wanted.n]},
        }
        return (json.dumps(plain, indent=1) + "\n").encode()


@contextmanager
def named_damage(path: Path) -> Iterator[None]:
    """Have whatever is found wrong while one of a run's own small files is read name the file.

    Raises:
        ConfigError: it cannot be read, or does not hold what it was written with.
    """
    try:
        yield
    except ConfigError:
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ConfigError(f"{path} is damaged: {type(error).__name__}: {one_line(error)}") from error


def read_state(checkpoint: Checkpoint) -> TrainerState:
    """The controller's state in a checkpoint whose files were verified.

    Raises:
        ConfigError: it was written by another version of this program, or not by this program.
    """
    path = checkpoint.path / STATE
    with named_damage(path):
        plain = json.loads(path.read_bytes())
        if plain.get("format") != _FORMAT:
            raise ConfigError(f"{path}: got format {plain.get('format')}, this version reads {_FORMAT}")
        rollout = plain["rollout"]
        return TrainerState(
            step=int(plain["step"]),
            version=_version(plain["version"]),
            loader=dict(plain["loader"]),
            kl=dict(plain["kl"]),
            recorder=dict(plain["recorder"]),
            positions=dict(plain["positions"]),
            ranks=dict(plain["ranks"]),
            fixed=dict(plain["fixed"]),
            rollout=rollout
            and RolloutProgress(batches=int(rollout["batches"]), wanted=_version(rollout["wanted"])),
        )


def code_of(file: str | Path, name: str) -> str:
    """A function of the user's by its name and the content of its file, wherever that lies.

    The neighbours that it imports (`neoproto.neighbours`) belong to it.
    """
    try:
        first, *others = source_files(user_path(file, field=name).resolve())
        text = f"{name} in a file of SHA-256 {digest(first)[:16]}"
        if others:
            contents = [[str(one.relative_to(first.parent)), digest(one)] for one in others]
            together = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
            text += f" with {len(others)} neighbours of {together[:16]}"
        return text
    except (OSError, ConfigError):  # an error in the file is reported where it is loaded
        return f"{name} in a file that cannot be read"


def code_options(config: RunConfig, loop: str = OWN_LOOP_NONE) -> dict[str, Any]:
    """What judges and trains, by content: built-ins by name, the user's files by what is in them.

    Args:
        loop: the trainer loop, as `code_of` names one of the user's.
    """
    reward, own = config.reward.custom_reward_function, config.algorithm.custom_advantage_function
    code = {"reward": config.reward.name, "trainer loop": loop}
    if reward.path is not None:
        code["reward"] = code_of(reward.path, reward.name)
    if own.path is not None:
        code["algorithm.custom_advantage_function"] = code_of(own.path, own.name)
    return code


def fixed_options(config: RunConfig) -> dict[str, Any]:
    """What a run may not change on its way, beside its data and code: a checkpoint would lack or not fit its
    state."""
    algorithm = config.algorithm
    fixed: dict[str, Any] = {
        "trainer.mode": "separate_async or decoupled_async" if config.is_async else "sync",
        "algorithm.adv_estimator": algorithm.adv_estimator,
        "algorithm.kl_ctrl.type": algorithm.kl_ctrl.type if algorithm.use_kl_in_reward else "none",
    }
    if algorithm.adv_estimator == CUSTOM:  # with the others it follows from the estimator
        fixed["critic.enable"] = config.uses_critic
    if config.is_async:  # prompts and samples of the checkpoint are trained on together with new ones
        fixed |= {
            "data.train_batch_size": config.data.train_batch_size,
            "data.max_prompt_length": config.data.max_prompt_length,
            "data.max_response_length": config.data.max_response_length,
            "actor_rollout_ref.rollout.n": config.actor_rollout_ref.rollout.n,
        }
    return fixed


def check_fits(
    config: RunConfig, checkpoint: Checkpoint, state: TrainerState, loop: str = OWN_LOOP_NONE
) -> None:
    """Refuse a checkpoint of another kind of run; data are the loader's business, layouts the workers'.

    What the checkpoint of an earlier version lacks is not compared.

    Raises:
        ConfigError: with every option that differs.
    """
    mine, code = fixed_options(config), code_options(config, loop)
    wrong = differing(mine, checkpoint, state)
    if not config.trainer.accept_changed_code:
        hint = "trainer.accept_changed_code=true resumes with it"
        wrong += [f"{text}; {hint}" for text in differing(code, checkpoint, state)]
    if wrong:
        raise ConfigError(*wrong)


def differing(mine: Mapping[str, Any], checkpoint: Checkpoint, state: TrainerState) -> list[str]:
    """A sentence for each of these that the checkpoint was saved with another value of."""
    return [
        f"{key}: got {mine[key]!r}, but {checkpoint.path} was saved with {state.fixed[key]!r}"
        for key in sorted(mine.keys() & state.fixed.keys())
        if mine[key] != state.fixed[key]
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartPoint:
    """Where a run starts: at the beginning, or after the step of a checkpoint.

    Attributes:
        epoch: of the weight versions of this start; no other start of the run has it.
        checkpoint, state: what it resumes from; None at the beginning.
    """

    epoch: int = 0
    checkpoint: Checkpoint | None = None
    state: TrainerState | None = field(default=None, repr=False)

    @property
    def step(self) -> int:
        """The last step that is done."""
        return 0 if self.state is None else self.state.step

    @property
    def version(self) -> WeightVersion:
        """The first version to publish."""
        return WeightVersion(epoch=self.epoch, n=0 if self.state is None else self.state.version.n)

    @property
    def folder(self) -> Path | None:
        return None if self.checkpoint is None else self.checkpoint.path


def _version(plain: Any) -> WeightVersion:
    return WeightVersion(epoch=int(plain[0]), n=int(plain[1]))
