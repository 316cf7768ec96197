"""The rollout worker: prompts to sampled answers, one replica of the engine per rank.

    prompts [B, P] ──n requests each, own seeds──> engine ──> generations ──> columns [B·n, P+R]

What a sample contains depends on its prompt's uid, its index and the weight version, not on which replica
generates it, nor on what else is generated at the time. (Log-probs may differ in their last bit between
batches of different composition: matrix products of other shapes round differently.)

Shapes: B = prompts of this rank, n = samples a prompt, P, R = fixed widths of prompts and responses.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.dispatch import SPREAD
from actors.rollout.engine import RolloutEngine
from actors.rollout.engine_thread import build_engine
from actors.rollout.options import RolloutOptions
from actors.weight_registry import Group, GroupRegistry
from neoproto.data import DataProto
from neoproto.data.generation import GenerateRequest, Generation, SamplingParams, request_seed
from neoproto.errors import RolloutError
from neoproto.runtime import Dispatch, Worker, register
from neoproto.store import ObjectStore, active_store
from neoproto.weights import Puller, UpdateAgent, WeightRegistry, WeightVersion
from neoproto.weights.transports import make_transport

_VALIDATION_SEED_VERSION = -1
"""Seeds of validation do not depend on the weights: a question gets the same random numbers each time, so
that two validations differ by what was learnt and not by chance."""


class RolloutWorker(Worker):
    """One replica. Calls overlap: requests of several callers run in one batch.

    Args:
        options: see there.
        engine: generates, on the weights of the model folder (version 0) until others are loaded; by default
            that of the options.
    """

    def __init__(self, options: RolloutOptions, engine: RolloutEngine | None = None) -> None:
        self._options = options
        self._engine = build_engine(options.engine) if engine is None else engine
        self._agent: UpdateAgent | None = None
        self._tokens = self._samples = 0  # counted on the worker's event loop alone, so without a lock
        self._seconds = 0.0

    @register(dispatch_mode=SPREAD)
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample answers to a batch of prompts.

        Args:
            prompts: `prompts` int64 [B, P], left-padded, and `prompt_len` int64 [B] (without it, leading
                padding tokens are padding); `uid` and any other non-tensor columns. Its meta_info may hold
                `validate` (bool), and then `greedy` (bool) and `n` (int), which replace the options' own.

        Returns:
            B·n rows, the samples of a prompt next to each other, with the columns of `make_columns`, and the
            non-tensor columns and meta_info of `prompts`.

        Raises:
            RolloutError: the engine has failed, or broke its contract.
        """
        start = time.perf_counter()
        meta = prompts.meta_info
        n, sampling = self._drawing(meta)
        columns: dict[str, Any] = prompts.materialize(
            [key for key in prompts.batch if key in ("prompts", "prompt_len")]
        )
        others = prompts.materialize(list(prompts.non_tensor_batch))
        # Seeds are those of the weights that the answers begin on; nothing is awaited from here to there.
        await self._engine.wait_open()
        version = _VALIDATION_SEED_VERSION if meta.get("validate") else self._engine.version.n
        requests = make_requests(
            unpadded(columns["prompts"], columns.get("prompt_len"), self._options.pad_token_id),
            [str(uid) for uid in others["uid"]],
            n=n,
            sampling=sampling,
            run_seed=self._options.engine.rollout.seed,
            weight_version=version,
        )
        generations = await self._engine.generate(requests)
        check_answers(requests, generations)
        self._samples += len(generations)
        self._tokens += sum(len(generation.token_ids) for generation in generations)
        self._seconds += time.perf_counter() - start
        return DataProto.from_dict(
            tensors=make_columns(
                generations,
                prompt_width=self._options.max_prompt_length,
                response_width=self._options.max_response_length,
                pad_token_id=self._options.pad_token_id,
            ),
            non_tensors={key: np.repeat(values, n, axis=0) for key, values in others.items()},
            meta_info=dict(meta),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def attach_registry(self, registry: Group, replica: str | None = None) -> None:
        """Take weights from the registry of this worker group.

        Args:
            replica: what to report as; `{group name}/{rank}` by default.

        Raises:
            RolloutError: there is one already, or no object store to read weights from.
        """
        replica = f"{self.group_name}/{self.rank}" if replica is None else replica
        self.attach(GroupRegistry(registry), _store(), replica)

    def attach(self, registry: WeightRegistry, store: ObjectStore, replica: str) -> None:
        """Take weights from this registry from now on; see `attach_registry`."""
        if self._agent is not None:
            raise RolloutError(f"replica {replica} has a weight registry already")
        transport = make_transport(store, self._options.transport)
        puller = Puller(store, registry, replica, self._options.lease_ttl, transport=transport)
        self._agent = UpdateAgent(registry, puller, self._engine, self._options.updates, replica=replica)

    @property
    def agent(self) -> UpdateAgent:
        """What brings this replica new weights.

        Raises:
            RolloutError: no registry was attached.
        """
        if self._agent is None:
            raise RolloutError("no weight registry was attached to this replica (attach_registry)")
        return self._agent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def run_agent(self) -> None:
        """Keep this replica's weights up to date, by its own `UpdateOptions`, until the call is cancelled.

        Raises:
            NeoProtoError: it cannot any more, see `UpdateAgent.run`.
        """
        await self.agent.run()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def update_weights(self, version: WeightVersion) -> None:
        """Serve `version` or a newer one; it is served when this returns. What is loaded is the newest.

        Raises:
            WeightsNotReady (a ValueError): it is not published.
            WeightMismatch: its names, shapes or dtypes are not the model's; the old weights are served on.
            RolloutError: loading failed half-way; this replica generates nothing any more.
        """
        await self.agent.load(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def ping(self) -> None:
        """Answer at once, whatever the engine's thread does: a heartbeat."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def stats(self) -> dict[str, float]:
        """Metrics since the start.

        Returns:
            `samples`, generated `tokens`, `seconds` summed over calls; `weight_version`, its number;
            `pause_seconds`, `load_seconds`: how long generation stood still, and what of it was loading, each
            also as `last_…`; with a registry also `weight_loads`, `torn_reads`, `pull_seconds` (read while
            generating) and `update_seconds` (from where new requests began to wait), the last two also as
            `last_…`.
        """
        times = self._engine.times
        metrics = {
            "samples": float(self._samples),
            "tokens": float(self._tokens),
            "seconds": self._seconds,
            "weight_version": float(self._engine.version.n),
            "pause_seconds": times.paused,
            "last_pause_seconds": times.last_paused,
            "load_seconds": times.loading,
            "last_load_seconds": times.last_loading,
        }
        if self._agent is not None:
            done = self._agent.stats
            metrics |= {
                "weight_loads": float(done.loads),
                "torn_reads": float(done.torn_reads),
                "pull_seconds": done.pull_seconds,
                "last_pull_seconds": done.last_pull,
                "update_seconds": done.update_seconds,
                "last_update_seconds": done.last_update,
            }
        return metrics

    def _drawing(self, meta: Mapping[str, Any]) -> tuple[int, SamplingParams]:
        options = self._options
        if not meta.get("validate"):
            return options.engine.rollout.n, options.sampling
        greedy = bool(meta.get("greedy", options.val_sampling.greedy))
        n = int(meta.get("n", options.engine.rollout.val_kwargs.n))
        return n, dataclasses.replace(options.val_sampling, greedy=greedy)


def _store() -> ObjectStore:
    store = active_store()
    if store is None:
        raise RolloutError("no object store is active in the rollout process, weights cannot be pulled")
    return store


def unpadded(prompts: Tensor, lengths: Tensor | None, pad_token_id: int) -> list[tuple[int, ...]]:
    """Token ids of left-padded prompts [B, P]; without lengths, leading padding tokens are padding."""
    if lengths is None:
        lengths = prompts.shape[1] - (prompts == pad_token_id).long().cumprod(dim=1).sum(dim=1)
    width = prompts.shape[1]
    return [
        tuple(row[width - length :]) for row, length in zip(prompts.tolist(), lengths.tolist(), strict=True)
    ]


def make_requests(
    prompts: Sequence[tuple[int, ...]],
    uids: Sequence[str],
    *,
    n: int,
    sampling: SamplingParams,
    run_seed: int,
    weight_version: int,
) -> list[GenerateRequest]:
    """n requests a prompt, prompt by prompt, each with the seed of its uid, index and weight version."""
    return [
        GenerateRequest(
            uid=uid,
            sample_index=index,
            prompt_ids=prompt,
            sampling=sampling,
            seed=request_seed(run_seed, uid, index, weight_version),
        )
        for prompt, uid in zip(prompts, uids, strict=True)
        for index in range(n)
    ]


def check_answers(requests: Sequence[GenerateRequest], generations: Sequence[Generation]) -> None:
    """Refuse answers that are not those to the requests.

    Raises:
        RolloutError: another number or order, no token, more tokens than asked for, a log-prob that is no
            log-prob.
    """
    if len(requests) != len(generations):
        raise RolloutError(f"{len(requests)} requests got {len(generations)} answers")
    for request, answer in zip(requests, generations, strict=True):
        where = f"sample {request.uid}/{request.sample_index}"
        if (answer.uid, answer.sample_index) != (request.uid, request.sample_index):
            raise RolloutError(f"{where} got the answer of {answer.uid}/{answer.sample_index}")
        if not 1 <= len(answer.token_ids) <= request.sampling.max_tokens:
            raise RolloutError(
                f"{where} has {len(answer.token_ids)} tokens, asked for were "
                f"1 to {request.sampling.max_tokens}"
            )
        if not all(-float("inf") < value <= 1e-6 for value in answer.log_probs):
            raise RolloutError(f"{where} has log-probs that are not finite and <= 0: {answer.log_probs}")


def make_columns(
    generations: Sequence[Generation], *, prompt_width: int, response_width: int, pad_token_id: int
) -> dict[str, Tensor]:
    """The batch columns of generations, B rows, P = `prompt_width`, R = `response_width`.

    Returns:
        `prompts` [B, P], left-padded; `responses` [B, R], right-padded; `input_ids`, `attention_mask`,
        `position_ids` [B, P+R]; `response_mask` [B, R], 1 where the policy generated the token, the
        end-of-sequence token included; `weight_versions` [B, R], -1 on padding; all int64.
        `rollout_log_probs` float32 [B, R], 0 on padding. `truncated` bool [B]: ended by the length limit.
    """
    rows = len(generations)
    input_ids = np.full((rows, prompt_width + response_width), pad_token_id, dtype=np.int64)
    attention = np.zeros((rows, prompt_width + response_width), dtype=np.int64)
    response_mask = np.zeros((rows, response_width), dtype=np.int64)
    log_probs = np.zeros((rows, response_width), dtype=np.float32)
    versions = np.full((rows, response_width), -1, dtype=np.int64)
    for row, generation in enumerate(generations):
        start, length = prompt_width - len(generation.prompt_ids), len(generation.token_ids)
        input_ids[row, start:prompt_width] = generation.prompt_ids
        input_ids[row, prompt_width : prompt_width + length] = generation.token_ids
        attention[row, start : prompt_width + length] = 1
        response_mask[row, :length] = generation.loss_mask
        log_probs[row, :length] = generation.log_probs
        versions[row, :length] = generation.weight_versions
    columns = {
        "prompts": input_ids[:, :prompt_width].copy(),
        "responses": input_ids[:, prompt_width:].copy(),
        "input_ids": input_ids,
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
        "weight_versions": versions,
        "truncated": np.array(
            [generation.finish_reason == "length" for generation in generations], dtype=bool
        ),
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}
