"""`python -m neoproto.run`."""

from neoproto.run.process import run_command

if __name__ == "__main__":
    run_command()
