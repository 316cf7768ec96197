"""Publishing and pulling weights, beside a plain copy and cast of the same bytes.

    python scripts/bench_weights.py [--repeats 9] [--quick]

A model of 134.5 million float32 parameters (SmolLM2-135M's shapes, 269 MB as bfloat16) is published as
bfloat16 through a store and a registry in processes of their own, and pulled again, on one host. Medians;
publishing and copying are measured in turn, so that a busy machine slows both. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from _bench import Figure, report

from actors.weight_registry import BlockingRegistry, GroupRegistry, RegistryWorker
from neoproto.runtime import ClassWithInitArgs, Runtime
from neoproto.store import active_store
from neoproto.weights import Publisher, Puller, WeightOptions, WeightVersion

HIDDEN, FFN, KEYS, VOCABULARY, LAYERS = 576, 1536, 192, 49152, 30


def model(quick: bool) -> dict[str, torch.Tensor]:
    """float32 parameters by name, the head tied to the embedding."""
    vocabulary, layers = (1024, 3) if quick else (VOCABULARY, LAYERS)
    embed = torch.randn(vocabulary, HIDDEN)
    named = {"model.embed_tokens.weight": embed, "model.norm.weight": torch.randn(HIDDEN)}
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEYS, HIDDEN),
        "self_attn.v_proj": (KEYS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    for layer in range(layers):
        for name, shape in shapes.items():
            named[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape)
    return named | {"lm_head.weight": embed}


def seconds(work: Callable[[], Any]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


class Bench:
    """A runtime with a registry; this process publishes and pulls."""

    def __init__(self, runtime: Runtime, named: dict[str, torch.Tensor]) -> None:
        store = active_store()
        assert store is not None
        group = runtime.create_worker_group(
            ClassWithInitArgs(RegistryWorker), on=runtime.create_resource_pool(1, 1), name="registry"
        )
        options = WeightOptions(num_slots=2, rollout_dtype="bfloat16")
        self.named = named
        self.publisher = Publisher(store, BlockingRegistry(group), options)
        self.puller = Puller(store, GroupRegistry(group), "bench", options.lease_ttl)
        self.next = WeightVersion(epoch=0, n=0)
        self.nbytes = 0

    def publish(self) -> None:
        self.nbytes = self.publisher.publish(self.next, self.named).nbytes
        self.next = self.next.next()

    async def pull(self) -> dict[str, float]:
        """Seconds until the tensors are handed over, and until every byte of them was read once as well."""
        begin = time.perf_counter()
        async with self.puller.pull() as pulled:
            handed_over = time.perf_counter() - begin
            distinct = {tensor.data_ptr(): tensor for tensor in pulled.tensors.values()}
            for tensor in distinct.values():
                _touch(tensor)
            return {"handed_over": handed_over, "read": time.perf_counter() - begin}


def _touch(tensor: torch.Tensor) -> None:
    """Read one element a page: what reading costs is the page faults."""
    flat = tensor.reshape(-1).view(torch.int16)
    flat[:: 4096 // 2].sum()


def measure(bench: Bench, repeats: int) -> list[Figure]:
    """Publish and copy in turn, pull in between."""
    sources = list({tensor.data_ptr(): tensor for tensor in bench.named.values()}.values())
    flat = torch.cat([tensor.reshape(-1) for tensor in sources])
    target = torch.zeros(flat.numel(), dtype=torch.bfloat16)
    first = seconds(bench.publish)
    for _ in range(3):  # every slot's memory is there and mapped
        bench.publish()
    times: dict[str, list[float]] = {"copy": [], "publish": [], "handed_over": [], "read": []}
    for _ in range(repeats):
        times["copy"].append(seconds(lambda: target.copy_(flat)))
        times["publish"].append(seconds(bench.publish))
        for name, value in asyncio.run(bench.pull()).items():
            times[name].append(value)
    medians = {name: statistics.median(found) for name, found in times.items()}
    detail = {f"{name}_s": found for name, found in times.items()}
    mb = bench.nbytes / 1e6
    return [
        Figure(
            name="publish_vs_copy_and_cast",
            value=medians["publish"] / medians["copy"],
            unit="times",
            goal="<= 2.5",
            detail={"mb": mb, "copy_s": detail["copy_s"], "publish_s": detail["publish_s"]},
        ),
        Figure(name="publish", value=medians["publish"] * 1e3, unit="ms"),
        Figure(name="first_publish", value=first * 1e3, unit="ms"),
        Figure(
            name="pull_before_loading",
            value=medians["handed_over"] * 1e3,
            unit="ms",
            goal="<= 50",
            detail={"mb": mb, "handed_over_s": detail["handed_over_s"]},
        ),
        Figure(
            name="pull_and_first_read",
            value=medians["read"] * 1e3,
            unit="ms",
            detail={"read_s": detail["read_s"]},
        ),
    ]


def main() -> None:
    """Measure, then report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a small model, for trying the script itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        Runtime.from_config({"runtime": {"run_dir": folder}}) as runtime,
    ):
        figures = measure(Bench(runtime, model(options.quick)), options.repeats)
    report("weights", options.repeats, figures)


if __name__ == "__main__":
    main()
