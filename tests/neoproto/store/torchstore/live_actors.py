"""Worker actors for the live store tests; a module of their own, so that worker processes can import them."""

import asyncio
import gc
import os
import random
import threading
import time

import numpy as np
import torch
from monarch.actor import Actor, current_rank, endpoint

from neoproto.data import DataProto
from neoproto.errors import NeoProtoError
from neoproto.store import set_process_store
from neoproto.store.torchstore.client import StoreClient

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.bool,
    torch.complex64,
]


def every_kind_of_value():
    """The same values in every process."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for dtype in DTYPES:
        for shape in [(), (0,), (5,), (3, 4)]:
            count = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=generator)
            values[f"{dtype}/{shape}"] = raw.view(dtype).reshape(shape)
    values["strided"] = torch.arange(24).reshape(4, 6).t()[::2]
    values["array"] = np.arange(6).reshape(2, 3)
    values["objects"] = np.array([{"a": 1}, None, "x"], dtype=object)
    values["nested"] = {"t": torch.ones(3), "l": [np.zeros(2), "text"]}
    return values


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        one, two = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(one, two)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and all(map(same, a.reshape(-1), b.reshape(-1)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def footprint():
    """Private resident MiB and open descriptors of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        fields = [int(field) for field in file.read().split()]
    return (fields[1] - fields[2]) * os.sysconf("SC_PAGE_SIZE") >> 20, len(os.listdir("/proc/self/fd"))


def soak(client, seconds, seed):
    """Keys of one's own, of known values; and a key that everybody overwrites, each value of one number."""
    choose, live, wrong, count = random.Random(seed), {}, 0, 0
    until, before = time.monotonic() + seconds, None
    while time.monotonic() < until:
        number = choose.randrange(1 << 40)
        size = choose.choice([10, 1000, 50_000, 400_000])
        ref = client.put(torch.full((size,), number), key=f"soak{seed}/{choose.randrange(50)}")
        live[ref.key] = (ref, number)
        key, (ref, number) = choose.choice(list(live.items()))
        value = client.get(choose.choice([key, ref]))
        wrong += int((value != number).sum())
        value[:] = 0
        client.put(torch.full((choose.choice([10, 50_000]),), number), key="everybody's")
        value = client.get("everybody's")
        wrong += int((value != value[0]).sum())
        if len(live) > 20:
            key = choose.choice(list(live))
            client.delete(live.pop(key)[0])
        count += 1
        if before is None and time.monotonic() > until - 0.7 * seconds:
            before = footprint()
    after = footprint()
    client.delete_batch([ref for ref, _ in live.values()])
    client.delete("everybody's", missing_ok=True)
    return {"wrong": wrong, "rounds": count, "before": before, "after": after}


class Worker(Actor):
    """Puts and gets through the process's client: from the actor's loop, or from another thread."""

    @endpoint
    async def attach(self, spec, host_ids=None):
        self.rank = rank = current_rank().rank
        host = host_ids[rank] if host_ids else "0"
        self.client = StoreClient.attach(spec, host_id=host, local_rank=rank)
        set_process_store(self.client)
        return self.client.volume

    @endpoint
    async def run(self, name, *args, **kwargs):
        """A method of the client, awaited on the actor's loop."""
        return await getattr(self.client, name)(*args, blocking=False, **kwargs)

    @endpoint
    async def run_blocking(self, name, *args, **kwargs):
        """A method of the client, blocking the actor's loop."""
        return getattr(self.client, name)(*args, **kwargs)

    @endpoint
    async def run_in_thread(self, name, *args, **kwargs):
        """A method of the client in a bare thread, which has none of Monarch's context."""
        box = []

        def work():
            box.append(getattr(self.client, name)(*args, **kwargs))

        thread = threading.Thread(target=work)
        thread.start()
        await asyncio.to_thread(thread.join)
        return box[0]

    @endpoint
    async def error_of(self, name, *args):
        """The class name of what a method of the client raises."""
        try:
            await getattr(self.client, name)(*args, blocking=False)
        except NeoProtoError as error:
            return type(error).__name__
        return "nothing"

    @endpoint
    async def put_every_kind(self):
        return await self.client.put_batch(every_kind_of_value(), blocking=False)

    @endpoint
    async def wrong_ones(self, refs):
        """Keys whose value is not what `every_kind_of_value` says."""
        got = await self.client.get_batch(refs, blocking=False)
        expected = every_kind_of_value().values()
        return [ref.key for ref, a, b in zip(refs, got, expected, strict=True) if not same(a, b)]

    @endpoint
    async def double(self, batch, key):
        """A batch in, a batch out: both as references."""
        return DataProto.from_dict({"doubled": batch[key] * 2}, {"rank": [self.rank] * len(batch)})

    @endpoint
    async def snapshot(self, key, seconds):
        """Take a lease and keep it."""
        self.kept = await asyncio.to_thread(self.client.snapshot, key, seconds=seconds)
        return self.kept.ref

    @endpoint
    async def release(self):
        await asyncio.to_thread(self.kept.release)

    @endpoint
    async def stats(self):
        return self.client.stats()

    @endpoint
    async def soak(self, seconds):
        """Put, get and delete values of many sizes; every one is read back. Returns what grew meanwhile."""
        return await asyncio.to_thread(soak, self.client, seconds, self.rank)

    @endpoint
    async def root_clients(self):
        from monarch._src.actor.actor_mesh import _client_context

        return _client_context.try_get() is not None

    @endpoint
    async def stock(self, name, *args):
        """A function of TorchStore's own API, as a user's actor calls it."""
        import torchstore

        return await getattr(torchstore, name)(*args)

    @endpoint
    async def stock_client(self, name, store_name, *args):
        import torchstore

        client = await torchstore.client(store_name)
        return await getattr(client, name)(*args)
