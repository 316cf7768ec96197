"""Publishing and pulling weights, beside a plain copy and cast of the same bytes.

    python scripts/bench_weights.py [--repeats 9] [--quick]

A model of 134.5 million float32 parameters (SmolLM2-135M's shapes, 269 MB as bfloat16) is published as
bfloat16 through a store and a registry in processes of their own, and pulled again, on one host. Medians;
publishing and copying are measured in turn, so that a busy machine slows both. Then a replica's engine (vLLM)
takes versions while it generates. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import torch
from _bench import EOS, Figure, Measurements, first_of, positive, random_llama, seconds

import neoproto  # noqa: F401 - first: it finds our packages, whatever else has their names
from actors.rollout.options import EngineOptions, RolloutOptions, rollout_env
from actors.rollout.worker import RolloutWorker
from actors.weight_registry import GroupRegistry, RegistryWorker
from neoproto.config import RolloutConfig
from neoproto.data import DataProto
from neoproto.runtime import ClassWithInitArgs, Runtime
from neoproto.store import active_store
from neoproto.weights import (
    Publisher,
    Puller,
    UpdateOptions,
    WeightOptions,
    WeightVersion,
)


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
        self.publisher = Publisher(store, GroupRegistry(group), options)
        self.registry_group = group.slice(start=0, size=1)
        self.puller = Puller(store, GroupRegistry(group), "bench")
        self.newest = self.next = WeightVersion(epoch=0, n=0)
        self.nbytes = 0

    def publish(self) -> None:
        self.nbytes = self.publisher.publish(self.next, self.named).nbytes
        self.newest, self.next = self.next, self.next.next()

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


def measure(bench: Bench, repeats: int, measured: Measurements) -> list[Figure]:
    """Publish and copy in turn, pull in between."""
    sources = list({tensor.data_ptr(): tensor for tensor in bench.named.values()}.values())
    flat = torch.cat([tensor.reshape(-1) for tensor in sources])
    target = torch.zeros(flat.numel(), dtype=torch.bfloat16)
    first = seconds(bench.publish)
    for _ in range(3):  # every slot's memory is there and mapped
        bench.publish()
    times: dict[str, list[float]] = {"copy": [], "publish": [], "handed_over": [], "read": []}

    def turn(_: int) -> None:
        times["copy"].append(seconds(lambda: target.copy_(flat)))
        times["publish"].append(seconds(bench.publish))
        for name, value in asyncio.run(bench.pull()).items():
            times[name].append(value)

    times = first_of(measured.repeat(repeats, turn), times)
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


def stand_still(
    runtime: Runtime, bench: Bench, folder: Path, repeats: int, measured: Measurements
) -> list[Figure]:
    """A replica takes versions while it generates: how long it stands still, and what of it is loading."""
    engine = EngineOptions(
        rollout=RolloutConfig(dtype="bfloat16", max_num_seqs=8, n=8),
        model=str(folder),
        max_model_len=128,
        eos_token_ids=(EOS,),
    )
    options = RolloutOptions(
        engine=engine,
        max_prompt_length=4,
        max_response_length=100,
        pad_token_id=EOS,
        updates=UpdateOptions(pause_mode="abort", drain_timeout=0.0),
    )
    replica = runtime.create_worker_group(
        ClassWithInitArgs(RolloutWorker, options, env=rollout_env(engine)),
        on=runtime.create_resource_pool(1, 1),
        name="rollout",
    )
    replica.submit("attach_registry", (bench.registry_group,), timeout=60).result()
    replica.submit("update_weights", (bench.newest,), timeout=60).result()
    found: list[dict[str, float]] = []

    def take(turn: int) -> None:
        prompts = DataProto.from_dict(
            {"prompts": torch.full((1, 4), 5), "prompt_len": torch.full((1,), 4)}, {"uid": [str(turn)]}
        )
        answers = replica.submit("generate_sequences", (prompts,), timeout=300)
        time.sleep(0.3)
        bench.publish()
        replica.submit("update_weights", (bench.newest,), timeout=60).result()
        answers.result().release()
        prompts.release()
        found.extend(replica.submit("stats", timeout=60).result())

    measured.repeat(repeats, take)
    pauses, loads, pulls = (
        [one[f"last_{name}_seconds"] for one in found] for name in ("pause", "load", "pull")
    )
    beyond = [pause - load for pause, load in zip(pauses, loads, strict=True)]
    return [
        Figure(name="generation_stands_still", value=statistics.median(pauses) * 1e3, unit="ms"),
        Figure(name="engine_loads", value=statistics.median(loads) * 1e3, unit="ms"),
        Figure(name="pause_beyond_load", value=statistics.median(beyond) * 1e3, unit="ms", goal="<= 50"),
        Figure(name="pull_while_generating", value=statistics.median(pulls) * 1e3, unit="ms"),
    ]


def main() -> None:
    """Measure, then report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument("--quick", action="store_true", help="a small model, for trying the script itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with (
        Measurements("weights", options.repeats) as measured,
        tempfile.TemporaryDirectory() as folder,
        Runtime.from_config({"runtime": {"run_dir": folder}}) as runtime,
    ):
        model = Path(folder) / "model"
        llama = random_llama(options.quick)
        llama.save_pretrained(model)
        bench = Bench(runtime, llama.state_dict(keep_vars=True))
        measured.add(measure(bench, options.repeats, measured))
        measured.add(stand_still(runtime, bench, model, options.repeats, measured))


if __name__ == "__main__":
    main()
