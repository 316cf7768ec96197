"""What a checkpoint costs the training: an asynchronous save beside writing the same bytes and waiting.

    python scripts/bench_checkpoint.py [--repeats 21] [--quick]

One rank trains a policy of SmolLM2-135M's shapes (134.5 million float32 parameters, random values; with
AdamW's state 1.6 GB) on small batches. The training loop's stall is what some updates take with a save at the
start, over what they take without: copying to host memory, and what the writing costs updates that run
meanwhile. The updates go on for longer than the writing. Writing alone is timed without them. All of it in
turn, with and without a save in both orders; medians. The updates' own times differ by as much as the stall
they are to show, so it takes many repeats; `quartiles` says how far to trust the median. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from _bench import Figure, Measurements, first_of, positive, random_llama, seconds

import neoproto  # noqa: F401 - first: it finds our packages, whatever else has their names
from actors.checkpoint.files import write_checkpoint
from actors.checkpoint.model import ModelCheckpointer
from actors.checkpoint.rng import rng_state
from actors.checkpoint.state import training_parts
from actors.training.policy import Policy, PolicyOptions
from actors.training.ranks import Ranks
from actors.training.torch_model import ModelOptions
from neoproto.config import ActorConfig

ROWS, PROMPT, RESPONSE = 2, 16, 48


def make_batch() -> dict[str, torch.Tensor]:
    """Columns of a batch without padding."""
    width = PROMPT + RESPONSE
    ids = torch.randint(3, 1024, (ROWS, width))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(ROWS, width, dtype=torch.int64),
        "position_ids": torch.arange(width).repeat(ROWS, 1),
        "responses": ids[:, PROMPT:],
        "response_mask": torch.ones(ROWS, RESPONSE, dtype=torch.int64),
        "advantages": torch.randn(ROWS, RESPONSE),
        "old_log_probs": torch.full((ROWS, RESPONSE), -10.0),
    }


class Bench:
    """A policy in training and its checkpoints, each removed once it is complete."""

    def __init__(self, folder: Path, quick: bool) -> None:
        random_llama(quick).save_pretrained(folder / "model")
        actor = ActorConfig(ppo_mini_batch_size=ROWS, ppo_micro_batch_size_per_gpu=ROWS)
        options = PolicyOptions(model=ModelOptions(path=str(folder / "model")), actor=actor)
        self._policy = Policy(options, Ranks())
        self._checkpoints = ModelCheckpointer(self._policy.model, self._policy.loop, Ranks())
        self._batch, self._saved = make_batch(), folder / "saved"

    def update(self, times: int = 1) -> None:
        for _ in range(times):
            self._policy.update(self._batch)

    def save(self) -> None:
        self._checkpoints.save(self._saved)

    def finish(self) -> None:
        asyncio.run(self._checkpoints.finish())

    def write(self) -> None:
        """What is saved, written by this thread and from where it is."""
        parts = training_parts(self._policy.model, self._policy.loop.optimizer.state)
        state = {"updates": 0, "rng": rng_state(torch.device("cpu"))}
        write_checkpoint(self._saved, parts, state, Ranks(), None)

    def remove(self) -> int:
        """Returns how many bytes the checkpoint had."""
        size = sum(path.stat().st_size for path in self._saved.iterdir())
        shutil.rmtree(self._saved)
        return size


def measure(bench: Bench, repeats: int, measured: Measurements) -> list[Figure]:
    """Updates, updates with a save, and a save by itself, in turn."""
    bench.update()
    first = seconds(bench.save)
    bench.finish()
    bench.remove()
    write = seconds(bench.write)
    nbytes = bench.remove()
    update = statistics.median(seconds(bench.update) for _ in range(3))
    count = math.ceil(1.5 * write / update)
    times: dict[str, list[float]] = {name: [] for name in ("without", "save", "with", "left", "write")}

    def without_save() -> None:
        times["without"].append(seconds(lambda: bench.update(count)))

    def with_save() -> None:
        times["save"].append(seconds(bench.save))
        times["with"].append(times["save"][-1] + seconds(lambda: bench.update(count)))
        times["left"].append(seconds(bench.finish))
        bench.remove()

    def turn(number: int) -> None:
        for work in (without_save, with_save) if number % 2 else (with_save, without_save):
            work()
        times["write"].append(seconds(bench.write))
        bench.remove()

    times = first_of(measured.repeat(repeats, turn), times)
    stalls = [one - other for one, other in zip(times["with"], times["without"], strict=True)]
    write = statistics.median(times["write"])
    detail = {f"{name}_s": [round(one, 4) for one in found] for name, found in times.items()}
    call = statistics.median(times["save"])
    quartiles = [one / write for one in statistics.quantiles(stalls)] if len(stalls) > 1 else None
    return [
        Figure(
            name="checkpoint_stall",
            value=statistics.median(stalls) / write,
            unit="ratio",
            goal="<= 0.10",
            detail={
                "mb": nbytes / 1e6,
                "updates": count,
                "quartiles": quartiles,
                "stall_s": stalls,
                **detail,
            },
        ),
        Figure(name="save_call_vs_writing", value=call / write, unit="ratio"),
        Figure(name="save_call", value=call * 1e3, unit="ms"),
        Figure(name="first_save_call", value=first * 1e3, unit="ms"),
        Figure(name="writing", value=write * 1e3, unit="ms"),
    ]


def main() -> None:
    """Measure, then report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=positive, default=21)
    parser.add_argument("--quick", action="store_true", help="a small model, for trying the script itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with Measurements("checkpoint", options.repeats) as measured, tempfile.TemporaryDirectory() as folder:
        measured.add(measure(Bench(Path(folder), options.quick), options.repeats, measured))


if __name__ == "__main__":
    main()
