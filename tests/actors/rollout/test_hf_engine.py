"""The transformers engine: what is asked of vLLM (`engine_cases`) is asked of it, and what is its own."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.rollout.engine_thread import EngineThread, build_engine
from actors.rollout.hf_engine import HfEngine
from neoproto.data.generation import Generation
from neoproto.errors import RolloutError
from tests.actors import engine_cases as cases


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return cases.make_model(tmp_path)


def thread(folder: Path, **changes: Any) -> EngineThread:
    return EngineThread(lambda: HfEngine(cases.engine_options(str(folder), **changes)))


def test_the_worker_takes_the_engine_that_was_chosen(model: Any, tmp_path: Path) -> None:
    engine = build_engine(cases.engine_options(str(tmp_path), name="hf"))
    assert isinstance(engine, EngineThread)
    assert isinstance(engine._engine, HfEngine)
    engine.close()


def run_all(engine: HfEngine, asked: list[Any]) -> list[Generation]:
    """All answers, in the order of the requests."""
    for index, request in enumerate(asked):
        engine.add(str(index), request)
    done: dict[str, Generation] = {}
    while engine.busy:
        done |= dict(engine.step())
    return [done[str(index)] for index in range(len(asked))]


def test_it_samples_as_vllm_does(model: Any, tmp_path: Path) -> None:
    engine = thread(tmp_path)
    try:
        asyncio.run(cases.check_log_probs(engine, model))
        asyncio.run(cases.check_independence(engine))
        asyncio.run(cases.check_cut_distributions(engine, model))
        asyncio.run(cases.check_loading(engine, model))
    finally:
        engine.close()


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_weights_may_change_in_mid_generation(model: Any, tmp_path: Path, mode: str) -> None:
    engine = thread(tmp_path)
    try:
        asyncio.run(cases.check_changing(engine, model, mode, 1))
    finally:
        engine.close()


def test_tied_embeddings_are_loaded_once_or_twice(tmp_path: Path) -> None:
    model = cases.make_model(tmp_path, tied=True)
    engine = thread(tmp_path)
    try:
        asyncio.run(cases.check_tied(engine, model))
    finally:
        engine.close()


def test_a_greedy_answer_is_what_transformers_generates(model: Any, tmp_path: Path) -> None:
    engine = HfEngine(cases.engine_options(str(tmp_path)))
    asked = cases.requests(24, greedy=True)
    for request, made in zip(asked, run_all(engine, asked), strict=True):
        prompt = torch.tensor([request.prompt_ids])
        whole = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert list(made.token_ids) == whole[0, len(request.prompt_ids) :].tolist()


def test_more_requests_than_rows_wait_and_get_the_same_answers(model: Any, tmp_path: Path) -> None:
    asked = cases.requests(40)
    whole = run_all(HfEngine(cases.engine_options(str(tmp_path))), asked)
    few = HfEngine(cases.engine_options(str(tmp_path), max_num_seqs=5))
    assert [one.token_ids for one in run_all(few, asked)] == [one.token_ids for one in whole]


def test_the_same_requests_give_the_same_bits(model: Any, tmp_path: Path) -> None:
    engine = HfEngine(cases.engine_options(str(tmp_path)))
    assert run_all(engine, cases.requests(40)) == run_all(engine, cases.requests(40))


def test_many_long_prompts_are_cached_in_pieces(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        dataclasses.replace(one, prompt_ids=(1,) if index % 3 else one.prompt_ids)
        for index, one in enumerate(cases.requests(24))
    ]
    whole = run_all(HfEngine(cases.engine_options(str(tmp_path))), asked)
    monkeypatch.setattr("actors.rollout.hf_engine._TOKENS_AT_ONCE", 10)
    assert [one.token_ids for one in run_all(HfEngine(cases.engine_options(str(tmp_path))), asked)] == [
        one.token_ids for one in whole
    ]


def test_aborted_requests_leave_and_the_others_do_not_notice(model: Any, tmp_path: Path) -> None:
    asked = cases.requests(12)
    whole = run_all(HfEngine(cases.engine_options(str(tmp_path))), asked)
    engine = HfEngine(cases.engine_options(str(tmp_path), max_num_seqs=8))
    for index, request in enumerate(asked):
        engine.add(str(index), request)
    done = dict(engine.step()) | dict(engine.step())
    engine.abort(["1", "11", "nobody"])
    while engine.busy:
        done |= dict(engine.step())
    assert set(done) == {str(index) for index in range(12)} - {"1", "11"}
    assert all(done[name].token_ids == whole[int(name)].token_ids for name in done)


def test_tokens_come_as_often_as_the_model_says(model: Any, tmp_path: Path) -> None:
    """First tokens of 4,000 requests against the distribution: no bin is off by more than chance."""
    engine = HfEngine(cases.engine_options(str(tmp_path), max_num_seqs=4000))
    one = cases.requests(1, max_tokens=1)[0]
    asked = [dataclasses.replace(one, seed=seed * 7919) for seed in range(4000)]
    found = torch.tensor([made.token_ids[0] for made in run_all(engine, asked)]).bincount(
        minlength=cases.VOCAB
    )
    with torch.no_grad():
        expected = 4000 * model(torch.tensor([one.prompt_ids])).logits[0, -1].softmax(-1)
    chi_square = float(((found - expected) ** 2 / expected).sum())
    assert chi_square < 100, chi_square  # 47 degrees of freedom: 1e-5 of the time


def test_a_model_with_a_window_and_a_folder_without_a_model_are_refused(model: Any, tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=48, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "window")
    with pytest.raises(RolloutError, match="attend to all earlier tokens"):
        HfEngine(cases.engine_options(str(tmp_path / "window")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RolloutError, match="cannot serve"):
        HfEngine(cases.engine_options(str(tmp_path / "empty")))


def test_too_long_and_empty_prompts_are_refused(model: Any, tmp_path: Path) -> None:
    engine = HfEngine(cases.engine_options(str(tmp_path)))
    one = cases.requests(1)[0]
    with pytest.raises(ValueError, match="48 tokens"):
        engine.add("a", dataclasses.replace(one, prompt_ids=(1,) * 40))
    with pytest.raises(ValueError, match="at least one"):
        engine.add("a", dataclasses.replace(one, prompt_ids=()))
