"""Prompts to batch columns, with an engine that needs no model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch

from actors.rollout.engine_thread import EngineThread
from actors.rollout.options import EngineOptions, RolloutOptions, check_servable, rollout_env
from actors.rollout.worker import RolloutWorker, check_answers, make_columns, make_requests, unpadded
from neoproto.config import RolloutConfig, ValKwargsConfig
from neoproto.data import DataProto
from neoproto.data.dispatch import join_rows, share_rows
from neoproto.data.generation import Generation, SamplingParams, request_seed
from neoproto.data.model_files import read_model_config
from neoproto.errors import ConfigError, RolloutError, WeightMismatch
from neoproto.rollout.engines.vllm import CPU_HEAD_DIMS
from neoproto.store.memory import MemoryStore
from neoproto.weights import PauseMode, Publisher, WeightOptions, WeightRegistry, WeightVersion
from tests.actors.fake_engine import FakeEngine

P, R, PAD = 6, 5, 0


def options(**changes: Any) -> RolloutOptions:
    values: dict[str, Any] = {
        "engine": EngineOptions(
            rollout=RolloutConfig(seed=11, n=3, val_kwargs=ValKwargsConfig(top_p=0.9)),
            model="somewhere",
            max_model_len=P + R,
            eos_token_ids=(2,),
        ),
        "max_prompt_length": P,
        "max_response_length": R,
        "pad_token_id": PAD,
    }
    return RolloutOptions(**(values | changes))


def prompts(count: int, **meta: Any) -> DataProto:
    ids = torch.zeros(count, P, dtype=torch.int64)
    lengths = torch.tensor([2 + row % 4 for row in range(count)])
    for row, length in enumerate(lengths.tolist()):
        ids[row, P - length :] = torch.arange(length) + 3
    return DataProto.from_dict(
        tensors={"prompts": ids, "prompt_len": lengths},
        non_tensors={
            "uid": np.array([f"q{row}" for row in range(count)], dtype=object),
            "data_source": np.array(["letters"] * count, dtype=object),
        },
        meta_info=meta,
    )


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engine(fake: FakeEngine) -> Iterator[EngineThread]:
    thread = EngineThread(lambda: fake)
    yield thread
    thread.close()


@pytest.fixture
def rollout(engine: EngineThread) -> RolloutWorker:
    return RolloutWorker(options(), engine)


def test_samples_lie_prompt_by_prompt_with_all_columns(rollout: RolloutWorker) -> None:
    out = asyncio.run(rollout.generate_sequences(prompts(2, validate=False, step=4)))
    assert len(out) == 6
    assert list(out["uid"]) == ["q0"] * 3 + ["q1"] * 3
    assert list(out["data_source"]) == ["letters"] * 6
    assert out.meta_info == {"validate": False, "step": 4}
    shapes = {name: tuple(out[name].shape) for name in out.batch}
    assert shapes == {
        "prompts": (6, P),
        "responses": (6, R),
        "input_ids": (6, P + R),
        "attention_mask": (6, P + R),
        "position_ids": (6, P + R),
        "response_mask": (6, R),
        "rollout_log_probs": (6, R),
        "weight_versions": (6, R),
        "truncated": (6,),
    }
    dtypes = {name: out[name].dtype for name in out.batch}
    assert dtypes.pop("rollout_log_probs") is torch.float32
    assert dtypes.pop("truncated") is torch.bool
    assert set(dtypes.values()) == {torch.int64}
    assert asyncio.run(rollout.stats())["samples"] == 6
    assert asyncio.run(rollout.stats())["tokens"] == int(out["response_mask"].sum())


def test_columns_by_hand() -> None:
    stopped = Generation(
        uid="a",
        sample_index=0,
        prompt_ids=(7, 8),
        token_ids=(9, 5, 2),
        log_probs=(-1.0, 0.0, -3.0),
        loss_mask=(1, 0, 1),
        weight_versions=(4, 4, 5),
        finish_reason="stop",
    )
    cut = Generation(
        uid="b",
        sample_index=0,
        prompt_ids=(0, 6, 7),
        token_ids=(3, 3, 3, 3),
        log_probs=(-1.0,) * 4,
        loss_mask=(1,) * 4,
        weight_versions=(5,) * 4,
        finish_reason="length",
    )
    columns = make_columns([stopped, cut], prompt_width=4, response_width=4, pad_token_id=0)
    expected = {
        "prompts": [[0, 0, 7, 8], [0, 0, 6, 7]],
        "responses": [[9, 5, 2, 0], [3, 3, 3, 3]],
        "input_ids": [[0, 0, 7, 8, 9, 5, 2, 0], [0, 0, 6, 7, 3, 3, 3, 3]],
        "attention_mask": [[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1]],
        "position_ids": [[0, 0, 0, 1, 2, 3, 4, 4], [0, 0, 1, 2, 3, 4, 5, 6]],
        "response_mask": [[1, 0, 1, 0], [1, 1, 1, 1]],
        "rollout_log_probs": [[-1.0, 0.0, -3.0, 0.0], [-1.0, -1.0, -1.0, -1.0]],
        "weight_versions": [[4, 4, 5, -1], [5, 5, 5, 5]],
        "truncated": [False, True],
    }
    assert {name: column.tolist() for name, column in columns.items()} == expected


def test_without_lengths_leading_padding_is_padding() -> None:
    ids = torch.tensor([[0, 0, 5, 0, 6], [1, 2, 3, 4, 5], [0, 7, 0, 0, 0]])
    assert unpadded(ids, None, 0) == [(5, 0, 6), (1, 2, 3, 4, 5), (7, 0, 0, 0)]
    assert unpadded(ids, torch.tensor([4, 5, 4]), 0)[0] == (0, 5, 0, 6)


def test_each_sample_has_the_seed_of_its_uid_index_and_version() -> None:
    made = make_requests(
        [(1,), (2,)], ["a", "b"], n=2, sampling=SamplingParams(max_tokens=3), run_seed=5, weight_version=9
    )
    assert [(r.uid, r.sample_index, r.prompt_ids) for r in made] == [
        ("a", 0, (1,)),
        ("a", 1, (1,)),
        ("b", 0, (2,)),
        ("b", 1, (2,)),
    ]
    assert [r.seed for r in made] == [request_seed(5, uid, i, 9) for uid in "ab" for i in (0, 1)]
    assert len({r.seed for r in made}) == 4


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
@pytest.mark.parametrize("stored", [False, True])
def test_the_number_of_replicas_changes_nothing(rollout: RolloutWorker, replicas: int, stored: bool) -> None:
    from neoproto.store import use_store

    async def spread(batch: DataProto) -> DataProto:
        shares = share_rows(batch, replicas)
        assert len(shares) == replicas
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        return join_rows([await rollout.generate_sequences(share) for share in shares])

    def run() -> None:
        whole = asyncio.run(rollout.generate_sequences(prompts(5)))
        parts = asyncio.run(spread(prompts(5)))
        assert list(parts["uid"]) == list(whole["uid"])
        for name in whole.batch:
            assert torch.equal(parts[name], whole[name]), name

    if stored:
        with use_store(MemoryStore()):
            run()
    else:
        run()


def test_validation_draws_its_own_way_and_alike_on_all_weights(
    rollout: RolloutWorker, fake: FakeEngine
) -> None:
    seen: list[tuple[int, SamplingParams]] = []
    add = fake.add

    def spy(request_id: str, request: Any) -> None:
        seen.append((request.seed, request.sampling))
        add(request_id, request)

    fake.add = spy  # type: ignore[method-assign]

    def drawn(**meta: Any) -> list[tuple[int, SamplingParams]]:
        seen.clear()
        asyncio.run(rollout.generate_sequences(prompts(2, **meta)))
        return list(seen)

    training = drawn(validate=False)
    validation = drawn(validate=True)
    asyncio.run(load(rollout, 3))
    assert len(training) == 6
    assert len(validation) == 2
    assert {sampling.top_p for _, sampling in validation} == {0.9}
    assert drawn(validate=True) == validation
    assert {seed for seed, _ in drawn(validate=False)}.isdisjoint({seed for seed, _ in training})
    greedy = drawn(validate=True, greedy=True, n=2)
    assert len(greedy) == 4
    assert all(sampling.greedy for _, sampling in greedy)


async def load(rollout: RolloutWorker, n: int, dtype: str = "float32", name: str = "w") -> None:
    store, registry, version = MemoryStore(), WeightRegistry(), WeightVersion(epoch=0, n=n)
    publisher = Publisher(store, options=WeightOptions(bucket_bytes=1 << 16, rollout_dtype=dtype))
    await registry.publish(publisher.publish(version, {name: torch.full((2,), float(n))}))
    rollout.attach(registry, store, "rollout/0")
    await rollout.agent.load(version)


def test_a_published_version_is_loaded_and_named_in_every_token(
    rollout: RolloutWorker, fake: FakeEngine
) -> None:
    asyncio.run(load(rollout, 7))
    assert fake.loaded["w"].tolist() == [7.0, 7.0]
    out = asyncio.run(rollout.generate_sequences(prompts(1)))
    assert set(out["weight_versions"][out["response_mask"] == 1].tolist()) == {7}
    assert asyncio.run(rollout.stats())["weight_version"] == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"name": "other"}, "missing: w"), ({"dtype": "bfloat16"}, "w is bfloat16")],
)
def test_weights_of_another_model_or_dtype_are_refused(
    rollout: RolloutWorker, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(WeightMismatch, match=said):
        asyncio.run(load(rollout, 1, **changes))
    assert asyncio.run(rollout.stats())["weight_version"] == 0
    assert len(asyncio.run(rollout.generate_sequences(prompts(1)))) == 3


def test_a_replica_takes_weights_from_a_registry_and_seeds_follow_them(
    rollout: RolloutWorker, fake: FakeEngine
) -> None:
    async def main() -> None:
        with pytest.raises(RolloutError, match="no weight registry was attached"):
            await rollout.agent.load(WeightVersion(epoch=0, n=1))
        registry, store = WeightRegistry(), MemoryStore()
        rollout.attach(registry, store, "rollout/0")
        with pytest.raises(RolloutError, match="rollout/0 has a weight registry already"):
            rollout.attach(registry, store, "rollout/0")
        manifest = Publisher(store).publish(WeightVersion(epoch=0, n=2), {"w": torch.full((2,), 2.0)})
        await registry.publish(manifest)
        # What arrives while the new weights are loaded is answered by them, with the seeds that are theirs.
        early: asyncio.Task[DataProto] | None = None
        pause = rollout._engine.pause

        async def pause_and_ask(mode: PauseMode, drain_s: float) -> None:
            nonlocal early
            await pause(mode, drain_s)
            early = asyncio.create_task(rollout.generate_sequences(prompts(2)))
            await asyncio.sleep(0)  # it waits for the gate now

        rollout._engine.pause = pause_and_ask  # type: ignore[method-assign]
        await rollout.agent.load(WeightVersion(epoch=0, n=2))
        assert await registry.serving() == {"rollout/0": WeightVersion(epoch=0, n=2)}
        assert early is not None
        first, again = await early, await rollout.generate_sequences(prompts(2))
        assert set(first["weight_versions"][first["response_mask"] == 1].tolist()) == {2}
        for name in first.batch:
            assert torch.equal(first[name], again[name]), name

    asyncio.run(main())
    assert fake.loaded["w"].tolist() == [2.0, 2.0]
    figures = asyncio.run(rollout.stats())
    assert (figures["weight_version"], figures["weight_loads"], figures["torn_reads"]) == (2, 1, 0)
    assert 0 < figures["load_seconds"] <= figures["pause_seconds"] <= figures["update_seconds"]


def test_answers_that_break_the_contract_are_refused() -> None:
    (request,) = make_requests(
        [(1,)], ["a"], n=1, sampling=SamplingParams(max_tokens=2), run_seed=0, weight_version=0
    )
    good = Generation(
        uid="a",
        sample_index=0,
        prompt_ids=(1,),
        token_ids=(5, 2),
        log_probs=(-1.0, -2.0),
        loss_mask=(1, 1),
        weight_versions=(0, 0),
        finish_reason="stop",
    )
    check_answers([request], [good])
    three = {
        "token_ids": (5, 5, 5),
        "log_probs": (-1.0,) * 3,
        "loss_mask": (1,) * 3,
        "weight_versions": (0,) * 3,
    }
    for changes, said in [
        ({"uid": "b"}, "got the answer of b/0"),
        (three, "has 3 tokens"),
        ({"log_probs": (-1.0, float("nan"))}, "not finite"),
        ({"log_probs": (-1.0, -float("inf"))}, "not finite"),
        ({"log_probs": (-1.0, 0.5)}, "not finite and <= 0"),
    ]:
        with pytest.raises(RolloutError, match=said):
            check_answers([request], [dataclasses.replace(good, **changes)])
    with pytest.raises(RolloutError, match="1 requests got 0 answers"):
        check_answers([request], [])


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="need 12"):
        options(max_prompt_length=P + 1)
    with pytest.raises(ConfigError, match="end-of-sequence token"):
        EngineOptions(model="m", max_model_len=4, eos_token_ids=())


def engine_options(device: Literal["cpu", "gpu"] = "cpu", **section: Any) -> EngineOptions:
    return EngineOptions(
        rollout=RolloutConfig(**section), model="m", device=device, max_model_len=4, eos_token_ids=(2,)
    )


def test_the_environment_says_threads_and_compiles_nothing_on_a_cpu() -> None:
    made = rollout_env(engine_options(num_threads=3))
    assert made["OMP_NUM_THREADS"] == "3"
    assert made["TORCHDYNAMO_DISABLE"] == "1"
    assert made["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert (made["VLLM_HOST_IP"], made["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    gpu = rollout_env(engine_options("gpu"))
    assert "TORCHDYNAMO_DISABLE" not in gpu
    hf = rollout_env(engine_options(name="hf", num_threads=3))
    assert hf["OMP_NUM_THREADS"] == "3"
    assert not any(name.startswith("VLLM") for name in hf)
    with pytest.raises(ConfigError, match="name=hf runs on CPUs only; on a GPU take vllm"):
        engine_options("gpu", name="hf")


def test_a_model_that_cannot_be_served_is_refused_early(tmp_path: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 96, "num_attention_heads": 4, "max_position_embeddings": 16}')
    with pytest.raises(ConfigError) as caught:
        check_servable(tmp_path, max_model_len=20, device="cpu", field="model.path", engine="vllm")
    assert "has 16 positions" in caught.value.problems[0]
    assert "heads of size 24" in caught.value.problems[1]
    assert 24 not in CPU_HEAD_DIMS
    check_servable(tmp_path, max_model_len=16, device="gpu", field="model.path", engine="vllm")
    check_servable(tmp_path, max_model_len=16, device="cpu", field="model.path", engine="hf")
    check_servable(tmp_path, max_model_len=16, device="cpu", field="model.path", engine=None)
    config.write_text("{")
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json cannot be read"):
        check_servable(tmp_path, max_model_len=20, device="cpu", field="model.path", engine="vllm")


def test_sizes_are_found_under_the_names_of_gpt2(tmp_path: Any) -> None:
    sizes = {"n_embd": 96, "n_head": 4, "n_layer": 2, "n_positions": 16}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    found = read_model_config(tmp_path, field="model.path")
    assert (found["num_attention_heads"], found["num_hidden_layers"]) == (4, 2)
    with pytest.raises(ConfigError, match=r"16 positions .*\n.*heads of size 24"):
        check_servable(tmp_path, max_model_len=20, device="cpu", field="model.path", engine="vllm")


def test_the_controller_imports_the_worker_without_vllm() -> None:
    import subprocess
    import sys

    code = "import sys, actors.rollout.worker; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
