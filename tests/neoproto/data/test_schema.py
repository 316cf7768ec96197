"""Who reads which column: the table against the lists that readers use."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.reward.worker import RewardWorker
from actors.training.critic import Critic
from actors.training.padded_batch import MODEL_COLUMNS
from actors.training.policy import Policy
from neoproto.data.schema import COLUMNS, columns_read_by
from neoproto.trainer.metrics.samples import COLUMNS as SAMPLE_COLUMNS
from neoproto.trainer.step import OPTIONAL_COLUMNS, READ_COLUMNS
from neoproto.trainer.validation import collect_samples


def update_columns(model: type[Policy] | type[Critic], **options: Any) -> set[str]:
    return set(model.update_columns.fget(SimpleNamespace(_options=SimpleNamespace(**options))))  # type: ignore[attr-defined]


def test_names_are_there_once() -> None:
    names = [column.name for column in COLUMNS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("reader", "columns"),
    [
        ("controller", {*READ_COLUMNS, *OPTIONAL_COLUMNS, "weight_versions"}),  # the last: replay_buffer.py
        ("actor", update_columns(Policy, actor=SimpleNamespace(use_kl_loss=True), use_rollout_is=True)),
        ("critic", update_columns(Critic)),
        ("reference", set(MODEL_COLUMNS)),
        ("samples", set(SAMPLE_COLUMNS)),
    ],
)
def test_readers_read_what_the_table_lists(reader: Any, columns: set[str]) -> None:
    assert columns_read_by(reader) == columns


class Read(Exception):
    """Carries the names that were asked of a batch."""


class EveryColumn:
    """A batch that has every column; reading ends the reader."""

    def __contains__(self, name: str) -> bool:
        return True

    def materialize(self, names: list[str]) -> None:
        raise Read(set(names))


def test_validation_and_reward_read_what_the_table_lists() -> None:
    batch: Any = EveryColumn()
    with pytest.raises(Read) as validation:
        collect_samples(batch, 0, "greedy")
    assert validation.value.args[0] == columns_read_by("validation")
    worker: Any = SimpleNamespace()
    with pytest.raises(Read) as reward:
        asyncio.run(RewardWorker.compute_score(worker, batch))
    assert reward.value.args[0] == columns_read_by("reward")
