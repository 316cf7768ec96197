"""The command line of an export; exit codes as of `neoproto.run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from neoproto.run.cli import guarded
from neoproto.runtime.signals import raised_signals

EPILOG = """\
examples:
  python -m neoproto.export outputs/neoproto/ppo/… --to /models/mine               (the newest checkpoint)
  python -m neoproto.export outputs/neoproto/ppo/… --step 40 --to /models/step-40

The folder holds weights (safetensors), configuration, tokenizer and chat template: transformers, vLLM,
neoproto.eval and another run's actor_rollout_ref.model.path take it. A run that is complete has its final
model in RUN_DIR/model already.
"""


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m neoproto.export",
        description="Make a Hugging Face model folder of a run's checkpoint.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("run_dir", type=Path, help="run folder")
    arguments.add_argument("--step", type=int, help="checkpoint of this step (default: the newest)")
    arguments.add_argument("--to", type=Path, required=True, help="folder to make; it must not exist")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parser().parse_args(argv)

    def execute() -> int:
        from neoproto.export.session import export

        with raised_signals():
            step = export(options.run_dir, options.to, options.step)
        print(f"the policy after step {step} is in {options.to}", flush=True)
        return 0

    return guarded(execute)
