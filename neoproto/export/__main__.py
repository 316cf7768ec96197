"""`python -m neoproto.export`."""

import sys

from neoproto.run.process import leave, open_standard_streams

if __name__ == "__main__":
    open_standard_streams()
    from neoproto.export.cli import main

    leave(main(sys.argv[1:]))
