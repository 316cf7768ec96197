"""The object store: its contract, and the active store of a context.

The TorchStore engine is `neoproto.store.torchstore.actors`; it is imported where a run starts, not here.
"""

import lazy_loader

# The names of __init__.pyi, each imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
