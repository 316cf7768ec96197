"""The reward worker: responses to scores.

    responses [B, R] ──decode──> texts ──judge each──> token_level_scores [B, R], acc [B]

Asynchronous reward functions overlap, up to `max_concurrency`; plain ones run in that many threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from actors.math_judge import MathJudge
from actors.reward_function import error_place, is_async, load_reward_function, to_score
from actors.rewards import AUTO, Score, choose_built_in, exact_match, last_number, reasoning_gym_score
from actors.spread import SPREAD
from neoproto.data import DataProto
from neoproto.data.prompts import load_tokenizer
from neoproto.errors import RewardError
from neoproto.runtime import Dispatch, Worker, register

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardOptions:
    """How answers are judged.

    Attributes:
        tokenizer: folder whose tokenizer decodes responses.
        eos_token_ids: tokens that end an answer; one at its end is no part of the text.
        name: a built-in reward, or "auto": by each row's `reward_model.style`.
        custom_path, custom_name: file and name of a reward function that is used instead.
        timeout_s: limit for one sample. A plain function that exceeds it cannot be stopped: its thread is
            left behind, the call fails.
        max_concurrency: samples judged at the same time.
    """

    tokenizer: str
    eos_token_ids: tuple[int, ...] = ()
    name: str = AUTO
    custom_path: str | None = None
    custom_name: str = "compute_score"
    timeout_s: float = 30.0
    max_concurrency: int = 32


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


class Judge:
    """Scores samples with the built-ins or the user's function; nothing of the runtime.

    Raises:
        ConfigError: the user's function cannot be loaded.
    """

    def __init__(self, options: RewardOptions) -> None:
        self._options = options
        self._math = MathJudge()
        self._custom: Callable[..., Any] | None = None
        if options.custom_path is not None:
            self._custom = load_reward_function(options.custom_path, options.custom_name)

    @property
    def timeouts(self) -> int:
        """Answers that `math-verify` took too long over; they count as wrong."""
        return self._math.timeouts

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores in the order of the samples.

        Raises:
            RewardError: a judge raised, took too long, or returned no score; names the sample. The others are
                cancelled.
        """
        permits = asyncio.Semaphore(self._options.max_concurrency)

        async def one(sample: Sample) -> Score:
            async with permits:
                return await self._score_one(sample)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(sample)) for sample in samples]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def close(self) -> None:
        self._math.close()

    async def _score_one(self, sample: Sample) -> Score:
        limit = self._options.timeout_s
        clock = asyncio.timeout(limit)
        try:
            if self._custom is None:
                return await self._built_in(sample, clock)
            async with clock:
                returned = await self._call_custom(self._custom, sample)
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise self._blame(sample, f"raised {self._place(error)}") from error  # nobody asked it to stop
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # a judge's exit must not end the worker
            if isinstance(error, TimeoutError) and clock.expired():
                raise self._blame(sample, f"took longer than reward.timeout_s={limit:g}") from error
            raise self._blame(sample, f"raised {self._place(error)}") from error
        try:
            return to_score(returned)
        except ValueError as error:
            raise self._blame(sample, str(error)) from error

    async def _call_custom(self, function: Callable[..., Any], sample: Sample) -> Any:
        arguments = {
            "data_source": sample.data_source,
            "solution_str": sample.solution,
            "ground_truth": sample.ground_truth,
            "extra_info": dict(sample.extra_info),
        }
        if is_async(function):
            return await function(**arguments)
        returned = await in_thread(lambda: function(**arguments))
        return await returned if inspect.isawaitable(returned) else returned

    async def _built_in(self, sample: Sample, clock: asyncio.Timeout) -> Score:
        chosen = choose_built_in(self._options.name, sample.style, sample.data_source)
        if chosen == "exact_match":
            return exact_match(sample.solution, sample.ground_truth)
        if chosen == "last_number":
            return last_number(sample.solution, sample.ground_truth)
        if chosen == "math_verify":  # has a clock of its own, which does not run while it waits for its turn
            right = await in_thread(lambda: self._math.score(sample.solution, sample.ground_truth))
            return Score(score=right, acc=right)
        async with clock:
            return await in_thread(
                lambda: reasoning_gym_score(
                    sample.solution, sample.ground_truth, sample.data_source, sample.extra_info
                )
            )

    def _place(self, error: BaseException) -> str:
        return error_place(error, Path(self._options.custom_path or "").expanduser().resolve())

    def _blame(self, sample: Sample, what: str) -> RewardError:
        options = self._options
        judge = (
            f"{options.custom_name} of {options.custom_path}" if self._custom else f"reward {options.name}"
        )
        step = "" if sample.step is None else f", step {sample.step}"
        return RewardError(f"{judge}: sample {sample.uid} (data source {sample.data_source}{step}): {what}")


