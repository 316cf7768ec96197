"""The entry point that trains: `python -m neoproto.run --config-name ppo_monarch key=value …`."""
