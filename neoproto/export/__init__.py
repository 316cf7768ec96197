"""The entry point that makes a model folder of a checkpoint: `python -m neoproto.export RUN_DIR --to DIR`."""
