"""`python -m neoproto.run`."""

import sys

from neoproto.run.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
