"""What engines keep private, one file each. Backends and the store alone import from here."""
