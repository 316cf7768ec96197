"""One evaluation: prompts to answers to scores, with rollout and reward workers and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from neoproto.config import RunConfig, preset_topology
from neoproto.data.prompts import EncodedPrompts, load_tokenizer, read_rows
from neoproto.errors import ConfigError
from neoproto.eval.metrics import Answer, answer_metrics
from neoproto.files import user_path
from neoproto.run.checks import place
from neoproto.run.console import RunConsole
from neoproto.run.folder import EPOCH, earlier_date, holds_run, open_run_log, run_folder, write_config
from neoproto.run.groups import GroupSpec, reward_group, rollout_group, start_group, start_groups
from neoproto.run.handles import RewardHandle, RolloutHandle
from neoproto.run.launch import start_runtime
from neoproto.run.plan import DRY_RUN_DONE
from neoproto.run.prepare import (
    PreparedModel,
    Rows,
    Stage,
    check_judged,
    check_reward_function,
    encode,
    load_rows,
    prepared_model,
    served_folder,
)
from neoproto.run.prompts import as_batch
from neoproto.run.trainers import no_process_failure
from neoproto.runtime.placement import ModelPlacement, Placement, placement_table
from neoproto.trainer.metrics.phases import PhaseClock
from neoproto.trainer.tasks import beside
from neoproto.trainer.validation import (
    ValidationSample,
    failure_metrics,
    validate,
    validation_passes,
    write_samples,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedEval:
    """An evaluation whose inputs have been checked.

    Attributes:
        model: what is evaluated.
        prompts: the questions.
        groups: of rollout, all its replicas in one, and of the reward worker, beside the controller.
    """

    model: PreparedModel
    prompts: EncodedPrompts
    groups: tuple[GroupSpec, GroupSpec]


@dataclass(frozen=True, kw_only=True, slots=True)
class Samplers:
    """The groups that answer and judge."""

    rollout: RolloutHandle
    reward: RewardHandle


def evaluate(config: RunConfig, console: RunConsole | None = None) -> dict[str, float]:
    """Measure the configured model on the validation prompts.

    Returns:
        `{data source}/{metric}` of each way of sampling, see `metrics_of`.

    Raises:
        ConfigError: an input is wrong; no worker process was started.
        NeoProtoError, or a worker's own exception: it failed; everything has been closed.
    """
    console = console or RunConsole()
    refuse_run(config)
    placement = place_rollout(config)
    (rollout,) = placement.models_of("rollout")
    prepared = prepare(config, rollout, console.stage)
    with run_folder(config) as folder:
        write_config(folder, prepared.model.config)
        open_run_log(folder / "run.log")
        console.say(f"{len(prepared.prompts)} questions; folder: {folder}")
        samples = answer(config, prepared, placement, folder, console)
        write_samples(folder / "validation", 0, samples)
        metrics = metrics_of(samples)
        failures = failure_metrics(samples)
        written = json.dumps(metrics | failures, indent=2) + "\n"
        (folder / "eval.json").write_text(written, encoding="utf-8")
    console.table(table_of(metrics))
    if failures:
        count, log = int(sum(failures.values())), folder / "logs" / "reward" / "rank0.log"
        console.say(f"note: {count} of {len(samples)} answers got no score and count as wrong: {log}")
    for name in without_majority(metrics):
        console.say(f"note: {name} has no maj@n: the reward function returns no 'pred', what is voted on")
    console.say(f"answers: {folder / 'validation' / 'step_0.jsonl'}")
    return metrics


def dry_run(config: RunConfig, console: RunConsole | None = None) -> None:
    """Check everything that `evaluate` would, and say what it would do.

    Raises:
        ConfigError: an input is wrong.
    """
    console = console or RunConsole()
    refuse_run(config)
    placement = place_rollout(config)
    (rollout,) = placement.models_of("rollout")
    prepared = prepare(config, rollout, console.stage)
    console.table(placement_table(placement))
    for one in validation_passes(config.actor_rollout_ref.rollout.val_kwargs):
        console.say(f"{one.label}: {len(prepared.prompts):,} questions x {one.samples} answers")
    console.say(DRY_RUN_DONE)


def refuse_run(config: RunConfig) -> None:
    """Raises ConfigError if the folder is a run's: its configuration and samples would be overwritten."""
    if config.runtime.run_dir is None:
        return
    folder = user_path(config.runtime.run_dir, field="runtime.run_dir").absolute()
    try:
        taken = holds_run(folder) or (folder / EPOCH).exists()
    except OSError as error:
        raise ConfigError(f"runtime.run_dir: {folder}: cannot be read: {error.strerror or error}") from error
    if taken:
        raise ConfigError(f"runtime.run_dir: {folder} holds a training run; wanted another folder")


