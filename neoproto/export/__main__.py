"""`python -m neoproto.export`."""

import sys

from neoproto.run.process import begin, leave

if __name__ == "__main__":
    begin()
    from neoproto.export.cli import main

    leave(main(sys.argv[1:]))
