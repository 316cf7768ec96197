"""Worker groups inside the test's process, and a small world of prompts and answers for them.

Arguments and results are pickled as they would be on their way to another process: a fake cannot change the
caller's batch, nor see more of it than what travels.

Shapes: 2 prompts x n samples, P = 3, R = 2.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from neoproto.data import DataProto
from neoproto.trainer.protocols import Workers
from neoproto.weights import WeightVersion

PROMPTS, P, R = 2, 3, 2
GENERATED = {
    "prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask",
    "rollout_log_probs", "weight_versions", "truncated", "uid", "data_source", "reward_model",
    "extra_info", "raw_prompt",
}  # fmt: skip


@dataclass
class Call:
    """One call as a group saw it: `columns` and `meta` are those of a batch among the arguments."""

    group: str
    method: str
    timeout: float | None
    args: tuple[Any, ...]
    columns: frozenset[str] = frozenset()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def read(self, name: str) -> Any:
        """A column as it was at the time of the call; only in tests that keep their objects."""
        return self.args[0].materialize([name])[name]


class Answer:
    """A call under way. Whoever waits may be cancelled before it begins; a coroutine would complain then."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._make = make

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._make().__await__()


class FakeHandle:
    """Has every method of a fake group, by name, as a handle has those of a worker class."""

    def __init__(self, group: Any, timeout: float | None = None) -> None:
        self.group, self._timeout = group, timeout

    def within(self, timeout: float | None) -> FakeHandle:
        return FakeHandle(self.group, timeout)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: self.group.submit(method, args, timeout=self._timeout)