def place_rollout(config: RunConfig) -> Placement:
    """Where the replicas run: as the topology says, else on all devices of the preset.

    Raises:
        TopologyError: with every violation.
        ConfigError: see `place`.
    """
    if config.topology is None:
        nodes, devices = config.trainer.nnodes or 1, config.trainer.n_gpus_per_node or 1
        alone = preset_topology(("rollout",), nnodes=nodes, n_gpus_per_node=devices, device_type=None)
        config = config.model_copy(update={"topology": alone})
    return place(config, ("rollout",))


def prepare(config: RunConfig, rollout: ModelPlacement, stage: Stage) -> PreparedEval:
    """Check and load everything before a process is started.

    Raises:
        ConfigError: names the field, file or line.
    """
    check_reward_function(config)
    with stage("reading prompts"):
        rows = rows_of(config)
    if not rows.val:
        raise ConfigError("data.val_files: there are no validation prompts to evaluate on")
    check_judged(config, rows.val)
    folder = served_folder(config, rows, rollout.device_type, stage)
    with stage("tokenising prompts"):
        tokenizer = load_tokenizer(folder)
        model = prepared_model(config, folder, tokenizer, partial(earlier_date, config))
        prompts = encode(model.config, rows.val, tokenizer)
    groups = rollout_group(model, rollout), reward_group(model, None, rollout.device_type)
    return PreparedEval(model=model, prompts=prompts, groups=groups)


def rows_of(config: RunConfig) -> Rows:
    """The questions; those to train on matter to the built-in model only, which is warm-started on them."""
    files = config.data.val_files
    if not files:
        return load_rows(config)
    questions = read_rows(files, field="data.val_files")
    return Rows(train=questions, val=questions)


def answer(
    config: RunConfig, prepared: PreparedEval, placement: Placement, folder: Path, console: RunConsole
) -> list[ValidationSample]:
    """Start the workers, have every question answered and judged, close everything."""
    limits = config.trainer.timeouts
    with start_runtime(config, placement, folder, config.runtime.env_vars, console) as runtime:
        failure = runtime.watch_failures([spec.name for spec in prepared.groups])
        with console.stage("starting workers"):
            starts = [partial(start_group, runtime, spec, limits.start) for spec in prepared.groups]
            rollout, reward = start_groups(starts, failure, limits.start)
        batch_size = config.data.val_batch_size or len(prepared.prompts)
        with console.stage("answering and scoring"):
            answers = validate(
                Samplers(rollout=RolloutHandle(rollout), reward=RewardHandle(reward)),
                (as_batch(columns) for columns in prepared.prompts.batches(batch_size)),
                validation_passes(config.actor_rollout_ref.rollout.val_kwargs),
                step=0,
                timeout=limits.validation,
                clock=PhaseClock(),
            )
            _, samples = asyncio.run(
                beside(answers, {"the watch over processes": no_process_failure(failure)})
            )
        with console.stage("closing"):
            runtime.close()
    return samples


def metrics_of(samples: Sequence[ValidationSample]) -> dict[str, float]:
    """`{data source}/{pass}/{metric}`: the pass is `greedy` or `sampled`, metrics as of `answer_metrics`."""
    groups: dict[str, dict[str, list[Answer]]] = {}
    for sample in samples:
        way = "greedy" if sample.label == "greedy" else "sampled"
        by_question = groups.setdefault(f"{sample.data_source}/{way}", {})
        by_question.setdefault(sample.uid, []).append(Answer(vote=sample.vote, accuracy=sample.accuracy))
    return {
        f"{name}/{metric}": value
        for name, by_question in sorted(groups.items())
        for metric, value in answer_metrics(by_question).items()
    }


def without_majority(metrics: Mapping[str, float]) -> list[str]:
    """`{data source}/{pass}` that have `pass@k`, of several answers a question, and no `maj@n`."""
    several = {name.rpartition("/")[0] for name in metrics if "/pass@" in name}
    return sorted(several - {name.rpartition("/")[0] for name in metrics if "/maj@" in name})


def table_of(metrics: dict[str, float]) -> Table:
    table = Table(title="accuracy", title_justify="left")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.3f}")
    return table
