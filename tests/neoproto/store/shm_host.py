"""A volume's files and a process's view of them, without actors; for the tests of both."""

import asyncio
import contextlib
import os
import subprocess
import sys

import torch

from neoproto.store import shm
from neoproto.store.base import ObjectRef
from neoproto.store.codec import encode
from neoproto.store.shm import SharedVolume, total_bytes
from neoproto.store.volume import SegmentPool

MIB = 1 << 20


class Host:
    """A volume's files, and a process's view of them."""

    def __init__(self, limit=64 * MIB, clock=None):
        self.prefix = shm.volume_prefix(f"unit-{os.getpid()}")
        self.owner = shm.Owner.claim(self.prefix)
        self.table = shm.Table.create(self.prefix)
        times = {} if clock is None else {"clock": clock}
        self.pool = SegmentPool(self.prefix, self.table, limit, wait_s=0.1, **times)
        self.view = SharedVolume.open(self.prefix)
        self.generation = 100

    def reserve(self, nbytes, slots=1):
        return asyncio.run(self.pool.reserve(nbytes, slots))

    def put(self, value):
        info, parts = encode(value)
        sizes = [part.size for part in parts]
        reservation = self.reserve(total_bytes([sizes]))
        writer = self.view.open_writer(reservation)
        location = writer.allocate(sizes)
        writer.write(location, parts)
        self.generation += 1
        self.view.seal([location.slot], [self.generation])
        self.pool.fulfil(reservation.token, location.slot, self.generation)
        writer.close()
        return ObjectRef(
            store="unit", key="k", volume="0", info=info, generation=self.generation, location=location
        )

    def free(self, ref):
        self.pool.free(ref.location.slot)

    @contextlib.contextmanager
    def program(self, *args):
        """A process of `shm_programs`, after its first line of output; killed in the end."""
        command = [sys.executable, "-m", "tests.neoproto.store.shm_programs", *map(str, args)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def big(fill, n=MIB):
    return torch.full((n,), fill, dtype=torch.uint8)


def names(prefix):
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]