class FakeGroup:
    """A group whose methods are the functions given; each may be plain or async."""

    def __init__(
        self, name: str, calls: list[Call], methods: Mapping[str, Callable[..., Any]], world_size: int = 1
    ) -> None:
        self.name, self.world_size, self.methods = name, world_size, dict(methods)
        self._calls = calls

    def submit(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Awaitable[Any]:
        sent = pickle.loads(pickle.dumps(tuple(args)))
        call = Call(self.name, method, timeout, sent)
        for value in sent:
            if isinstance(value, DataProto):
                call.columns, call.meta = frozenset(value.columns), dict(value.meta_info)
        self._calls.append(call)
        return Answer(lambda: self._answer(self.methods[method], sent))

    @staticmethod
    async def _answer(method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        await asyncio.sleep(0)
        result = method(*args)
        if inspect.isawaitable(result):
            result = await result
        return pickle.loads(pickle.dumps(result))


@dataclass
class World:
    """What the fakes answer; a test changes what it is about.

    Attributes:
        n: samples a prompt.
        lengths: response tokens of each row, 1 … R.
        truncated, scores, bootstrap: by row.
        values: of every token.
        old, ref, rollout: log-prob of every token.
        devices: ranks of rollout and actor.
    """

    n: int = 1
    lengths: Sequence[int] = (2, 1)
    truncated: Sequence[bool] = (False, False)
    scores: Sequence[float] = (1.0, 0.0)
    bootstrap: Sequence[float] = (0.0, 0.0)
    values: float = 0.0
    old: float = -1.0
    ref: float = -1.0
    rollout: float = -1.0
    devices: tuple[int, int] = (1, 1)
    calls: list[Call] = field(default_factory=list)
    published: list[WeightVersion] = field(default_factory=list)
    served: list[WeightVersion] = field(default_factory=list)

    def mask(self) -> torch.Tensor:
        return (torch.arange(R) < torch.tensor(list(self.lengths))[:, None]).long()

    def generate(self, prompts: DataProto) -> DataProto:
        meta = prompts.meta_info
        n = int(meta["n"]) if meta.get("validate") else self.n
        columns = prompts.materialize()
        others = {
            key: np.repeat(value, n, axis=0)
            for key, value in columns.items()
            if isinstance(value, np.ndarray)
        }
        rows = len(prompts) * n
        mask = self.mask() if rows == len(self.lengths) else torch.ones(rows, R, dtype=torch.int64)
        truncated = list(self.truncated) if rows == len(self.truncated) else [False] * rows
        asked = torch.as_tensor(columns["prompts"]).repeat_interleave(n, dim=0)
        attention = torch.cat([torch.ones(rows, P, dtype=torch.int64), mask], dim=1)
        if meta.get("keep_text"):
            way = "greedy" if meta.get("greedy") else "sampled"
            others["response_text"] = np.array([f"{way} é {row}" for row in range(rows)], dtype=object)
        return DataProto.from_dict(
            tensors={
                "prompts": asked,
                "responses": mask * 7,
                "input_ids": torch.cat([asked, mask * 7], dim=1),
                "attention_mask": attention,
                "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
                "response_mask": mask,
                "rollout_log_probs": self.rollout * mask.float(),
                "weight_versions": torch.where(mask.bool(), 0, -1),
                "truncated": torch.tensor(truncated),
            },
            non_tensors=others,
            meta_info=dict(meta),
        )

    def score(self, batch: DataProto) -> DataProto:
        mask = batch.batch["response_mask"]
        rows = len(batch)
        wanted = self.scores if rows == len(self.scores) else [row % 2 for row in range(rows)]
        scores = torch.zeros(mask.shape)
        scores[torch.arange(rows), mask.sum(1) - 1] = torch.tensor([float(score) for score in wanted])
        return DataProto.from_dict(
            tensors={"token_level_scores": scores, "reward_failed": torch.zeros(rows, dtype=torch.int8)},
            non_tensors={"acc": np.array([float(score) for score in wanted], dtype=object)},
        )

    def log_prob(self, batch: DataProto) -> DataProto:
        mask = batch.batch["response_mask"].float()
        return DataProto.from_dict(tensors={"old_log_probs": self.old * mask, "entropys": 0.5 * mask})

    def ref_log_prob(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"ref_log_prob": self.ref * batch.batch["response_mask"].float()})

    def critic_values(self, batch: DataProto) -> DataProto:
        mask = batch.batch["response_mask"].float()
        return DataProto.from_dict(
            tensors={"values": self.values * mask, "bootstrap_values": torch.tensor(list(self.bootstrap))}
        )

    def publish(self, version: WeightVersion) -> None:
        self.published.append(version)

    def load(self, version: WeightVersion) -> None:
        assert version in self.published
        self.served.append(version)

    def workers(self, *, critic: bool = True, reference: bool = False) -> Workers:
        def group(name: str, world_size: int = 1, **methods: Callable[..., Any]) -> Any:
            return FakeHandle(FakeGroup(name, self.calls, methods, world_size))

        return Workers(
            num_devices=max(self.devices),
            rollout=group(
                "rollout", self.devices[0], generate_sequences=self.generate, update_weights=self.load
            ),
            reward=group("reward", compute_score=self.score),
            actor=group(
                "actor",
                self.devices[1],
                compute_log_prob=self.log_prob,
                update_actor=lambda _: {"actor/pg_loss": 0.25},
                publish_weights=self.publish,
            ),
            critic=group(
                "critic",
                compute_values=self.critic_values,
                update_critic=lambda _: {"critic/vf_loss": 0.75},
            )
            if critic
            else None,
            reference=group("reference", compute_ref_log_prob=self.ref_log_prob) if reference else None,
        )

    def called(self, *methods: str) -> list[Call]:
        return [call for call in self.calls if not methods or call.method in methods]

    def order(self) -> list[str]:
        return [call.method for call in self.calls]


def prompt_batch(first: int = 0) -> DataProto:
    """Two prompts with the uids `u{first}` and `u{first + 1}`."""
    names = [f"u{first + row}" for row in range(PROMPTS)]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.arange(PROMPTS * P).reshape(PROMPTS, P) + 1,
            "prompt_len": torch.full((PROMPTS,), P),
        },
        non_tensors={
            "uid": np.array(names, dtype=object),
            "data_source": np.array(["letters", "words"], dtype=object),
            "reward_model": [{"style": "exact_match", "ground_truth": name} for name in names],
            "extra_info": [{} for _ in names],
            "raw_prompt": [[{"role": "user", "content": f"ask {name}"}] for name in names],
        },
    )


class FakePrompts:
    """A `PromptSource` with an endless supply, and `validation` batches of held-out prompts."""

    def __init__(self, validation: int = 0, steps_per_epoch: int = 2) -> None:
        self.steps_per_epoch, self._validation, self._drawn = steps_per_epoch, validation, 0

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = state["drawn"]

    @property
    def has_validation(self) -> bool:
        return self._validation > 0

    def next_batch(self) -> DataProto:
        self._drawn += 1
        return prompt_batch(10 * self._drawn)

    def validation_batches(self) -> Iterator[DataProto]:
        for number in range(self._validation):
            yield prompt_batch(1000 + 10 * number)
