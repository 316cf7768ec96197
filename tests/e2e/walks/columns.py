"""A run that writes down the columns and the meta_info of each batch after each stage, in columns.json."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any

from neoproto.data import DataProto
from neoproto.run.process import run_command
from neoproto.trainer import step, sync, validation
from neoproto.trainer.metrics.record import TrainingParts, TrainingResult

SEEN: dict[str, Any] = {}


def see(stage: str, batch: DataProto) -> None:
    columns = {
        name: [list(value.shape), str(value.dtype).removeprefix("torch.")]
        for name, value in batch.materialize().items()
    }
    meta = {name: type(value).__name__ for name, value in batch.meta_info.items()}
    SEEN.setdefault(stage, {"columns": columns, "meta_info": meta})


def watch() -> None:
    ppo_step, annotate, estimate = step.ppo_step, step.annotate, step.estimate
    collect = validation.collect_samples

    async def watched_step(workers: Any, prompts: DataProto, *rest: Any) -> Any:
        see("prompts", prompts)
        batch, metrics = await ppo_step(workers, prompts, *rest)
        see("update", batch)
        return batch, metrics

    async def watched_annotate(workers: Any, batch: DataProto, *rest: Any) -> DataProto:
        see("generate", batch)
        annotated = await annotate(workers, batch, *rest)
        see("annotate", annotated)
        return annotated

    def watched_estimate(*arguments: Any) -> Any:
        batch, metrics = estimate(*arguments)
        see("estimate", batch)
        return batch, metrics

    def watched_collect(batch: DataProto, *rest: Any) -> Any:
        see("validation", batch)
        return collect(batch, *rest)

    sync.ppo_step = watched_step  # type: ignore[assignment]
    step.annotate, step.estimate = watched_annotate, watched_estimate  # type: ignore[assignment]
    validation.collect_samples = watched_collect


async def loop(parts: TrainingParts) -> TrainingResult:
    watch()
    return await sync.SyncTrainer(parts).run()


if __name__ == "__main__":
    atexit.register(lambda: Path(os.environ["COLUMNS_SEEN"]).write_text(json.dumps(SEEN), encoding="utf-8"))
    run_command(loop)
