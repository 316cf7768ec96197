"""`python -m neoproto actors.smollm2` makes SmolLM2's folder; see `actors.models.smollm2`."""

import sys

from actors.models.smollm2 import main

if __name__ == "__main__":
    sys.exit(main())
