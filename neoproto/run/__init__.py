"""`python -m neoproto.run`: trains by a configuration; see `neoproto.run.cli`.

For notebooks and scripts: `compose_run` makes the configuration, `InteractiveTrainer` takes its steps one by
one.
"""

import lazy_loader

# The names of __init__.pyi, each imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
