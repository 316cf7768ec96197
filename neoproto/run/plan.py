"""What a run would do, for `dry_run=true`: placement, memory of each process, the work of one step.

Memory estimates are sums of what is known before a start: weights, gradients, optimizer state, caches, and
the libraries' own share as it was seen. Activations are a rough upper bound of the largest micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from meshes.common.machine import short_tmp
from neoproto.config import RunConfig
from neoproto.data.model_files import MODEL_FIELD, count_parameters, head_dim, read_model_config
from neoproto.errors import ConfigError
from neoproto.rollout.engines import ENGINES
from neoproto.run.console import RunConsole
from neoproto.run.prepare import CRITIC_FIELD, PreparedRun
from neoproto.runtime.placement import ModelPlacement, Placement, placement_table
from neoproto.store.shm import SHM_DIR
from neoproto.store.volume import Spill, default_limit
from neoproto.weights.transports import TRANSPORTS

DRY_RUN_DONE = "dry run: everything was checked, nothing was started"
GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TORCH_BYTES = 0.45 * GIB
"""Resident memory of a process that has only imported torch and transformers, on CPU."""
_COLUMN_BYTES = 96
"""All columns of a batch for one token: a dozen, of 8 bytes at most."""
_ADAM_COPIES = 4
"""float32 weights, gradients and AdamW's two moments."""
_KEPT_HIDDEN, _KEPT_INTERMEDIATE = 12, 4
"""Numbers kept for the backward pass for each token and layer, about: so many for each unit of the residual
stream, and for each of the feed-forward layers."""
_KEPT_LOGITS = 5.0
"""Arrays of the logits' size at once: log-probs, gradients, and what the temperature and entropy need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What memory depends on.

    Attributes:
        parameters: numbers in the weight files; tied ones once.
        hidden, intermediate, layers, vocabulary: of the transformer.
        kv_numbers: numbers that one token takes in the key/value cache.
    """

    parameters: int
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    kv_numbers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """One row of the table: bytes of each process of a group."""

    group: str
    processes: int
    weights: float
    training: float
    cache: float
    activations: float
    libraries: float

    @property
    def total(self) -> float:
        return self.weights + self.training + self.cache + self.activations + self.libraries


def show_plan(prepared: PreparedRun, placement: Placement, console: RunConsole) -> None:
    """Print everything that `dry_run=true` promises."""
    config = prepared.config
    console.table(placement_table(placement))
    rows = memory_rows(prepared, placement)
    console.table(memory_table(rows))
    total = sum(row.total * row.processes for row in rows)
    store = store_bytes(config, model_sizes(prepared.model_dir, field=MODEL_FIELD))
    console.say(
        f"together {total / GIB:.1f} GiB in processes, and {store / GIB:.2f} GiB of shared memory for "
        f"{config.weights.num_slots} weight versions"
    )
    for line in step_lines(prepared, placement):
        console.say(line)
    console.say(DRY_RUN_DONE)


def memory_rows(prepared: PreparedRun, placement: Placement) -> list[ProcessMemory]:
    """One row a group, in the order of placement."""
    config, policy = prepared.config, prepared.config.actor_rollout_ref
    critic_field = MODEL_FIELD if prepared.critic_dir == prepared.model_dir else CRITIC_FIELD
    sizes = model_sizes(prepared.model_dir, field=MODEL_FIELD)
    critic_sizes = model_sizes(prepared.critic_dir, field=critic_field)
    tokens = config.data.max_prompt_length + config.data.max_response_length
    rows = []
    for model in placement.models:
        if model.worker == "actor":
            micro = policy.actor.ppo_micro_batch_size_per_gpu
            logits = _KEPT_LOGITS * micro * config.data.max_response_length * sizes.vocabulary * 4
            rows.append(_trained(model, sizes, micro * tokens, logits))
        elif model.worker == "critic":
            micro = config.critic.ppo_micro_batch_size_per_gpu
            rows.append(_trained(model, critic_sizes, micro * tokens, 0.0))
        elif model.worker == "reference":
            micro = policy.ref.log_prob_micro_batch_size_per_gpu
            logits = 2.0 * micro * config.data.max_response_length * sizes.vocabulary * 4
            rows.append(_row(model, weights=4.0 * sizes.parameters / model.world_size, activations=logits))
        elif model.worker == "rollout":
            bytes_each = DTYPE_BYTES[policy.rollout.dtype]
            rows.append(
                _row(
                    model,
                    weights=sizes.parameters * bytes_each,
                    cache=_cache_bytes(config, sizes.kv_numbers * bytes_each),
                    libraries=ENGINES[policy.rollout.name].library_bytes,
                )
            )
    return rows


