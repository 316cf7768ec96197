"""The private API of the frameworks that backends stand on. Backends and the store alone import from here."""
