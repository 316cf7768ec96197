"""The entry point that measures a model: `python -m neoproto.eval model=DIR data.val_files=FILE n=8`."""
