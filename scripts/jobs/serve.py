"""Makes this machine a host, until it is ended (Ctrl-C, SIGTERM): `python -m scripts.jobs.serve ADDRESS`.

Whoever can connect to the address can run code here as this user. The default, loopback, is for this machine
only; on a network, give an address of a network that only your machines are on.
"""

from __future__ import annotations

import argparse

from monarch.actor import run_worker_loop_forever


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, prog="python -m scripts.jobs.serve")
    arguments.add_argument("address", nargs="?", default="tcp://127.0.0.1:26600", help="default: %(default)s")
    run_worker_loop_forever(address=arguments.parse_args().address, ca="trust_all_connections")


if __name__ == "__main__":
    main()
