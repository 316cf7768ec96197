"""Checks of the real engine, run by `python -m tests.actors.engine_cases CASE FOLDER`.

vLLM changes the process it is imported into (environment, thread counts, warnings), so it gets its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import errno
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from actors.rollout.options import EngineOptions, rollout_env
from neoproto.config import RolloutConfig
from neoproto.errors import NeoProtoError, RolloutError, WeightMismatch
from neoproto.rollout.engines.vllm import CPU_HEAD_DIMS
from tests.actors.stub_http import serving

EOS = 2
VOCAB = 48


def engine_options(folder: str, **changes: Any) -> EngineOptions:
    max_model_len = changes.pop("max_model_len", 48)
    rollout = RolloutConfig(**({"max_num_seqs": 64} | changes))
    return EngineOptions(rollout=rollout, model=folder, max_model_len=max_model_len, eos_token_ids=(EOS,))


def make_model(folder: Path, *, tied: bool = False, heads: int = 2) -> Any:
    """A tiny Llama whose distributions are far from uniform."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    perturb(model, 0.1)
    model.save_pretrained(folder)
    return model


def perturb(model: Any, size: float) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * size)


def requests(count: int, *, name: str = "u", seed: int = 0, **sampling: Any) -> list[Any]:
    from neoproto.data.generation import GenerateRequest, SamplingParams, request_seed

    drawing = SamplingParams(**({"max_tokens": 12} | sampling))
    return [
        GenerateRequest(
            uid=f"{name}{index // 4}",
            sample_index=index % 4,
            prompt_ids=(1, *range(5, 8 + index // 4 % 20)),
            sampling=drawing,
            seed=request_seed(seed, f"{name}{index // 4}", index % 4, 0),
        )
        for index in range(count)
    ]


def log_probs(model: Any, made: Any, temperature: float) -> Any:
    """Log-probs of a generation's tokens, as transformers computes them."""
    import torch

    ids = torch.tensor([made.prompt_ids + made.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(made.prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[0, len(made.prompt_ids) :, None])[:, 0]


def worst_difference(model: Any, generations: list[Any], temperature: float) -> float:
    """Largest difference between the engine's log-probs and those that transformers computes."""
    import torch

    return max(
        (log_probs(model, made, temperature) - torch.tensor(made.log_probs)).abs().max().item()
        for made in generations
    )


def weights_of(model: Any) -> dict[str, Any]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def layout_of(weights: dict[str, Any]) -> dict[str, Any]:
    from neoproto.weights import TensorLayout

    return {name: TensorLayout.of(tensor) for name, tensor in weights.items()}


async def raised(call: Any) -> BaseException:
    try:
        await call
    except NeoProtoError as error:
        return error
    raise AssertionError("nothing was raised")


def start(folder: str, **changes: Any) -> Any:
    from actors.rollout.engine_thread import EngineThread
    from actors.rollout.vllm_engine import VllmEngine

    return EngineThread(lambda: VllmEngine(engine_options(folder, **changes)))


def case_sampling(folder: Path) -> None:
    """Log-probs, seeds, end tokens, top-k, greedy, overlap, many tokens, loading, a load that breaks off."""
    model = make_model(folder)
    engine = start(str(folder))
    asyncio.run(check_log_probs(engine, model))
    asyncio.run(check_independence(engine))
    asyncio.run(check_many_tokens_at_once(engine, model))
    asyncio.run(check_cut_distributions(engine, model))
    asyncio.run(check_loading(engine, model))
    engine.close()
    check_end()


def check_end() -> None:
    """The end of the process does not wait for vLLM to take itself apart."""
    waiting = [
        entry.func.__qualname__
        for entry in weakref.finalize._registry.values()  # type: ignore[attr-defined]
        if entry.atexit and entry.func.__module__.startswith("vllm.v1.engine")
    ]
    assert waiting == [], waiting


async def check_log_probs(engine: Any, model: Any) -> None:
    for temperature in (1.0, 0.6):
        made = await engine.generate(requests(48, temperature=temperature))
        assert worst_difference(model, made, temperature) < 1e-4
        assert worst_difference(model, made, 0.8) > 1e-2
    reasons = {one.finish_reason for one in made}
    assert reasons == {"stop", "length"}, reasons
    for one in made:
        assert (one.token_ids[-1] == EOS) == (one.finish_reason == "stop")
        assert EOS not in one.token_ids[:-1]
        assert one.finish_reason == "stop" or len(one.token_ids) == 12
        assert one.loss_mask == (1,) * len(one.token_ids)
        assert set(one.weight_versions) == {0}


async def check_independence(engine: Any) -> None:
    """The same tokens whatever else runs: all at once, in pieces at once, in pieces one after another."""
    asked = requests(40)
    whole = await engine.generate(asked)
    assert [(one.uid, one.sample_index) for one in whole] == [(one.uid, one.sample_index) for one in asked]
    at_once = await asyncio.gather(*(engine.generate(asked[start : start + 7]) for start in range(0, 40, 7)))
    in_turn = [await engine.generate(asked[start : start + 7]) for start in range(0, 40, 7)]
    for pieces in (at_once, in_turn):
        assert [one.token_ids for piece in pieces for one in piece] == [one.token_ids for one in whole]
    again = await engine.generate(requests(40, seed=1))
    assert [one.token_ids for one in again] != [one.token_ids for one in whole]
    assert len({one.token_ids for one in whole[:4]}) > 1


async def check_many_tokens_at_once(engine: Any, model: Any) -> None:
    """More prompt tokens than the engine takes in a step, 2,048, no multiple of the prompts' length."""
    asked = [
        dataclasses.replace(one, prompt_ids=(1, 3 + index % 45, 3 + index // 45, *range(4, 37)))
        for index, one in enumerate(requests(64))
    ]
    assert sum(len(one.prompt_ids) for one in asked) == 64 * 36 > 2048
    made = await engine.generate(asked)
    assert worst_difference(model, made, 1.0) < 1e-4
    few = [one for start in range(0, 64, 32) for one in await engine.generate(asked[start : start + 32])]
    assert [one.token_ids for one in few] == [one.token_ids for one in made]


async def check_cut_distributions(engine: Any, model: Any) -> None:
    """With top-k, log-probs are those of the cut distribution; greedy ones those at temperature 1."""
    made = await engine.generate(requests(16, top_k=2))
    assert worst_difference(model, made, 1.0) > 1e-2
    greedy = await engine.generate(requests(8, greedy=True, temperature=0.5))
    assert worst_difference(model, greedy, 1.0) < 1e-4
    for four in (greedy[:4], greedy[4:]):
        assert len({one.token_ids for one in four}) == 1


async def check_loading(engine: Any, model: Any) -> None:
    import torch

    from neoproto.weights import WeightVersion

    perturb(model, 0.05)
    weights = weights_of(model)
    await engine.check_layout(layout_of(weights), "weights")
    await engine.load(WeightVersion(epoch=0, n=3), weights)
    made = await engine.generate(requests(16))
    assert worst_difference(model, made, 1.0) < 1e-4
    assert {version for one in made for version in one.weight_versions} == {3}

    partial = {name: tensor for name, tensor in weights.items() if "norm" not in name}
    error = await raised(engine.check_layout(layout_of(partial), "weights"))
    assert isinstance(error, WeightMismatch)
    assert "model.norm.weight" in str(error)
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    error = await raised(engine.check_layout(layout_of(half), "weights"))
    assert isinstance(error, WeightMismatch)
    assert "bfloat16" in str(error)
    assert len(await engine.generate(requests(2))) == 2

    too_long = await raised(engine.generate(requests(1, max_tokens=500)))
    assert isinstance(too_long, RolloutError)

    error = await raised(engine.load(WeightVersion(epoch=0, n=9), partial))
    assert isinstance(error, WeightMismatch)
    assert "unloaded" in str(error)
    error = await raised(engine.generate(requests(1)))
    assert isinstance(error, RolloutError)
    assert "has failed" in str(error)
    assert torch.get_num_threads() == 1


def case_changing(folder: Path) -> None:
    """Weights that change in mid-generation, in both modes; the prefix cache is on."""
    model = make_model(folder)
    engine = start(str(folder))
    try:
        for n, mode in enumerate(("keep", "abort"), start=1):
            model = asyncio.run(check_changing(engine, model, mode, n))
    finally:
        engine.close()


async def check_changing(engine: Any, old: Any, mode: str, n: int) -> Any:
    """Load version `n` after six steps; every token's log-prob is its own policy's. Returns the new model.

    Prompts are longer than a block of the prefix cache, and the late ones are those in flight.
    """
    from neoproto.weights import WeightVersion

    new = copy.deepcopy(old)
    perturb(new, 0.1)
    weights = weights_of(new)
    asked = long_requests(24)
    running = await running_for(engine, asked, steps=6)
    await pause_now(engine, mode)
    late = asyncio.create_task(engine.generate(long_requests(24, seed=n)))
    await asyncio.sleep(0.05)
    await engine.load(WeightVersion(epoch=0, n=n), weights)
    await engine.resume()
    made = await running
    spans = [one for one in made if len(one.token_ids) > 6]
    assert len(spans) > 12
    for one in made:
        assert one.weight_versions == ((n - 1,) * 6 + (n,) * 12)[: len(one.token_ids)]
        assert one.prompt_ids == asked[0].prompt_ids
        assert len(one.token_ids) <= 12
        assert (one.token_ids[-1] == EOS) == (one.finish_reason == "stop")
    check_policies(spans, old, new)
    after = await late
    assert worst_difference(new, after, 1.0) < 1e-4
    assert {version for one in after for version in one.weight_versions} == {n}
    again = await engine.generate(long_requests(24, seed=n))
    assert [one.token_ids for one in again] == [one.token_ids for one in after]
    assert 0 < engine.times.last_loading <= engine.times.last_paused
    return new


def check_policies(spans: list[Any], old: Any, new: Any) -> None:
    """The importance ratio of the new policy: 1 on the tokens it drew itself, old to new on the others."""
    import torch

    for one in spans:
        drawn = torch.tensor(one.log_probs)
        under_old, under_new = (log_probs(model, one, 1.0) for model in (old, new))
        assert (drawn - under_old)[:6].abs().max() < 1e-4
        assert (drawn - under_new)[6:].abs().max() < 1e-4
        ratio = (under_new - drawn).exp()
        assert torch.allclose(ratio[6:], torch.ones_like(ratio[6:]), atol=1e-4)
        assert torch.allclose(ratio[:6], (under_new - under_old).exp()[:6], rtol=1e-3)
        assert (ratio[:6] - 1).abs().max() > 1e-2


def long_requests(count: int, *, seed: int = 0) -> list[Any]:
    """Samples of one prompt of 36 tokens."""
    import dataclasses

    prompt = (1, *range(5, 40))
    return [dataclasses.replace(one, prompt_ids=prompt) for one in requests(count, name="w", seed=seed)]


async def running_for(engine: Any, asked: list[Any], *, steps: int) -> Any:
    """The task that generates, stopped in the last of so many steps until the engine is asked to pause."""
    inner, step, done, reached = engine._engine, engine._engine.step, 0, threading.Event()

    def counted() -> Any:
        nonlocal done
        done += 1
        if done == steps:
            inner.step = step
            reached.set()
            assert engine.pausing.wait(60)
        return step()

    inner.step, engine.pausing = counted, threading.Event()
    running = asyncio.create_task(engine.generate(asked))
    assert await asyncio.to_thread(reached.wait, 60)
    return running


async def pause_now(engine: Any, mode: str) -> None:
    pausing = asyncio.create_task(engine.pause(mode, 0.0))
    await asyncio.sleep(0.05)
    engine.pausing.set()
    await pausing


def case_tied(folder: Path) -> None:
    """Tied embeddings are one tensor of a version, under one name or both."""
    model = make_model(folder, tied=True)
    engine = start(str(folder))
    asyncio.run(check_tied(engine, model))
    engine.close()


async def check_tied(engine: Any, model: Any) -> None:
    from neoproto.weights import WeightVersion

    perturb(model, 0.05)
    once = weights_of(model)
    assert "lm_head.weight" not in once
    both = once | {"lm_head.weight": once["model.embed_tokens.weight"]}
    for n, weights in enumerate((once, both), start=1):
        await engine.check_layout(layout_of(weights), "weights")
        await engine.load(WeightVersion(epoch=0, n=n), weights)
        made = await engine.generate(requests(16))
        assert worst_difference(model, made, 1.0) < 1e-4
        assert {version for one in made for version in one.weight_versions} == {n}


def case_transfer(folder: Path) -> None:
    """A server's workers load versions through vLLM's weight-transfer plug point, tied embeddings too.

    The server's routes are a stub that does what vLLM's own do with the engine.
    """
    from vllm.config import WeightTransferConfig

    from actors.rollout import vllm_engine, vllm_server
    from neoproto.packages import vllm_plugin

    model = make_model(folder, tied=True)
    own = vllm_engine.engine_args
    vllm_plugin()

    def engine_args(options: EngineOptions) -> Any:
        args = own(options)
        args.weight_transfer_config = WeightTransferConfig(backend=vllm_server.BACKEND)
        return args

    vllm_engine.engine_args = engine_args
    engine = start(str(folder))
    try:
        with stub_server(engine._engine._engine) as url:
            asyncio.run(check_transfer(engine, model, url))
    finally:
        engine.close()


async def check_transfer(engine: Any, model: Any, url: str) -> None:
    from actors.rollout.vllm_server import ServerEngine
    from neoproto.weights import WeightVersion

    before = await engine.generate(requests(8))
    perturb(model, 0.1)
    weights = weights_of(model)
    tied = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    server = ServerEngine(url, layout_of(tied))
    await server.check_layout(layout_of(tied), "weights")
    await server.pause("keep", 0.0)
    await server.load(WeightVersion(epoch=0, n=7), tied)
    await server.resume()
    made = await engine.generate(requests(8))
    assert worst_difference(model, made, 1.0) < 1e-4
    assert worst_difference(model, before, 1.0) > 1e-2
    assert {version for one in made for version in one.weight_versions} == {7}
    partial = {name: tensor for name, tensor in weights.items() if "norm" not in name}
    error = await raised(server.load(WeightVersion(epoch=0, n=8), partial))
    assert "parameters unloaded" in str(error), error


@contextlib.contextmanager
def stub_server(llm: Any) -> Iterator[str]:
    """The routes of `vllm.entrypoints.rl.online.api_router`, on an engine in this process."""
    routes: dict[str, Callable[[dict[str, Any]], object]] = {
        "/pause": lambda body: None,
        "/resume": lambda body: None,
        "/start_weight_update": lambda body: llm.collective_rpc("start_weight_update"),
        "/update_weights": lambda body: llm.collective_rpc("update_weights", kwargs=body),
        "/finish_weight_update": lambda body: (
            llm.collective_rpc("finish_weight_update"),
            llm.set_weight_version(body["weight_version"]),
        ),
        "/reset_prefix_cache": lambda body: llm.reset_prefix_cache(reset_running_requests=True),
    }
    with serving(lambda route, body: routes[route.partition("?")[0]](body)) as url:
        yield url


def case_refused(folder: Path) -> None:
    """What vLLM cannot serve is a RolloutError of the model; the head sizes we know are those vLLM has."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_DIMS
    make_model(folder)
    with pytest.raises(RolloutError, match=r"vLLM cannot serve .*max_model_len \(5000\)"):
        start(str(folder), max_model_len=5000)
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch("actors.rollout.vllm_engine.LLMEngine.from_engine_args", side_effect=full),
        mock.patch("actors.rollout.vllm_engine.is_full", lambda folder: str(folder) == "/dev/shm"),
        pytest.raises(RolloutError, match=r"No space left on device \(/dev/shm is full\)"),
    ):
        start(str(folder))


CASES: dict[str, Callable[[Path], None]] = {
    "sampling": case_sampling,
    "changing": case_changing,
    "tied": case_tied,
    "transfer": case_transfer,
    "refused": case_refused,
}


def environment(folder: str) -> dict[str, str]:
    return {**os.environ, **rollout_env(engine_options(folder))}


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
