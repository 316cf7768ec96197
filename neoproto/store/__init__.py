"""The object store: its contract, the active store of a context, and the TorchStore engine."""
