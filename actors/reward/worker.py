"""The reward worker: responses to scores.

    responses [B, R] ──decode──> texts ──judge each──> token_level_scores [B, R], acc [B], reward_failed [B]
                                            │
                                            └── here, or in child processes (`judge_pool`)

An answer that its judge fails on, or takes too long over, scores 0 and is counted: what a policy
happens to write must not end a run.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.dispatch import SPREAD
from actors.reward.builtin import choose_built_in
from actors.reward.function import NotAScore, is_async, load_reward_function, to_score
from actors.reward.judge_pool import CUSTOM, JudgePool, JudgeSpec
from neoproto.config import RewardConfig
from neoproto.data import DataProto
from neoproto.data.prompts import load_tokenizer
from neoproto.errors import ConfigError, RewardError
from neoproto.rewards.builtin import REWARDS
from neoproto.rewards.score import Failure, Question, Score, Verdict
from neoproto.runtime import Dispatch, Worker, register
from neoproto.user_code import end_fork, error_place

log = logging.getLogger("neoproto.reward")

_LONGEST_S = 86_400.0
_ANSWER_S = 2.0
"""What of a call's time is kept back for returning the answer."""

FAILED = {"timeout": 1, "error": 2}
"""Values of the column `reward_failed`; 0 is a score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardOptions:
    """How answers are judged.

    Attributes:
        tokenizer: folder whose tokenizer decodes responses.
        eos_token_ids: tokens that end an answer; one at its end is no part of the text.
        reward: the section `reward`. A reward function's path is absolute: workers run in another folder.
    """

    tokenizer: str
    eos_token_ids: tuple[int, ...] = ()
    reward: RewardConfig = field(default_factory=RewardConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One answer to judge. `step` is the training step, None if unknown."""

    uid: str
    data_source: str
    solution: str
    style: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What came of judging one answer.

    Attributes:
        score: 0 if it has none.
        failure: why it has none, with `kind` "timeout" or "error".
    """

    score: Score
    failure: Failure | None = None


class Judge:
    """Scores samples with the built-ins or the user's function, without the runtime.

    Asynchronous functions overlap in this process. Plain ones, and the built-ins that an answer could keep
    busy, run in child processes.

    Raises:
        ConfigError: the user's function cannot be loaded.
    """

    def __init__(self, options: RewardOptions) -> None:
        self._options, self._custom = options.reward, options.reward.custom_reward_function
        self._pools: dict[str, JudgePool] = {}
        self._function: Callable[..., Any] | None = None
        self.timeouts = self.errors = 0
        if self._custom.path is not None:
            function = load_reward_function(self._custom.path, self._custom.name)
            if is_async(function):
                self._function = function
            else:
                self._pool(CUSTOM)

    async def score(
        self, samples: Sequence[Sample], budget_s: float = math.inf, *, votes: bool = False
    ) -> list[Judged]:
        """Scores in the order of the samples; an answer without a verdict in time has none.

        Args:
            budget_s: seconds for all of them, beside the limit for each.
            votes: scores have their `vote`.

        Raises:
            RewardError: a row cannot be judged, whatever its answer; all answers of a call failed, or more
                than `max_failed_share` of them. Names a sample.
        """
        verdicts: list[Verdict | None] = [None] * len(samples)
        pooled: dict[str, list[int]] = {}
        for place, sample in enumerate(samples):
            kind = self._kind(sample)
            if kind != CUSTOM and REWARDS[kind].instant:
                verdicts[place] = REWARDS[kind].verdict(question_of(sample, votes))
            else:
                pooled.setdefault(kind, []).append(place)

        async def judge_all(kind: str, places: Sequence[int]) -> None:
            chosen = [samples[place] for place in places]
            for place, verdict in zip(places, await self._judge(kind, chosen, budget_s, votes), strict=True):
                verdicts[place] = verdict

        try:
            async with asyncio.TaskGroup() as group:
                for kind, places in pooled.items():
                    group.create_task(judge_all(kind, places))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return self._settle(samples, verdicts)

    def close(self) -> None:
        """End the child processes. Twice is a no-op."""
        for pool in self._pools.values():
            pool.close()

    def _kind(self, sample: Sample) -> str:
        """Who judges it: a built-in, or `CUSTOM`."""
        if self._custom.path is not None:
            return CUSTOM
        try:
            return choose_built_in(self._options.name, sample.style, sample.data_source)
        except ConfigError as error:
            raise self._blame(sample, str(error)) from error

    async def _judge(
        self, kind: str, samples: Sequence[Sample], budget_s: float, votes: bool
    ) -> Sequence[Verdict]:
        if kind == CUSTOM and self._function is not None:
            permits = asyncio.Semaphore(self._options.max_concurrency)
            until = time.monotonic() + budget_s
            calls = [self._call(self._function, sample, permits, until) for sample in samples]
            return await asyncio.gather(*calls)
        questions = [question_of(sample, votes) for sample in samples]
        return await self._pool(kind).judge(questions, min(budget_s, _LONGEST_S))

    async def _call(
        self, function: Callable[..., Any], sample: Sample, permits: asyncio.Semaphore, until: float
    ) -> Verdict:
        """The user's asynchronous function, within its limit."""
        limit = self._options.timeout_s
        try:
            async with permits:
                limit = max(0.0, min(limit, until - time.monotonic()))
                async with asyncio.timeout(limit) as clock:
                    returned = await _answer(function, sample)
            return to_score(returned)
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return Failure(kind="error", text=f"raised {self._place(error)}")  # it was not asked to stop
        except BaseException as error:  # noqa: BLE001 — its exit must not end us
            if isinstance(error, TimeoutError) and clock.expired():
                return Failure(kind="timeout", text=f"took longer than {limit:g} s")
            if isinstance(error, NotAScore):
                return Failure(kind="error", text=str(error))
            return Failure(kind="error", text=f"raised {self._place(error)}")

    def _settle(self, samples: Sequence[Sample], verdicts: Sequence[Verdict | None]) -> list[Judged]:
        """Failures become scores of 0, unless there are too many of them."""
        judged, failed = [], []
        for sample, verdict in zip(samples, verdicts, strict=True):
            if isinstance(verdict, Score):
                judged.append(Judged(score=verdict))
                continue
            assert verdict is not None, "every sample has been judged"
            error = self._blame(sample, verdict.text)
            if verdict.kind == "input":
                raise error
            failed.append(error)
            judged.append(Judged(score=Score(score=0.0, acc=0.0), failure=verdict))
            self.timeouts += verdict.kind == "timeout"
            self.errors += verdict.kind == "error"
        most = max(1.0, self._options.max_failed_share * len(samples))
        if failed and (len(failed) == len(samples) or len(failed) > most):
            raise RewardError(
                f"{len(failed)} of {len(samples)} answers got no score, more than "
                f"reward.max_failed_share={self._options.max_failed_share:g} allows; first: {failed[0]}"
            )
        for error in failed:
            log.warning("scored 0: %s", error)
        return judged

    def _pool(self, kind: str) -> JudgePool:
        if kind not in self._pools:
            options, built_in = self._options, REWARDS.get(kind)
            spec = JudgeSpec(
                kind=kind,
                timeout_s=options.timeout_s if built_in is None else built_in.timeout_s or options.timeout_s,
                path=self._custom.path or "",
                name=self._custom.name,
                memory_bytes=None if built_in is None else built_in.memory_bytes,
            )
            self._pools[kind] = JudgePool(spec, options.num_processes)
        return self._pools[kind]

    def _place(self, error: BaseException) -> str:
        return error_place(error, Path(self._custom.path or "").expanduser().resolve())

    def _blame(self, sample: Sample, what: str) -> RewardError:
        custom = self._custom
        judge = f"reward {self._options.name}" if custom.path is None else f"{custom.name} of {custom.path}"
        step = "" if sample.step is None else f", step {sample.step}"
        return RewardError(f"{judge}: sample {sample.uid} (data source {sample.data_source}{step}): {what}")


