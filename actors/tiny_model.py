"""`python -m neoproto actors.tiny_model` makes the default model; see `actors.models.tiny_model`."""

import sys

from actors.models.tiny_model import main

if __name__ == "__main__":
    sys.exit(main())