def _cache_bytes(config: RunConfig, token_bytes: float) -> float:
    """What a replica's key/value cache takes: the configured size, else room for full sequences."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.kv_cache_gib is not None and "kv_cache_gib" in ENGINES[rollout.name].options:
        return rollout.kv_cache_gib * GIB
    return rollout.max_num_seqs * config.max_model_len * token_bytes


def _trained(model: ModelPlacement, sizes: ModelSizes, tokens: float, logits: float) -> ProcessMemory:
    weights = 4.0 * sizes.parameters / model.world_size
    kept = _KEPT_HIDDEN * sizes.hidden + _KEPT_INTERMEDIATE * sizes.intermediate
    activations = 4.0 * tokens * sizes.layers * kept + logits
    return _row(model, weights=weights, training=(_ADAM_COPIES - 1) * weights, activations=activations)


def _row(
    model: ModelPlacement,
    *,
    weights: float,
    training: float = 0.0,
    cache: float = 0.0,
    activations: float = 0.0,
    libraries: float = TORCH_BYTES,
) -> ProcessMemory:
    return ProcessMemory(
        group=model.name,
        processes=model.world_size,
        weights=weights,
        training=training,
        cache=cache,
        activations=activations,
        libraries=libraries,
    )


def memory_table(rows: list[ProcessMemory]) -> Table:
    """GiB by process."""
    table = Table(title="Memory of each process, GiB (estimated)")
    table.add_column("group")
    for name in (
        "processes",
        "weights",
        "gradients, optimizer",
        "kv cache",
        "activations ≤",
        "libraries",
        "sum",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        parts = (row.weights, row.training, row.cache, row.activations, row.libraries, row.total)
        table.add_row(row.group, str(row.processes), *(f"{part / GIB:.2f}" for part in parts))
    return table


def store_bytes(config: RunConfig, sizes: ModelSizes) -> float:
    """Shared memory that the published versions take; none where they stay in their publisher's memory."""
    if not TRANSPORTS[config.weights.transport].in_store:
        return 0.0
    return float(config.weights.num_slots * sizes.parameters * DTYPE_BYTES[config.rollout_dtype])


def check_shared_memory(config: RunConfig, model_dir: Path, console: RunConsole) -> None:
    """Compare what the store will hold with what this machine has for it; one line if that is not enough.

    Raises:
        ConfigError: it does not fit into /dev/shm and the temporary files together.
    """
    sizes = model_sizes(model_dir, field=MODEL_FIELD)
    need = store_bytes(config, sizes) + batch_bytes(config)
    try:
        room = default_limit()
    except OSError:  # no shared memory: everything goes by message
        return
    if need <= room:
        return
    folder = short_tmp()
    files = Spill.into(folder).limit_bytes
    remedy = f"make {SHM_DIR} larger (in a container: --shm-size={math.ceil(2 * need / GIB)}g)"
    has = f"the store needs about {_mib(need)}, {SHM_DIR} has room for {_mib(room)}"
    if need > room + files:
        raise ConfigError(f"{SHM_DIR}: {has} and {folder} for {_mib(files)}; {remedy}")
    console.say(f"{has}: the rest goes to files in {folder}, which is slower; {remedy}")


def batch_bytes(config: RunConfig) -> float:
    """About what the store holds of batches: those of a step, and in asynchronous modes of the next one."""
    tokens = config.data.max_prompt_length + config.data.max_response_length
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return float(_COLUMN_BYTES * rows * tokens * (2 if config.is_async else 1))


def _mib(nbytes: float) -> str:
    return f"{math.ceil(nbytes / (1 << 20)):,} MiB"


def step_lines(prepared: PreparedRun, placement: Placement) -> list[str]:
    """The work of one step, in words."""
    config, policy = prepared.config, prepared.config.actor_rollout_ref
    prompts, n = config.data.train_batch_size, policy.rollout.n
    ranks = {model.worker: model.world_size for model in placement.models}
    updates = -(-prompts // policy.actor.ppo_mini_batch_size) * policy.actor.ppo_epochs
    lines = [
        f"mode {config.trainer.mode}: {prepared.total_steps} steps of {prompts} prompts x {n} samples",
        f"  generate {prompts * n} samples of up to {config.data.max_response_length} tokens on "
        f"{ranks['rollout']} replica(s), {policy.rollout.max_num_seqs} at a time on each",
        f"  score; {_log_probs_of(config)}"
        f"{'values; ' if config.uses_critic else ''}advantages ({config.algorithm.adv_estimator})",
        f"  update the policy {updates} time(s) on {ranks['actor']} rank(s)"
        + (f", the critic on {ranks['critic']} rank(s)" if config.uses_critic else ""),
        f"  publish weights as {config.rollout_dtype}"
        + ("; replicas pull them when they choose" if config.trainer.mode == "decoupled_async" else ""),
    ]
    if prepared.validation is not None:
        every = config.trainer.test_freq
        first = "before training, " if config.trainer.val_before_train else ""
        when = f"{first}every {every} steps and at the end" if every > 0 else f"{first}at the end"
        lines.append(f"  validate on {len(prepared.validation)} prompts {when}")
    return lines


def _log_probs_of(config: RunConfig) -> str:
    """Whose log-probs are computed; with `bypass_mode` the policy's are rollout's own."""
    whose = [] if config.algorithm.rollout_correction.bypass_mode else ["the policy"]
    whose += ["the reference"] if config.uses_reference else []
    return f"log-probs of {' and of '.join(whose)}; " if whose else ""


def model_sizes(folder: Path, *, field: str) -> ModelSizes:
    """Read a model folder's `config.json` and the headers of its weight files.

    Args:
        field: the configuration key the folder comes from, for messages.

    Raises:
        ConfigError: there is no such configuration, a size in it is none, or a weight file is damaged.
    """
    config = read_model_config(folder, field=field)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or 0
    layers, hidden = config.get("num_hidden_layers") or 0, config.get("hidden_size") or 0
    intermediate = config.get("intermediate_size") or 4 * hidden
    vocabulary = config.get("vocab_size") or 0
    kv_numbers = 2 * layers * heads * (head_dim(config) or 0)
    return ModelSizes(
        parameters=count_parameters(folder, field=field),
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        vocabulary=vocabulary,
        kv_numbers=kv_numbers,
    )
