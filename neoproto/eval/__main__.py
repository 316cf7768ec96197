"""`python -m neoproto.eval`."""

import sys

from neoproto.run.process import begin, leave

if __name__ == "__main__":
    begin()
    from neoproto.eval.cli import main

    leave(main(sys.argv[1:]))