async def in_thread(function: Callable[[], T]) -> T:
    """Run in a thread of its own, with this context's variables; cancelling stops the wait, not the thread.

    The thread is a daemon: a function that never returns does not keep the process from ending.
    """
    # The error travels as a value: futures replace some exceptions by others, without their traceback.
    outcome: Future[tuple[T | None, BaseException | None]] = Future()
    outcome.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.set_result((context.run(function), None))
        except BaseException as error:  # noqa: BLE001 — handed to the caller, whole
            outcome.set_result((None, error))

    threading.Thread(target=run, name="reward", daemon=True).start()
    value, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return cast("T", value)


class RewardWorker(Worker):
    """Decodes and judges its share of a batch."""

    def __init__(self, options: RewardOptions) -> None:
        self._tokenizer = load_tokenizer(options.tokenizer)
        self._judge = Judge(options)
        self._samples, self._seconds = 0, 0.0
        self._custom = options.custom_path is not None
        self._eos_token_ids = options.eos_token_ids

    @register(dispatch_mode=SPREAD)
    async def compute_score(self, batch: DataProto) -> DataProto:
        """Judge every row.

        Args:
            batch: `responses`, `attention_mask`; `uid`, `data_source`, `reward_model`, `extra_info`. Its
                meta_info may hold `step`, and `keep_text` (bool).

        Returns:
            `token_level_scores` float32 [B, R], the score on the last response token and 0 elsewhere; `acc`
            float64 [B]; with `keep_text`, `response_text`; with a custom reward function,
            `reward_extra_info`: a dictionary a row, what it returned beside `score` and `acc`.

        Raises:
            RewardError: a sample could not be judged; named by its uid, data source and step.
        """
        start = time.perf_counter()
        columns: dict[str, Any] = batch.materialize(
            ["responses", "attention_mask", "uid", "data_source", "reward_model", "extra_info"]
        )
        responses = columns["responses"]
        lengths = columns["attention_mask"][:, -responses.shape[1] :].sum(dim=1)
        texts = decode(self._tokenizer, responses, lengths, self._eos_token_ids)
        scores = await self._judge.score(make_samples(columns, texts, batch.meta_info.get("step")))
        others: dict[str, Any] = {"acc": np.array([score.acc for score in scores], dtype=np.float64)}
        if batch.meta_info.get("keep_text"):
            others["response_text"] = texts
        if self._custom:
            others["reward_extra_info"] = [dict(score.extra) for score in scores]
        self._samples += len(scores)
        self._seconds += time.perf_counter() - start
        placed = place_scores([score.score for score in scores], lengths, responses.shape[1])
        return DataProto.from_dict(tensors={"token_level_scores": placed}, non_tensors=others)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def stats(self) -> dict[str, float]:
        """Since the start: `samples`, `seconds` summed over calls, `timeouts` (see `Judge.timeouts`)."""
        return {
            "samples": float(self._samples),
            "seconds": self._seconds,
            "timeouts": float(self._judge.timeouts),
        }


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
