"""A checkpoint's policy, whatever the number of ranks that wrote it, as a Hugging Face folder."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from actors.checkpoint.reading import open_checkpoint, read_checkpoint
from actors.checkpoint.state import training_parts
from actors.training.ranks import Ranks
from actors.training.torch_model import ModelOptions, check_savable, load_model, save_hf_folder
from neoproto.config import RunConfig, load_config
from neoproto.data.model_files import MODEL_FIELD
from neoproto.errors import ConfigError
from neoproto.files import new_folder, unwritable
from neoproto.report.reading import check_folder, read_config
from neoproto.run.folder import CONFIG, MODEL
from neoproto.run.prepare import Rows, load_rows, model_folder
from neoproto.trainer.checkpoint.folder import CHECKPOINTS, Checkpoint, CheckpointFolder, problems

_ACTOR = "actor"
"""The folder of the policy in a checkpoint."""
_WEIGHTS = "model."
"""How the names of weights begin there; the others are the optimizer's."""


def export(run_dir: Path, target: Path, step: int | None = None) -> int:
    """Write the policy of a checkpoint to `target`.

    Args:
        run_dir: of the run; its configuration says which model folder training started from, which the
            tokenizer is taken from and which must still be there.
        step: None takes the newest checkpoint.

    Returns:
        The checkpoint's step.

    Raises:
        ConfigError: there is no such run or checkpoint, a file of it is damaged, `target` exists or cannot be
            written, or the model folder is gone.
        WeightMismatch: the checkpoint is of another model than the folder's.
    """
    with unwritable(f"--to: {target}"):
        if target.exists():
            raise ConfigError(f"--to: {target} exists already")
    config = run_config(run_dir)
    checkpoint = find_checkpoint(run_dir, step)
    if damaged := problems(checkpoint):
        raise ConfigError(*damaged)
    source = model_folder(config, rows_of(config), _quietly)
    check_savable(source, field=MODEL_FIELD)
    # One rank, without a process group: pieces of all ranks are read into one model.
    ranks = Ranks()
    _no_progress_bars()
    model = load_model(ModelOptions(path=str(source)), ranks, head=True)
    parts = training_parts(model, {})
    stored = open_checkpoint(checkpoint.path / _ACTOR).only(_WEIGHTS)
    stored.check(parts)
    read_checkpoint(stored, parts, ranks, None)
    with unwritable(f"--to: {target}"), new_folder(target) as made:
        save_hf_folder(model, source, made, ranks)
    return checkpoint.step


def rows_of(config: RunConfig) -> Rows:
    """What the built-in model is known by, the rows that it was warm-started on; no other model needs any."""
    named = config.actor_rollout_ref.model.path is not None
    return Rows(train=(), val=()) if named else load_rows(config)


def run_config(run_dir: Path) -> RunConfig:
    """The configuration that a run wrote down.

    Raises:
        ConfigError: there is none, or it is no configuration of this version.
    """
    check_folder(run_dir, (CONFIG,))
    path = run_dir / CONFIG
    mapping = read_config(path)
    try:
        return load_config(mapping)
    except ConfigError as error:
        raise ConfigError(*(f"{path}: {problem}" for problem in error.problems)) from error


def find_checkpoint(run_dir: Path, step: int | None) -> Checkpoint:
    """The run's checkpoint of a step, or its newest.

    Raises:
        ConfigError: there is none; says which there are.
    """
    there = CheckpointFolder(run_dir / CHECKPOINTS).all()
    found = [one for one in there if step in (None, one.step)]
    if not found:
        steps = ", ".join(str(one.step) for one in there) or "none"
        wanted = "" if step is None else f" of step {step}"
        final = run_dir / MODEL
        hint = f"; its trained model is {final}" if final.is_dir() else ""
        raise ConfigError(f"{run_dir} has no checkpoint{wanted}; there are: {steps}{hint}")
    return found[-1]


def _no_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _quietly(_: str) -> AbstractContextManager[None]:
    return nullcontext()
