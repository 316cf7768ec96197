"""The command line of an evaluation; exit codes as of `neoproto.run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from neoproto.run.cli import guarded

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
"""

ALIASES = {"model": "actor_rollout_ref.model.path", "n": "actor_rollout_ref.rollout.val_kwargs.n"}


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
    return guarded(lambda: execute(options))


def execute(options: argparse.Namespace) -> int:
    from neoproto.run.compose import compose_run

    config = compose_run(options.config_name, expanded(options.overrides), options.config_dir)
    from neoproto.stack import check_stack

    check_stack()
    from neoproto.eval.session import dry_run, evaluate

    if config.dry_run:
        dry_run(config)
    else:
        evaluate(config)
    return 0


def expanded(overrides: Sequence[str]) -> list[str]:
    """Short names written out; files to evaluate on stand for those to train on, which a run must have."""
    written = []
    for override in overrides:
        key, equals, value = override.partition("=")
        written.append(f"{ALIASES.get(key, key)}{equals}{value}")
    values = {key: value for key, _, value in (one.partition("=") for one in written)}
    before = [] if "trainer.experiment_name" in values else ["trainer.experiment_name=eval"]
    if "data.val_files" in values:
        before += ["data=files"] if "data" not in values else []
        before.append(f"data.train_files={values['data.val_files']}")
    return [*before, *written]
