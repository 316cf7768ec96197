"""The command line of an evaluation; exit codes as of `neoproto.run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neoproto.errors import ConfigError
from neoproto.run.cli import guarded
from neoproto.runtime.signals import raised_signals

if TYPE_CHECKING:
    from neoproto.config import RunConfig

EPILOG = """\
short names: model = actor_rollout_ref.model.path, n = actor_rollout_ref.rollout.val_kwargs.n; every other key
is one of a run's configuration. data.val_files alone is enough, data.train_files is not looked at.

examples:
  python -m neoproto.eval model=outputs/neoproto/ppo/…/model      (the held-out questions of the default task)
  python -m neoproto.eval model=/models/mine data.val_files=val.jsonl n=8 data.max_response_length=256
  python -m neoproto.eval --config-name grpo_smollm2 model=…/model    (the questions of another configuration)
  python -m neoproto.eval model=/models/mine data.val_files=v.jsonl reward.custom_reward_function.path=mine.py

Prints mean@n, pass@k and maj@n, and writes them (eval.json) with every answer (validation/step_0.jsonl) to
its folder, outputs/PROJECT/eval/TIME unless runtime.run_dir names another. dry_run=true only checks.
maj@n needs a reward function of your own to return 'pred', what an answer counts as in a vote.
"""

ALIASES = {"model": "actor_rollout_ref.model.path", "n": "actor_rollout_ref.rollout.val_kwargs.n"}
TRAIN_FILES, VAL_FILES = "data.train_files", "data.val_files"


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m neoproto.eval",
        description="Measure a model: several answers to each question, scored as in training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument(
        "--config-name", "-cn", default="ppo_monarch", help="configuration to start from (%(default)s)"
    )
    arguments.add_argument("--config-dir", "-cd", type=Path, help="folder of your own configurations")
    arguments.add_argument("overrides", nargs="*", metavar="key=value", help="values to change")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parser().parse_intermixed_args(argv)
    if not argv:
        print(
            f"no arguments: measuring the built-in model as {options.config_name} starts from it, untrained; "
            "model=RUN_DIR/model measures a trained one, --help shows what else there is",
            flush=True,
        )
    return guarded(lambda: execute(options))


def execute(options: argparse.Namespace) -> int:
    config = composed(options)
    from neoproto.stack import check_stack

    check_stack()
    from neoproto.eval.session import dry_run, evaluate

    with raised_signals():
        if config.dry_run:
            dry_run(config)
        else:
            evaluate(config)
    return 0


def composed(options: argparse.Namespace) -> RunConfig:
    """The configuration.

    Raises:
        ConfigError: errors in files to train on, which were not typed, name those to evaluate on.
    """
    from neoproto.run.compose import compose_run

    try:
        return compose_run(options.config_name, expanded(options.overrides), options.config_dir)
    except ConfigError as error:
        if TRAIN_FILES in typed_keys(options.overrides):
            raise
        said = (problem.replace(TRAIN_FILES, VAL_FILES) for problem in error.problems)
        raise ConfigError(*dict.fromkeys(said)) from error


def expanded(overrides: Sequence[str]) -> list[str]:
    """Short names written out; files to evaluate on stand for those to train on, which a run must have."""
    written = []
    for override in overrides:
        key, equals, value = override.partition("=")
        long = ALIASES.get(key.lstrip("+"), key) if equals else key
        written.append(f"{long}{equals}{value}")
    values = typed_keys(written)
    before = [] if "trainer.experiment_name" in values else ["trainer.experiment_name=eval"]
    if VAL_FILES in values:
        before += ["data=files"] if "data" not in values else []
        before.append(f"{TRAIN_FILES}={values[VAL_FILES]}")
    return [*before, *written]


def typed_keys(overrides: Sequence[str]) -> dict[str, str]:
    """Keys that are set, whatever pluses stand before them, and the texts of their values."""
    parts = (override.partition("=") for override in overrides)
    return {key.lstrip("+"): value for key, equals, value in parts if equals}
