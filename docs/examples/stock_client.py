"""A stock TorchStore client in an actor of your own: it reads a batch and writes a value beside it.

python docs/examples/stock_client.py
"""

from __future__ import annotations

from typing import Any

import torch
import torchstore
from monarch.actor import Actor, endpoint, this_host

from neoproto.data import DataProto
from neoproto.runtime import Runtime
from neoproto.store import active_store


class Lengths(Actor):
    """An actor that knows Monarch and TorchStore, and nothing of NeoProto."""

    @endpoint
    async def measure(self, store_name: str, tokens_key: str, lengths_key: str) -> list[str]:
        """Count the tokens of each row that are not padding (0), and store the counts."""
        tokens: torch.Tensor = await torchstore.get(tokens_key, store_name=store_name)
        await torchstore.put(lengths_key, (tokens != 0).sum(dim=1), store_name=store_name)
        client: Any = await torchstore.client(store_name)
        keys: list[str] = await client.keys("lengths")
        return keys


def main() -> None:
    """Store a batch, have the actor read it, and read what the actor wrote."""
    with Runtime.from_config({}):
        store = active_store()
        assert store is not None
        batch = DataProto.from_dict({"tokens": torch.tensor([[5, 6, 7], [8, 0, 0]])})
        (tokens,) = batch.columns["tokens"].refs  # where the column is stored

        procs = this_host().spawn_procs(per_host={"gpus": 1})
        actor = procs.spawn("lengths", Lengths)
        keys = actor.measure.call_one(store.name, tokens.key, "lengths.first").get(120)
        procs.stop().get(60)

        print(f"the actor stored {keys}: {store.get('lengths.first').tolist()}")


if __name__ == "__main__":
    main()
