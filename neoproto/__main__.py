"""`python -m neoproto MODULE …` runs a module of ours, whatever else has its name: see `neoproto.packages`.

Workers, judges and scripts are started so.
"""

from __future__ import annotations

import runpy
import sys

COMMANDS = """\
wanted a module to run, for example actors.smollm2; the commands are
  python -m neoproto.run      train
  python -m neoproto.eval     measure a model
  python -m neoproto.export   make a model folder of a checkpoint
  python -m neoproto.report   write a page about runs
"""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].partition(".")[0] not in ("actors", "meshes", "neoproto"):
        sys.stderr.write(COMMANDS)
        sys.exit(2)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