class RewardWorker(Worker):
    """Decodes and judges its share of a batch."""

    def __init__(self, options: RewardOptions) -> None:
        self._tokenizer = load_tokenizer(options.tokenizer)
        self._judge = Judge(options)
        self._samples, self._seconds = 0, 0.0
        self._custom = options.reward.custom_reward_function.path is not None
        self._eos_token_ids = options.eos_token_ids

    @register(dispatch_mode=SPREAD)
    async def compute_score(self, batch: DataProto) -> DataProto:
        """Judge every row.

        Args:
            batch: `responses`, `attention_mask`; `uid`, `data_source`, `reward_model`, `extra_info`; maybe
                `response_mask`. Its meta_info may hold `step`, `keep_text` and `validate` (bool).

        Returns:
            `token_level_scores` float32 [B, R], the score on the last response token that the policy wrote
            (the last of all without such a mask) and 0 elsewhere; `acc` float64 [B]; `reward_failed` int8
            [B], 0 or one of `FAILED`; with `keep_text`, `response_text`; with `validate`, `vote` (see
            `Score`, None too for an answer without a score); with a custom reward function,
            `reward_extra_info`: a dictionary a row, what it returned beside `score` and `acc`.

        Raises:
            RewardError: see `Judge.score`.
        """
        start = time.perf_counter()
        names = ["responses", "attention_mask", "uid", "data_source", "reward_model", "extra_info"]
        if "response_mask" in batch:
            names.append("response_mask")
        columns: dict[str, Any] = batch.materialize(names)
        responses = columns["responses"]
        attended = columns["attention_mask"][:, -responses.shape[1] :]
        lengths = attended.sum(dim=1)
        texts = decode(self._tokenizer, responses, lengths, self._eos_token_ids)
        samples = make_samples(columns, texts, batch.meta_info.get("step"))
        validate = bool(batch.meta_info.get("validate"))
        budget_s = max(0.0, self.remaining() - _ANSWER_S)
        judged = await self._judge.score(samples, budget_s, votes=validate)
        scores = [one.score for one in judged]
        others: dict[str, Any] = {"acc": np.array([score.acc for score in scores], dtype=np.float64)}
        if batch.meta_info.get("keep_text"):
            others["response_text"] = texts
        if validate:
            others["vote"] = [score.vote for score in scores]
        if self._custom:
            others["reward_extra_info"] = [dict(score.extra) for score in scores]
        self._samples += len(scores)
        self._seconds += time.perf_counter() - start
        ends = last_generated(columns.get("response_mask", attended), lengths)
        placed = place_scores([score.score for score in scores], ends, responses.shape[1])
        failed = torch.tensor(
            [FAILED[one.failure.kind] if one.failure else 0 for one in judged], dtype=torch.int8
        )
        return DataProto.from_dict(
            tensors={"token_level_scores": placed, "reward_failed": failed}, non_tensors=others
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def stats(self) -> dict[str, float]:
        """Since the start: `samples`, `seconds` summed over calls, answers without a score for `timeouts` or
        `errors` of their judge."""
        return {
            "samples": float(self._samples),
            "seconds": self._seconds,
            "timeouts": float(self._judge.timeouts),
            "errors": float(self._judge.errors),
        }


def question_of(sample: Sample, votes: bool) -> Question:
    """The question to its judge."""
    return Question(
        data_source=sample.data_source,
        solution=sample.solution,
        ground_truth=sample.ground_truth,
        extra_info=dict(sample.extra_info),
        vote=votes,
    )


async def _answer(function: Callable[..., Any], sample: Sample) -> Any:
    """What the user's asynchronous function returns; a process that it forked ends here."""
    pid, raised = os.getpid(), None
    try:
        return await function(
            data_source=sample.data_source,
            solution_str=sample.solution,
            # The samples of a prompt share these objects, and the function may change its own.
            ground_truth=copy.deepcopy(sample.ground_truth),
            extra_info=copy.deepcopy(dict(sample.extra_info)),
        )
    except BaseException as error:
        raised = error
        raise
    finally:
        end_fork(pid, raised)


def decode(
    tokenizer: Any, responses: Tensor, lengths: Tensor, eos_token_ids: Collection[int] = ()
) -> list[str]:
    """Texts of right-padded responses [B, R], without the token that ends them.

    Special tokens inside a response are kept: without them, a wrong answer could look right.
    """
    ids = [row[:length] for row, length in zip(responses.tolist(), lengths.tolist(), strict=True)]
    answers = [row[:-1] if row and row[-1] in eos_token_ids else row for row in ids]
    return [str(tokenizer.decode(answer, skip_special_tokens=False)) for answer in answers]


def make_samples(columns: Mapping[str, Any], texts: Sequence[str], step: int | None) -> list[Sample]:
    """One sample a row."""
    return [
        Sample(
            uid=str(columns["uid"][row]),
            data_source=str(columns["data_source"][row]),
            solution=text,
            style=str(columns["reward_model"][row].get("style")),
            ground_truth=columns["reward_model"][row].get("ground_truth"),
            extra_info=columns["extra_info"][row],
            step=step,
        )
        for row, text in enumerate(texts)
    ]


def last_generated(mask: Tensor, lengths: Tensor) -> Tensor:
    """int64 [B]: tokens up to the last one whose `mask` [B, R] is set, all `lengths` where there is none."""
    ends = torch.arange(1, mask.shape[1] + 1)
    last = torch.where(mask != 0, ends, 0).amax(dim=1)
    return torch.where(last > 0, last, lengths)


def place_scores(scores: Sequence[float], lengths: Tensor, width: int) -> Tensor:
    """float32 [B, R]: each score on the last of its row's `lengths` tokens.

    Raises:
        RewardError: a row without a response token.
    """
    if len(lengths) and int(lengths.min()) < 1:
        raise RewardError(f"row {int(lengths.argmin())} has no response token to put its score on")
    placed = torch.zeros(len(scores), width, dtype=torch.float32)
    placed[torch.arange(len(scores)), lengths - 1] = torch.tensor(scores, dtype=torch.float32)
    return placed
