"""The command line: composes, checks, runs, and ends with one clear line and an exit code.

0 the run is complete · 1 it failed while running · 2 the input is wrong · 128 + n ended by signal n
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neoproto.config import CONFIG_NAMES
from neoproto.errors import ConfigError, NeoProtoError, StackError
from neoproto.runtime.logfile import LogFileHandler
from neoproto.runtime.signals import Terminated, raised_signals
from neoproto.stack import check_stack
from neoproto.text import first_line
from neoproto.user_code import is_signal, noted_interrupts, told_exit

if TYPE_CHECKING:
    from neoproto.run.trainers import Loop

EPILOG = f"""\
shipped configurations: {", ".join(CONFIG_NAMES)}

examples:
  python -m neoproto.run --config-name ppo_monarch
  python -m neoproto.run --config-name ppo_monarch trainer.total_training_steps=20 data.train_batch_size=32
  python -m neoproto.run --config-name grpo_monarch actor_rollout_ref.model.path=/models/my-model \\
      actor_rollout_ref.actor.optim.lr=1e-6     (the default rate suits the tiny model only)
  python -m neoproto.run --config-name ppo_monarch data=files data.train_files=a.jsonl data.val_files=b.jsonl
  python -m neoproto.run --config-dir my_configs --config-name my_ppo
  python -m neoproto.run --config-name ppo_monarch --cfg job        (print the configuration, run nothing)
  python -m neoproto.run --config-name ppo_monarch dry_run=true     (check it, print placement and memory)

A run writes its configuration, metrics, validation samples, worker logs, checkpoints and the trained model to
its folder, outputs/PROJECT/EXPERIMENT/TIME unless runtime.run_dir names another. The same command with the
same runtime.run_dir resumes from its newest checkpoint.
"""

log = logging.getLogger("neoproto.run")
log.addHandler(logging.NullHandler())  # before there is a run folder, nothing is printed behind our back


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m neoproto.run",
        description="Train a language model with reinforcement learning on Monarch meshes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument(
        "--config-name", "-cn", default="ppo_monarch", help="configuration to run (%(default)s)"
    )
    arguments.add_argument("--config-dir", "-cd", type=Path, help="folder of your own configurations")
    arguments.add_argument(
        "--cfg", choices=["job"], help="print the composed configuration and its errors, and stop"
    )
    # Answered before this parser is built, see `run_command`; here for --help.
    arguments.add_argument(
        "--shell-completion",
        metavar="install=bash",
        help='print what makes the tab key complete options: eval "$(… --shell-completion install=bash)"',
    )
    arguments.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values to change, as Hydra reads them"
    )
    return arguments


def main(argv: Sequence[str], own_loop: Loop | None = None) -> int:
    """Run the command, with a trainer loop of the caller's if there is one; returns the exit code."""
    command = parser()
    options = command.parse_intermixed_args(argv)
    if options.shell_completion is not None:
        command.error("--shell-completion install=bash is a command of its own")
    if not argv and own_loop is None:
        print(
            f"no arguments: training {options.config_name}, the default task and model, some minutes on two "
            "cores; --help shows what else there is",
            flush=True,
        )
    return guarded(lambda: execute(options, own_loop))


def guarded(command: Callable[[], int]) -> int:
    """The exit code of a command; what it raises becomes a line on stderr and the code that goes with it."""
    with noted_interrupts():
        try:
            return command()
        except ConfigError as error:
            return complain(listed(error), 2)
        except StackError as error:
            return complain(f"error: {error}", 2)
        except Terminated as error:
            said = f"ended by {error.signal_name}; everything of the run is closed{resume_hint()}"
            return complain(said, int(error.code or 1))
        except NeoProtoError as error:
            log.error("the run failed", exc_info=error)
            return complain(f"error: {first_line(error)}{log_hint()}", 1)
        except Exception as error:  # the outermost boundary: the traceback goes to the run's log
            log.error("the run failed", exc_info=error)
            return complain(f"error: {type(error).__name__}: {first_line(error)}{log_hint()}", 1)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and is_signal(error):
                said = f"interrupted; everything of the run is closed{resume_hint()}"
                return complain(said, 128 + signal.SIGINT)
            # Code of a user's raised it, in a task of its own perhaps: the run did not come to its end.
            log.error("the run failed", exc_info=error)
            return complain(f"error: the run was left by {told_exit(error)}{log_hint()}", 1)


def execute(options: argparse.Namespace, own_loop: Loop | None = None) -> int:
    """What the options ask for, errors not yet turned into lines."""
    from neoproto.run.compose import compose

    mapping = compose(options.config_name, options.overrides, options.config_dir)
    if options.cfg:
        from neoproto.config.saved import to_yaml

        # Printed first: what is wrong may be a mistake in how it is composed, which is to be looked at.
        sys.stdout.write(to_yaml(mapping))
        sys.stdout.flush()
    from neoproto.config import load_config

    config = load_config(mapping)
    if options.cfg:
        return 0
    check_stack()
    if config.dry_run:
        from neoproto.run.session import dry_run

        with raised_signals():
            dry_run(config, own_loop=own_loop)
    else:
        from neoproto.run.launch import run

        with raised_signals():
            run(config, own_loop=own_loop)
    return 0


def complain(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # its reader is gone: the exit code remains
        print(text, file=sys.stderr, flush=True)
    return code


def listed(error: ConfigError) -> str:
    """One problem in one line; several as a list below their number."""
    if len(error.problems) == 1:
        return f"error: {error}"
    return f"error: {len(error.problems)} problems:\n{error}"


def resume_hint() -> str:
    """How to resume a run that was ended, if it has a checkpoint."""
    for handler in logging.getLogger("neoproto").handlers:
        if isinstance(handler, LogFileHandler):
            from neoproto.trainer.checkpoint.folder import CHECKPOINTS, CheckpointFolder

            folder = Path(handler.baseFilename).parent
            newest = CheckpointFolder(folder / CHECKPOINTS, None).newest()
            if newest is None:
                return ""
            words = [shlex.quote(f"runtime.run_dir={folder}"), *_resume_words(folder)]
            return f"; the same command with {' '.join(words)} resumes it from step {newest.step}"
    return ""


def _resume_words(folder: Path) -> list[str]:
    """What a command needs besides that resumed in another way itself, or not at all."""
    from neoproto.report.reading import read_config
    from neoproto.run.folder import CONFIG

    try:
        trainer = read_config(folder / CONFIG).get("trainer") or {}
    except ConfigError:
        return []
    words = ["trainer.resume_mode=auto"] if trainer.get("resume_mode", "auto") != "auto" else []
    return words + (["trainer.resume_from_path=null"] if trainer.get("resume_from_path") else [])


def log_hint() -> str:
    """Where the log is, once the run has one; or why it is not there."""
    handlers = logging.getLogger("neoproto").handlers
    for handler in handlers:
        if isinstance(handler, LogFileHandler):
            path, failure = handler.baseFilename, handler.failure
            reason = failure and (failure.strerror or str(failure))
            return f" ({path} is not complete: {reason})" if reason else f" (details: {path})"
    return ""
