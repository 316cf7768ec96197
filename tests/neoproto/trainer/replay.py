"""Prompts and answers for the tests of the queue, the buffer and the dispatcher; R = 3 response tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from neoproto.data import DataProto
from neoproto.trainer.prompt_queue import PromptQueue, PromptTicket
from neoproto.weights import WeightVersion

R = 3


def version(n: int, epoch: int = 0) -> WeightVersion:
    return WeightVersion(epoch=epoch, n=n)


def prompts(count: int, first: int = 0) -> DataProto:
    """Prompts with the uids `p{first}`, …; their one tensor column holds the number."""
    numbers = range(first, first + count)
    return DataProto.from_dict(
        tensors={"prompts": torch.tensor(list(numbers))[:, None]},
        non_tensors={"uid": np.array([f"p{number}" for number in numbers], dtype=object)},
        meta_info={"step": first},
    )


def answers(uids: Sequence[str], versions: Iterable[Sequence[int]]) -> DataProto:
    """One row a uid, generated on these versions, token by token; -1 is appended up to R."""
    rows = [[*row, *[-1] * (R - len(row))] for row in versions]
    return DataProto.from_dict(
        tensors={
            "weight_versions": torch.tensor(rows),
            "responses": torch.arange(len(rows) * R).reshape(-1, R),
        },
        non_tensors={"uid": np.array(uids, dtype=object)},
    )


def answers_of(tickets: Sequence[PromptTicket], *, n: int, served: int) -> DataProto:
    """n rows a ticket, wholly generated on one version."""
    uids = [ticket.uid for ticket in tickets for _ in range(n)]
    return answers(uids, [[served] * 2 for _ in uids])


def always(_: WeightVersion) -> bool:
    return True


def running(queue: PromptQueue, count: int, *, first: int = 0, asks: int = 0) -> list[PromptTicket]:
    """Prompts that were added and claimed."""
    queue.add(prompts(count, first), enqueue_step=1, min_weight_version=version(asks))
    return queue.claim_nowait(count, always)
