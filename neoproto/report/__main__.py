"""`python -m neoproto.report`."""

import sys

from neoproto.report.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
