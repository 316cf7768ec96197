"""What other processes do in the shared-memory tests; run as `python -m … NAME ARGS`."""

import asyncio
import contextlib
import pickle
import sys
import time

import numpy as np

from neoproto.errors import StoreFull
from neoproto.store.shm import Owner, SharedVolume, Table
from neoproto.store.volume import SegmentPool


def hold(prefix, ref_file):
    """Read a value, say its sum, and keep it until killed."""
    with open(ref_file, "rb") as file:
        ref = pickle.load(file)
    value = SharedVolume.open(prefix).read(ref)
    print(int(value.sum()), flush=True)
    time.sleep(60)
    return value


def begin_to_write(prefix, grant_file):
    """Write half of a value, then wait to be killed."""
    with open(grant_file, "rb") as file:
        reservation = pickle.load(file)
    writer = SharedVolume.open(prefix).open_writer(reservation)
    location = writer.allocate((reservation.nbytes,))
    writer.write(location, (np.ones(reservation.nbytes // 2, dtype=np.uint8),))
    print("half", flush=True)
    time.sleep(60)


def own(prefix):
    """Own a volume's files until killed."""
    owner = Owner.claim(prefix)
    table = Table.create(prefix)
    print("owned", flush=True)
    time.sleep(60)
    return owner, table


def overfill(prefix):
    """Fill /dev/shm, then take more slots than the table has memory for; say what comes of it."""
    table = Table.create(prefix)
    pool = SegmentPool(prefix, table, 1 << 20)
    pool.retire(asyncio.run(pool.reserve(1000, 1)).token)
    with open("/dev/shm/filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        asyncio.run(pool.reserve(1000, 60_000))
    except StoreFull as error:
        print(error)
    reservation = asyncio.run(pool.reserve(1000, 10))
    print(len(reservation.slots), pool.stats().live_slots)


if __name__ == "__main__":
    programs = {"hold": hold, "begin_to_write": begin_to_write, "own": own, "overfill": overfill}
    programs[sys.argv[1]](*sys.argv[2:])
