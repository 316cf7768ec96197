"""Encoded prompts as the trainer's source of batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from neoproto.data.prompts import (
    EncodedPrompts,
    PromptLoader,
    encode_prompts,
    load_tokenizer,
    rows_from_dicts,
)
from neoproto.run.prompts import RunPrompts
from neoproto.store import MemoryStore, use_store
from tests.neoproto.run.inputs import words


@pytest.fixture(scope="module")
def encoded(model: Path) -> EncodedPrompts:
    return encode_prompts(rows_from_dicts(words(8), name="words"), load_tokenizer(model), 16)


def source(
    encoded: EncodedPrompts, validation: EncodedPrompts | None = None, size: int | None = None
) -> RunPrompts:
    return RunPrompts(PromptLoader(encoded, 3, shuffle=False), validation, size)


def test_training_batches_go_round(encoded: EncodedPrompts) -> None:
    prompts = source(encoded)
    assert prompts.steps_per_epoch == 2
    uids = [list(prompts.next_batch()["uid"]) for _ in range(3)]
    assert uids[0] == ["words:0", "words:1", "words:2"]
    assert uids[2] == uids[0]


def test_a_batch_has_what_rollout_and_rewards_need(encoded: EncodedPrompts) -> None:
    batch = source(encoded).next_batch()
    assert set(batch.batch) == {"prompts", "prompt_len"}
    assert set(batch.non_tensor_batch) == {"uid", "data_source", "reward_model", "extra_info", "raw_prompt"}
    assert batch["prompts"].shape == (3, 16)
    assert batch["prompt_len"].tolist() == [6, 6, 6]


@pytest.mark.parametrize(("size", "lengths"), [(None, [8]), (3, [3, 3, 2]), (8, [8]), (100, [8])])
def test_validation_goes_through_all_prompts_once_each_time(
    encoded: EncodedPrompts, size: int | None, lengths: list[int]
) -> None:
    prompts = source(encoded, encoded, size)
    assert prompts.has_validation
    for _ in range(2):
        batches = list(prompts.validation_batches())
        assert [len(batch) for batch in batches] == lengths
        assert [uid for batch in batches for uid in batch["uid"]] == [f"words:{index}" for index in range(8)]


def test_without_held_out_prompts_there_are_no_batches(encoded: EncodedPrompts) -> None:
    prompts = source(encoded)
    assert not prompts.has_validation
    assert list(prompts.validation_batches()) == []


def test_batches_live_in_the_runs_store_until_they_are_released(encoded: EncodedPrompts) -> None:
    store = MemoryStore()
    prompts = source(encoded, encoded, 3)
    with use_store(store):
        training = prompts.next_batch()
        validation = next(prompts.validation_batches())
        assert training.refs
        assert validation.refs
        training.release()
        validation.release()
    assert store.keys() == []
    store.close()


def test_validation_batches_are_stored_one_at_a_time(encoded: EncodedPrompts) -> None:
    store = MemoryStore()
    with use_store(store):
        batches = source(encoded, encoded, 3).validation_batches()
        assert store.keys() == []
        next(batches)
        assert len(store.keys()) == 7
    store.close()
