"""`python -m neoproto MODULE …` runs a module of ours, whatever else has its name: see `neoproto.packages`.

Workers, judges and scripts are started so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import runpy
import signal
import sys
from typing import NoReturn

COMMANDS = """\
wanted a module to run, for example actors.smollm2; the commands are
  python -m neoproto.run      train
  python -m neoproto.eval     measure a model
  python -m neoproto.export   make a model folder of a checkpoint
  python -m neoproto.report   write a page about runs
"""


BY_HAND = ("actors.smollm2", "actors.tiny_model")
"""Commands of a person's: they begin and end as the others do. Workers and judges have ways of their own."""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].partition(".")[0] not in ("actors", "meshes", "neoproto"):
        sys.stderr.write(COMMANDS)
        sys.exit(2)
    del sys.argv[0]
    if not is_runnable(sys.argv[0]):
        sys.stderr.write(f"no module {sys.argv[0]} to run; {COMMANDS}")
        sys.exit(2)
    if sys.argv[0] in BY_HAND:
        run_by_hand(sys.argv[0])
    runpy.run_module(sys.argv[0], run_name="__main__")


def is_runnable(name: str) -> bool:
    """Whether there is such a module, or a package that runs as one."""
    try:
        spec = importlib.util.find_spec(name)
        package = spec is not None and spec.submodule_search_locations is not None
        return spec is not None and (not package or importlib.util.find_spec(f"{name}.__main__") is not None)
    except ImportError:
        return False


def run_by_hand(module: str) -> NoReturn:
    from neoproto.run.process import begin, leave
    from neoproto.runtime.signals import Terminated, raised_signals

    begin()
    said, code = "", 0
    try:
        with raised_signals():
            runpy.run_module(module, run_name="__main__")
    except Terminated as error:
        said, code = f"ended by {error.signal_name}\n", int(error.code or 1)
    except KeyboardInterrupt:
        said, code = "interrupted\n", 128 + signal.SIGINT
    except SystemExit as error:
        said, code = ("", error.code or 0) if isinstance(error.code, int | None) else (f"{error.code}\n", 1)
    with contextlib.suppress(OSError):
        sys.stderr.write(said)
    leave(code)


if __name__ == "__main__":
    main()
